"""Parcae, RDM/Huginn and the fixed-depth Transformer for Hugging Face transformers.

    x = embedding(ids);  e = norm(prelude(x))
    u = inject(h, e);  h = core(u)            num_loops times, the same blocks every time
    logits = head(norm(coda(readout(h))))

This file is copied into every exported folder with the other *_parcae.py files: together they
need torch and transformers and nothing else.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .blocks_parcae import (
    Context,
    DiagonalInjection,
    Drive,
    LinearInjection,
    ParcaeAttention,
    ParcaeBlock,
    ParcaeRMSNorm,
    eager_attention_forward,
    make_injection,
    rotary_table,
    start_state_table,
)
from .cache_parcae import ParcaeCache
from .configuration_parcae import ParcaeConfig
from .decode_parcae import Decoder, make_decoder
from .early_exit_parcae import DEFAULT_THRESHOLDS, EarlyExit, run_until_settled

# B rows, S positions, d width, H query heads, G key/value heads, hd head width, V vocabulary


class ParcaePreTrainedModel(PreTrainedModel):
    """Weights, and what transformers may do with the model."""

    config_class = ParcaeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _input_embed_layer = "embedding"
    _no_split_modules = ["ParcaeBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["cache", "past_key_values"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": ParcaeBlock,
        "attentions": ParcaeAttention,
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """A plain start for new weights: N(0, 2/5d), norms 1, decay sqrt(1/5)."""
        std = math.sqrt(2 / (5 * self.config.hidden_size))
        match module:
            case nn.Linear() | nn.Embedding():
                init.normal_(module.weight, 0.0, std)
            case ParcaeRMSNorm():
                init.ones_(module.weight)
            case LinearInjection():
                init.normal_(module.weight, 0.0, std)
            case DiagonalInjection():
                init.zeros_(module.A_log)
                init.constant_(module.dt_bias, math.log(math.expm1(0.5 * math.log(5))))
                init.eye_(module.B)
            case ParcaeAttention() if module.q_bias is not None:
                init.zeros_(module.q_bias)
                init.zeros_(module.k_bias)


class ParcaeModel(ParcaePreTrainedModel):
    """Everything but the head."""

    def __init__(self, config: ParcaeConfig) -> None:
        super().__init__(config)
        d = config.hidden_size
        self.embedding = nn.Embedding(config.vocab_size, d)
        width = config.num_key_value_heads * config.head_dim
        self.value_embeddings = nn.ModuleDict(
            {str(i): nn.Embedding(config.vocab_size, width) for i in config.value_embedding_layers}
        )
        if config.is_looped:
            self._add_loop(config)
        else:
            self.layers = self._blocks(0, config.num_layers)
        self.final_norm = ParcaeRMSNorm(d, config.rms_norm_eps)
        self._start_states: Tensor | None = None
        self.gradient_checkpointing = False
        self.post_init()

    def _add_loop(self, config: ParcaeConfig) -> None:
        d, num_prelude, num_core = (
            config.hidden_size,
            config.num_prelude_layers,
            config.num_core_layers,
        )
        self.prelude = self._blocks(0, num_prelude)
        self.core = self._blocks(num_prelude, num_core)
        self.coda = self._blocks(num_prelude + num_core, config.num_coda_layers)
        self.prelude_norm = ParcaeRMSNorm(d, config.rms_norm_eps) if config.prelude_norm else None
        self.injection = make_injection(config)
        self.readout = nn.Linear(d, d, bias=False) if config.readout else None

    def _blocks(self, first: int, count: int) -> nn.ModuleList:
        return nn.ModuleList(ParcaeBlock(self.config, first + i) for i in range(count))

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        num_loops: int | None = None,
        num_grad_loops: int | None = None,
        h0: Tensor | None = None,
        early_exit: EarlyExit | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """`num_loops` passes through the core, of which the last `num_grad_loops` carry a gradient.

        `h0` [B, S, d] replaces the start state. `early_exit` works on single new tokens.
        """
        if use_cache and cache is None and not torch.is_grad_enabled():
            cache = ParcaeCache(loop_budget=self.config.loop_budget)
        start = 0 if cache is None else cache.get_seq_length()
        if isinstance(start, Tensor):  # of a static cache, which changes it in place
            start = start.clone()
        total = self.count_loops(num_loops)
        x = self.embed(input_ids, inputs_embeds)
        positions = self.positions(x, attention_mask, position_ids, start)
        context = self.context(x, input_ids, attention_mask, positions, cache, start, kwargs)
        if self.config.is_looped:
            x = self.run_looped(
                x, h0, context, positions, total, num_grad_loops, early_exit=early_exit
            )
        else:
            for i, block in enumerate(self.layers):
                x = block(x, context.value_rows.get(i), context, i)
            x = self.final_norm(x)
        return BaseModelOutputWithPast(last_hidden_state=x, cache=cache if use_cache else None)

    def count_loops(self, num_loops: int | None) -> int:
        """Passes through the core: those asked for, or the configuration's."""
        if not self.config.is_looped:
            _require(num_loops in (None, 1), "num_loops", num_loops, "1: this model has no loop")
            return 1
        total = self.config.num_loops if num_loops is None else num_loops
        _require(
            isinstance(total, int) and total >= 1, "num_loops", total, "an integer of at least 1"
        )
        return total

    def embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """Input embeddings [B, S, d]."""
        if input_ids is None and (self.config.value_embeddings or inputs_embeds is None):
            raise ValueError(
                "input_ids is missing: value embeddings are looked up by token, so inputs_embeds "
                "alone isn't enough; pass input_ids (inputs_embeds may come with them)"
            )
        x = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        return x * math.sqrt(self.config.hidden_size) if self.config.scale_embeddings else x

    def positions(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        start: int | Tensor,
    ) -> Tensor:
        """Positions [B or 1, S]; padding isn't counted, on whichever side it is."""
        if position_ids is not None:
            return position_ids
        order = torch.arange(x.shape[1], device=x.device) + start
        if attention_mask is not None and attention_mask.ndim == 2:
            counted = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
            return counted[:, order]
        return order[None]

    def context(
        self,
        x: Tensor,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        positions: Tensor,
        cache: Cache | None,
        start: int | Tensor,
        kwargs: dict[str, Any],
    ) -> Context:
        """Mask, rotary table and value-embedding rows of this pass."""
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,
            cache=cache,
            position_ids=positions,
            allow_is_causal_skip=not getattr(cache, "static", False),
        )
        cos, sin = rotary_table(positions, self.config.head_dim, self.config.rope_theta)
        rows = {
            int(i): table(input_ids).unflatten(-1, (-1, self.config.head_dim))
            for i, table in self.value_embeddings.items()
        }
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        return Context(cos, sin, attend, mask, rows, cache, start, attention_kwargs=kwargs)

    def run_looped(
        self,
        x: Tensor,
        h0: Tensor | None,
        context: Context,
        positions: Tensor,
        total: int,
        num_grad_loops: int | None,
        *,
        early_exit: EarlyExit | None,
    ) -> Tensor:
        """Prelude, loop and coda of embeddings x [B, S, d]; returns the normalised output."""
        for i, block in enumerate(self.prelude):
            x = block(x, context.value_rows.get(i), context, i)
        e = x if self.prelude_norm is None else self.prelude_norm(x)
        h = self.start_state(e, positions) if h0 is None else h0.to(e.dtype)
        drive = self.injection.prepare(e)
        if early_exit is not None and x.shape[1] == 1:
            h = self.exit_early(h, drive, context, total, early_exit)
        else:
            h = self.run_loops(h, drive, context, total, num_grad_loops)
        return self.run_coda(h, context)

    def start_state(self, e: Tensor, positions: Tensor) -> Tensor:
        """h_0: zero, or a fixed draw for every position, so that a cache changes nothing."""
        if self.config.initial_state == "zero":
            return torch.zeros_like(e)
        if self._start_states is None or self._start_states.device != e.device:
            self._start_states = start_state_table(self.config).to(e.device)
        rows = self._start_states[positions % self.config.max_position_embeddings]
        return rows.to(e.dtype).expand_as(e)

    def run_loops(
        self, h: Tensor, drive: Drive, context: Context, total: int, num_grad_loops: int | None
    ) -> Tensor:
        """All loops, for all rows; the last `num_grad_loops` with gradient."""
        with_gradient = torch.is_grad_enabled()
        limit = self.config.num_grad_loops if num_grad_loops is None else num_grad_loops
        for t in range(total):
            with torch.set_grad_enabled(with_gradient and t >= total - limit):
                h = self.run_core(h, drive, context, t)
        return h

    def run_core(self, h: Tensor, drive: Drive, context: Context, t: int) -> Tensor:
        """One loop: injection, then the core blocks."""
        x = self.injection(h, drive)
        for j, block in enumerate(self.core):
            x = block(
                x,
                context.value_rows.get(len(self.prelude) + j),
                context,
                self.slot(context.cache, t, j),
            )
        return x

    def slot(self, cache: Cache | None, t: int, j: int) -> int:
        """Cache layer of core block j in loop t."""
        loop = cache.slot(t) if isinstance(cache, ParcaeCache) else t
        return len(self.prelude) + len(self.coda) + loop * len(self.core) + j

    def run_coda(self, h: Tensor, context: Context) -> Tensor:
        """Readout, coda and final norm of the state h [B, S, d]."""
        x = self.final_norm(h) if self.config.loop_norm else h
        x = x if self.readout is None else self.readout(x)
        first = len(self.prelude) + len(self.core)
        for i, block in enumerate(self.coda):
            x = block(x, context.value_rows.get(first + i), context, len(self.prelude) + i)
        return self.final_norm(x)

    def exit_early(
        self, h: Tensor, drive: Drive, context: Context, total: int, rule: EarlyExit
    ) -> Tensor:
        """The loops that every row's new token needs; the final states [B, 1, d].

        The cache stays valid: loops that a token skips hold the keys and values of its last loop.
        """
        cache = context.cache
        if not isinstance(cache, ParcaeCache):
            raise ValueError("early_exit needs a ParcaeCache: use_cache=True, which makes one")

        def core(h: Tensor, t: int, rows: Tensor | None) -> Tensor:
            if rows is None:
                return self.run_core(h, drive, context, t)
            return self.run_core(h, Drive(drive.term[rows], drive.decay), context.select(rows), t)

        def coda(h: Tensor, rows: Tensor | None) -> Tensor:
            return self.run_coda(h, context if rows is None else context.select(rows))

        def leave(rows: Tensor, t: int) -> None:
            self.fill_skipped_loops(cache, context.start, rows, t, total)

        h, used = run_until_settled(h, total, rule, core, coda, leave)
        cache.record_loops(used)
        return h

    def fill_skipped_loops(
        self, cache: ParcaeCache, start: int | Tensor, rows: Tensor, last: int, total: int
    ) -> None:
        """Give the loops after `last` the keys and values that these rows had in it."""
        for j in range(len(self.core)):
            source = self.slot(cache, last, j)
            for target in {self.slot(cache, t, j) for t in range(last + 1, total)} - {source}:
                cache.layer(target).copy_rows(cache.layer(source), rows, start)


