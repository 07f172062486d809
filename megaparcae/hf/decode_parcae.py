"""One new token per row through the whole model, with as few kernels and Python calls as possible.

The same arithmetic as `ParcaeModel`, which is the definition and the test; in a small model a
decoding step is mostly the cost of calling things. Used for plain modules without hooks.
This file is copied into every exported folder: it needs torch and transformers and nothing else.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu, softplus

from .blocks_parcae import (
    QK_NORM_EPS,
    VALUE_GATE_INPUTS,
    AdditiveInjection,
    DiagonalInjection,
    LinearInjection,
    ParcaeAttention,
    ParcaeBlock,
    ParcaeMLP,
    ParcaeRMSNorm,
)
from .cache_parcae import LoopCacheLayer, ParcaeCache
from .early_exit_parcae import EarlyExit, run_until_settled

# B rows, d width, H query heads, G key/value heads, hd head width, N cached positions

JOINED = 1 << 16
"""Query weights up to this size are joined with those of keys and values (in a copy): for a small
matrix, calling the product costs more than the product."""
FEW_ROWS, LARGE = 32, 1 << 16
"""Up to so many rows and from this size of a weight on, a product in fp32 on a CPU is faster with
the rows on the right: 1.4 to 2.4 times at 8 rows and widths of 256 to 4096, measured."""
CONTAINERS = (nn.ModuleList, nn.ModuleDict, ParcaeBlock, ParcaeAttention, ParcaeMLP)
PLAIN = (*CONTAINERS, nn.Linear, nn.Embedding, ParcaeRMSNorm)
INJECTIONS = (DiagonalInjection, LinearInjection, AdditiveInjection)


class Norm:
    """weight * x / sqrt(mean(x^2) + eps), the normalisation in fp32, for x [..., width].

    Computed as weight sqrt(width) x / sqrt(|x|^2 + width eps).
    """

    def __init__(self, norm: ParcaeRMSNorm) -> None:
        self.width = width = norm.weight.shape[0]
        self.weight = norm.weight
        self.root = math.sqrt(width)
        self.scaled = norm.weight.float() * self.root
        self.floor = norm.weight.new_tensor(math.sqrt(width * norm.eps), dtype=torch.float32)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype is torch.float32:
            size = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self.floor)
            return torch.mul(x, self.scaled).div_(size)
        y = x.float()
        size = torch.linalg.vector_norm(y, dim=-1, keepdim=True).hypot_(self.floor)
        return torch.mul(y, self.root).div_(size).to(x.dtype) * self.weight


class Product:
    """x [B, k] to x W^T for a weight W [n, k]."""

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.transposed = weight, weight.t()
        is_large = weight.device.type == "cpu" and weight.numel() >= LARGE
        self.few = FEW_ROWS if is_large and weight.dtype is torch.float32 else 1

    def __call__(self, x: Tensor) -> Tensor:
        if 1 < x.shape[0] <= self.few:
            return torch.mm(self.weight, x.t()).t().contiguous()
        return torch.mm(x, self.transposed)

    def added(self, base: Tensor, x: Tensor, scale: float = 1.0) -> Tensor:
        """base + scale x W^T."""
        if 1 < x.shape[0] <= self.few:
            return torch.add(base, self(x), alpha=scale)
        return torch.addmm(base, x, self.transposed, alpha=scale)


class Step(NamedTuple):
    """What all blocks share in one step."""

    value_rows: dict[int, Tensor]
    """By stored layer: [B, G, hd]."""
    turn: Tensor
    """Rotation by the position, complex [B or 1, 1, hd / 2]."""
    mask: Tensor | None
    """True where a row may look: [B, 1, 1, N]; None when it may look everywhere."""
    start: int
    """Positions in the cache before this step."""
    rows: Tensor | None = None
    """Rows of the batch that are computed; None is all of them."""

    def select(self, rows: Tensor) -> "Step":
        """The same for some rows only (early exit)."""
        return Step(
            value_rows={i: table[rows] for i, table in self.value_rows.items()},
            turn=self.turn[rows] if self.turn.shape[0] > 1 else self.turn,
            mask=None if self.mask is None else self.mask[rows],
            start=self.start,
            rows=rows,
        )


class BlockDecoder:
    """A ParcaeBlock on one new token per row."""

    def __init__(self, block: ParcaeBlock) -> None:
        attention, mlp = block.attention, block.mlp
        self.layer, self.scale = block.layer, block.scale
        self.heads, self.kv_heads = attention.heads, attention.kv_heads
        self.head_dim, self.clip = attention.head_dim, attention.clip
        self.grouped = self.heads != self.kv_heads
        self.norm, self.mlp_norm = Norm(block.attention_norm), Norm(block.mlp_norm)
        sandwich = block.attention_post_norm is not None
        self.post_norm = Norm(block.attention_post_norm) if sandwich else None
        self.mlp_post_norm = Norm(block.mlp_post_norm) if sandwich else None
        self.qk_floor = None
        if attention.qk_norm:
            floor = math.sqrt(self.head_dim * QK_NORM_EPS)
            self.qk_floor = self.norm.floor.new_tensor(floor)
        has_bias = attention.q_bias is not None
        self.bias = torch.cat([attention.q_bias, attention.k_bias]) if has_bias else None
        self.gate = None if attention.value_gate is None else Product(attention.value_gate.weight)
        projections = (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
        self.projections = tuple(Product(weight) for weight in projections)
        self.joined = self.join(projections) if projections[0].numel() <= JOINED else None
        self.out = Product(attention.o_proj.weight)
        self.up, self.down = Product(mlp.up_proj.weight), Product(mlp.down_proj.weight)
        self.mlp_gate = None if mlp.gate_proj is None else Product(mlp.gate_proj.weight)
        self.mlp_scale = self.scale * (0.5 if self.mlp_gate is None else 1.0)

    def join(self, projections: tuple[Tensor, ...]) -> Product:
        """Queries, keys, values and the value gate as one matrix [(H + 2 G) hd + G or so, d]."""
        parts = [*projections]
        if self.gate is not None:
            gate = projections[0].new_zeros(self.kv_heads + self.kv_heads % 2, self.norm.width)
            gate[: self.kv_heads, :VALUE_GATE_INPUTS] = self.gate.weight
            parts.append(gate)
        return Product(torch.cat(parts))

    def __call__(self, x: Tensor, step: Step, layer: LoopCacheLayer) -> Tensor:
        """x [B, d] to the block's output [B, d]; writes position `step.start` of `layer`."""
        out = self.attend(self.norm(x), step, layer)
        x = self.out.added(x, out, self.scale)
        if self.post_norm is not None:
            x = self.post_norm(x)
        y = self.mlp_norm(x)
        inner = self.up(y)
        if self.mlp_gate is None:
            inner = inner.relu_().square_()
        else:
            inner *= silu(self.mlp_gate(y))
        x = self.down.added(x, inner, self.mlp_scale)
        return x if self.mlp_post_norm is None else self.mlp_post_norm(x)

    def attend(self, y: Tensor, step: Step, layer: LoopCacheLayer) -> Tensor:
        """Attention output before the projection: [B, H hd]."""
        rows, heads = y.shape[0], self.heads
        qk, v = self.project(y, step.value_rows.get(self.layer))
        if self.clip is not None:
            qk, v = qk.clamp(-self.clip, self.clip), v.clamp(-self.clip, self.clip)
        if self.bias is not None:
            qk = qk + self.bias
        qk = self.rotate(qk.float(), step.turn).to(y.dtype).unsqueeze(2)  # [B, H + G, 1, hd]
        v = v.unsqueeze(2)
        if step.rows is None:
            keys, values = layer.append_token(qk[:, heads:], v, step.start)
        else:
            keys, values = layer.update(qk[:, heads:], v, start=step.start, rows=step.rows)
        out = scaled_dot_product_attention(
            qk[:, :heads], keys, values, step.mask, enable_gqa=self.grouped
        )
        return out.reshape(rows, -1)

    def project(self, y: Tensor, value_rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """Queries and keys [B, H + G, hd], and values [B, G, hd] with their embedding."""
        rows, hd, kv_heads = y.shape[0], self.head_dim, self.kv_heads
        num_qk, num_v = (self.heads + kv_heads) * hd, kv_heads * hd
        gate = None
        if self.joined is not None:
            out = self.joined(y)
            qk, v = out.narrow(1, 0, num_qk), out.narrow(1, num_qk, num_v)
            if self.gate is not None:
                gate = out.narrow(1, num_qk + num_v, kv_heads)
        else:
            q, k, v = self.projections
            qk, v = torch.cat([q(y), k(y)], dim=1), v(y)
            if self.gate is not None:
                gate = self.gate(y[:, :VALUE_GATE_INPUTS])
        v = v.view(rows, kv_heads, hd)
        if gate is not None:
            v = torch.addcmul(v, torch.sigmoid(gate).unsqueeze(2), value_rows, value=2)
        return qk.view(rows, -1, hd), v

    def rotate(self, qk: Tensor, turn: Tensor) -> Tensor:
        """Rotation and QK-norm of [B, H + G, hd] fp32; the first leaves the norm as it is."""
        pairs = torch.view_as_complex(qk.view(*qk.shape[:2], -1, 2))
        turned = torch.view_as_real(pairs * turn).view(qk.shape)
        if self.qk_floor is None:
            return turned
        size = torch.linalg.vector_norm(qk, dim=-1, keepdim=True).hypot_(self.qk_floor)
        return turned.div_(size)


class Decoder:
    """A ParcaeForCausalLM on one new token per row; holds its tensors, and copies of small ones."""

    def __init__(self, language_model: nn.Module) -> None:
        model, config = language_model.model, language_model.config
        self.model = model
        self.head = Product(language_model.lm_head.weight)
        self.is_looped, self.num_loops = config.is_looped, config.num_loops
        self.head_dim = config.head_dim
        self.embedding = model.embedding.weight
        self.scale = math.sqrt(config.hidden_size) if config.scale_embeddings else None
        self.tables = {int(i): table.weight for i, table in model.value_embeddings.items()}
        self.final_norm = Norm(model.final_norm)
        hd, device = config.head_dim, self.embedding.device
        pair = torch.arange(0, hd, 2, device=device, dtype=torch.float32)
        self.frequency = 1.0 / config.rope_theta ** (pair / hd)
        self.radius = torch.full_like(self.frequency, math.sqrt(hd) if config.qk_norm else 1.0)
        if not config.is_looped:
            self.layers = [BlockDecoder(block) for block in model.layers]
            return
        self.prelude = [BlockDecoder(block) for block in model.prelude]
        self.core = [BlockDecoder(block) for block in model.core]
        self.coda = [BlockDecoder(block) for block in model.coda]
        self.prelude_norm = Norm(model.prelude_norm) if model.prelude_norm is not None else None
        self.first_slot = len(self.prelude) + len(self.coda)
        self.has_start_state = config.initial_state != "zero"
        self.readout = None if model.readout is None else Product(model.readout.weight)
        self.loop_norm = self.final_norm if config.loop_norm else None
        self.prepare_injection(model.injection, config.hidden_size)

    def prepare_injection(self, injection: nn.Module, d: int) -> None:
        """u = decay * h + step * (e drive), u = h state + e drive, or u = h + e."""
        self.decay, self.step_size, self.state, self.drive = None, None, None, None
        match injection:
            case DiagonalInjection():
                step = softplus(injection.dt_bias.float())
                decay = torch.exp(-step * torch.exp(injection.A_log.float()))
                self.step_size, self.decay = step.to(injection.B.dtype), decay.to(injection.B.dtype)
                self.drive = Product(injection.B)
            case LinearInjection():
                self.state = Product(injection.weight[:, :d])
                self.drive = Product(injection.weight[:, d:])

    def __call__(
        self,
        ids: Tensor,  # [B, 1]
        cache: ParcaeCache,
        start: int,
        *,
        mask: Tensor | None,  # [B, start + 1]
        position_ids: Tensor | None,  # [B or 1, 1]
        num_loops: int | None,
        early_exit: EarlyExit | None,
    ) -> Tensor:
        """Scores [B, 1, V] without the cap; appends to the cache. `num_loops` None is the
        configuration's."""
        ids = ids[:, 0]
        x = torch.embedding(self.embedding, ids)
        if self.scale is not None:
            x = x * self.scale
        if mask is not None and bool(mask.all()):
            mask = None
        if position_ids is None and mask is not None:
            position_ids = mask.long().sum(-1, keepdim=True) - 1
        step = Step(
            value_rows={
                i: torch.embedding(table, ids).view(len(ids), -1, self.head_dim)
                for i, table in self.tables.items()
            },
            turn=self.rotation(start, position_ids),
            mask=None if mask is None else mask.bool()[:, None, None],
            start=start,
        )
        if self.is_looped:
            loops = self.num_loops if num_loops is None else num_loops
            x = self.run_looped(x, step, cache, position_ids, loops, early_exit)
        else:
            for i, block in enumerate(self.layers):
                x = block(x, step, cache.layer(i))
            x = self.final_norm(x)
        return self.head(x)[:, None]

    def rotation(self, start: int, position_ids: Tensor | None) -> Tensor:
        """Complex [B or 1, 1, hd / 2]; QK-norm's factor sqrt(hd) is its radius."""
        if position_ids is None:
            return torch.polar(self.radius, self.frequency * float(start))[None, None]
        angle = position_ids.float() * self.frequency
        return torch.polar(self.radius.expand_as(angle), angle).unsqueeze(1)

    def run_looped(
        self,
        x: Tensor,
        step: Step,
        cache: ParcaeCache,
        position_ids: Tensor | None,
        num_loops: int,
        rule: EarlyExit | None,
    ) -> Tensor:
        """Prelude, loop and coda of embeddings x [B, d]; the normalised output."""
        for i, block in enumerate(self.prelude):
            x = block(x, step, cache.layer(i))
        e = x if self.prelude_norm is None else self.prelude_norm(x)
        h = None
        if self.has_start_state:
            if position_ids is None:
                position_ids = torch.full((1, 1), step.start, device=x.device)
            h = self.model.start_state(e[:, None], position_ids)[:, 0]
        term = e if self.drive is None else self.drive(e)
        if self.step_size is not None:
            term = term.mul_(self.step_size)
        if rule is None:
            for t in range(num_loops):
                h = self.run_core(h, term, step, cache, t)
            return self.run_coda(h, step, cache)
        h = torch.zeros_like(e) if h is None else h
        return self.exit_early(h, term, step, cache, num_loops, rule)

    def run_core(
        self, h: Tensor | None, term: Tensor, step: Step, cache: ParcaeCache, t: int
    ) -> Tensor:
        """One loop: injection, then the core blocks; a state of zero may be None."""
        if h is None:
            x = term
        elif self.decay is not None:
            x = torch.addcmul(term, self.decay, h)
        elif self.state is not None:
            x = self.state.added(term, h)
        else:
            x = term + h
        first = self.first_slot + cache.slot(t) * len(self.core)
        for j, block in enumerate(self.core):
            x = block(x, step, cache.layer(first + j))
        return x

    def run_coda(self, h: Tensor, step: Step, cache: ParcaeCache) -> Tensor:
        """Readout, coda and final norm of the state h [B, d]."""
        x = h if self.loop_norm is None else self.loop_norm(h)
        x = x if self.readout is None else self.readout(x)
        for i, block in enumerate(self.coda):
            x = block(x, step, cache.layer(len(self.prelude) + i))
        return self.final_norm(x)

    def exit_early(
        self,
        h: Tensor,
        term: Tensor,
        step: Step,
        cache: ParcaeCache,
        num_loops: int,
        rule: EarlyExit,
    ) -> Tensor:
        """The loops that every row needs, and the coda."""

        def core(h: Tensor, t: int, rows: Tensor | None) -> Tensor:
            some = step if rows is None else step.select(rows)
            return self.run_core(h, term if rows is None else term[rows], some, cache, t)

        def coda(h: Tensor, rows: Tensor | None) -> Tensor:
            return self.run_coda(h, step if rows is None else step.select(rows), cache)[:, None]

        def leave(rows: Tensor, t: int) -> None:
            self.model.fill_skipped_loops(cache, step.start, rows, t, num_loops)

        h, used = run_until_settled(h, num_loops, rule, core, coda, leave)
        cache.record_loops(used)
        return self.run_coda(h, step, cache)


def make_decoder(model: nn.Module) -> Decoder | None:
    """Of a ParcaeForCausalLM. None when something isn't plain: hooks, adapters, quantised weights,
    several devices, another attention, outputs of layers that are asked for."""
    config = model.config
    if config._attn_implementation != "sdpa":
        return None
    if config.output_hidden_states or config.output_attentions:
        return None
    kinds = {(p.dtype, p.device) for p in model.parameters()}
    if len(kinds) != 1 or not next(iter(kinds))[0].is_floating_point:
        return None
    for name, module in model.named_modules():
        if not name:
            continue  # it is the caller
        if name != "model" and type(module) not in (*PLAIN, *INJECTIONS):
            return None
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return None
        if isinstance(module, nn.Linear) and module.bias is not None:
            return None
    return Decoder(model)


__all__ = ["Decoder", "make_decoder"]