class ParcaeForCausalLM(ParcaePreTrainedModel, GenerationMixin):
    """The language model; `generate` takes num_loops, early_exit and loop_budget as well."""

    _tied_weights_keys = {"lm_head.weight": "model.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: ParcaeConfig) -> None:
        super().__init__(config)
        self.model = ParcaeModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_loops: int | None = None,
        num_grad_loops: int | None = None,
        h0: Tensor | None = None,
        early_exit: str | None = None,
        exit_threshold: float | None = None,
        loop_budget: int | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """`labels` [B, S] are not shifted: the loss compares position t with label t + 1.

        `early_exit` is kl, entropy or state; `exit_threshold` defaults to 5e-4, 1e-3 or 3e-2.
        `past_key_values` is the older name of `cache`.
        """
        cache = past_key_values if cache is None else cache
        if use_cache and cache is None and loop_budget is not None:
            cache = ParcaeCache(loop_budget=loop_budget)
        rule = self.exit_rule(early_exit, exit_threshold)
        plain = inputs_embeds is None and h0 is None and labels is None
        decode = self.decoder(cache, input_ids, attention_mask, kwargs) if plain else None
        if decode is not None and use_cache is not False:
            logits = decode(
                input_ids,
                cache,
                cache.get_seq_length(),
                mask=attention_mask,
                position_ids=position_ids,
                num_loops=None if num_loops is None else self.model.count_loops(num_loops),
                early_exit=rule,
            )
            return CausalLMOutputWithPast(logits=self.capped(logits), cache=cache)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            num_loops=num_loops,
            num_grad_loops=num_grad_loops,
            h0=h0,
            early_exit=rule,
            **kwargs,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.logits(outputs.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def decoder(
        self,
        cache: Cache | None,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Decoder | None:
        """The fast path of one new token per row (decode_parcae.py), or None."""
        if not isinstance(cache, ParcaeCache) or cache.static or torch.is_grad_enabled():
            return None
        if input_ids is None or input_ids.shape[1] != 1:
            cache.decoder = None
            return None
        width = cache.get_seq_length() + 1
        if (
            torch.compiler.is_compiling()
            or (attention_mask is not None and attention_mask.shape[1:] != (width,))
            or kwargs.get("output_hidden_states")
            or kwargs.get("output_attentions")
        ):
            return None
        if cache.decoder is None or cache.decoder[0] is not self:
            cache.decoder = (self, make_decoder(self))
        return cache.decoder[1]

    def logits(self, x: Tensor) -> Tensor:
        """Scores [B, S, V] of the normalised output x [B, S, d], soft-capped when the model is."""
        return self.capped(self.lm_head(x))

    def capped(self, logits: Tensor) -> Tensor:
        """With the soft cap of the model, if it has one."""
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits.float() / cap)

    def exit_rule(self, rule: str | None, threshold: float | None) -> EarlyExit | None:
        """The early-exit rule by name; None runs all loops."""
        if rule is None:
            return None
        _require(
            rule in DEFAULT_THRESHOLDS, "early_exit", rule, f"one of {list(DEFAULT_THRESHOLDS)}"
        )
        _require(self.config.is_looped, "early_exit", rule, "None: this model has no loop")

        limit = DEFAULT_THRESHOLDS[rule] if threshold is None else threshold
        return EarlyExit(rule, limit, self.logits)

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Our own cache, reserved for the whole generation; `static` gives it a fixed shape."""
        budget = model_kwargs.pop("loop_budget", None)
        kind = generation_config.cache_implementation
        if model_kwargs.get("cache") is not None or generation_config.use_cache is False:
            return
        _require(
            kind in (None, "dynamic", "static"), "cache_implementation", kind, "dynamic or static"
        )
        model_kwargs["cache"] = ParcaeCache(
            loop_budget=self.config.loop_budget if budget is None else budget,
            max_length=max_cache_length,
            static=kind == "static",
        )


def _require(holds: bool, option: str, value: object, rule: str) -> None:
    if not holds:
        raise ValueError(f"{option}={value!r} must be {rule}")


__all__ = ["ParcaeForCausalLM", "ParcaeModel", "ParcaePreTrainedModel"]
