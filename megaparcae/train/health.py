"""Loop health: the figures that tell a stable loop from one that is about to explode.

Taken every `log.health_interval` steps from that step's own forward passes, and the same in every
layout. Norms are Euclidean norms of a token's state, averaged over a few positions of all sequences
of the step (`model/probe.py`):

    state_norm, state_norm_max    |h_T|
    residual, residual_ratio      |h_T - h_(T-1)|, and its mean over that of the state norm
    prelude_norms                 after each block before the loop (of a Transformer: each block)
    rho_A, decay_mean             spectral norm of A_bar (diagonal: largest entry) and mean entry
    B_norm, C_norm                spectral norms of B_bar and of the readout
    loss_by_depth                 loss per token in nats of the sequences of each depth T
    depths                        how many sequences drew each depth T
    update_norm                   of the change of all weights in the step
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megaparcae.config.schema import ModelConfig
from megaparcae.engine.base import Engine
from megaparcae.model.probe import Probe
from megaparcae.parallel.grad_norm import global_norm, square_sum
from megaparcae.train.batches import HostBatch
from megaparcae.train.build import Run

# R rows of a step on this rank, P sampled positions, d width

FIRST_ITERATIONS, LATER_ITERATIONS = 32, 4
"""Power iterations with a fresh vector, and with the one kept from the record before."""


class HealthMonitor:
    """Takes health records; all ranks call both methods together."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.model = run.config.model
        self.probe: Probe = run.model.probe  # type: ignore[assignment]
        self.directions: dict[str, Tensor] = {}
        """Leading right singular vectors found so far."""
        self.before: list[Tensor] = []
        """This rank's share of the weights before the step."""

    def watch(self) -> None:
        """The next step will be recorded."""
        config, plan = self.run.config, self.run.plan
        looped = self.model.architecture == "looped"
        split = config.parallel.tp if config.parallel.sequence_parallel else 1
        self.probe.start(
            num_rows=plan.micro_batch * plan.accumulation if looped else 0,
            num_blocks=self.model.num_prelude_layers if looped else self.model.num_layers,
            length=self.model.sequence_length // split,
            of=self.model.sequence_length,
            width=self.model.hidden_size,
            device=self.run.process.device,
        )
        self.before = [weight.clone() for weight in self._weights()]

    @torch.no_grad()
    def record(self, host: list[HostBatch], depths: np.ndarray) -> dict[str, Any]:
        """Figures of the step since `watch`; `depths`: T of every sequence of the global batch."""
        self.probe.stop()
        record = {**self._streams(), **self._losses(host, depths)}
        if self.model.architecture == "looped":
            record |= self._states() | self._loop_weights()
            values, counts = np.unique(depths, return_counts=True)
            record["depths"] = dict(zip(map(str, values), counts.tolist(), strict=True))
        record["update_norm"] = self._update_norm()
        return record

    def _weights(self) -> list[Tensor]:
        """Over all ranks every element once, in fp32."""
        owned = self.run.engine.owned_fragments()
        return [f.tensor.detach() for f in owned if f.name.startswith("model.")]

    def _update_norm(self) -> float:
        change = [now - old for now, old in zip(self._weights(), self.before, strict=True)]
        self.before = []
        return global_norm(square_sum(change, self.run.process.device), dist.get_world_size())

    def _streams(self) -> dict[str, Any]:
        norms, tokens = _total(torch.stack([self.probe.block_norms, self.probe.block_tokens]))
        return {"prelude_norms": {str(i): x for i, x in enumerate((norms / tokens).tolist())}}

    def _states(self) -> dict[str, Any]:
        """A row's last loop may begin on one pipeline stage and end on another."""
        states = torch.stack([self.probe.before, self.probe.after])  # [2, R, P, d]
        if self.run.mesh.pp.group is not None:
            dist.all_reduce(states, group=self.run.mesh.pp.group)
        norms, steps = states[1].norm(dim=-1), (states[1] - states[0]).norm(dim=-1)  # [R, P]
        sums = torch.stack([norms.sum(), steps.sum(), torch.tensor(float(norms.numel())).to(norms)])
        norm, residual, tokens = _total(sums).tolist()
        largest = norms.max()
        if dist.get_world_size() > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return {
            "state_norm": norm / tokens,
            "state_norm_max": float(largest),
            "residual": residual / tokens,
            "residual_ratio": residual / norm if norm else 0.0,
        }

    def _losses(self, host: list[HostBatch], depths: np.ndarray) -> dict[str, Any]:
        sums = torch.zeros(2, int(depths.max(initial=0)) + 1, device=self.run.process.device)
        if self.probe.row_losses:  # else another stage has the head
            drawn = [n + k for b in host for n, k in zip(b.num_no_grad, b.num_grad, strict=True)]
            rows = torch.tensor(drawn, device=sums.device)
            losses = torch.cat(self.probe.row_losses).to(sums)
            sums[0].index_add_(0, rows, losses)
            sums[1].index_add_(0, rows, torch.ones_like(losses))
        loss, count = _total(sums)
        mean = (loss / count / self.model.sequence_length).tolist()
        return {"loss_by_depth": {str(t): mean[t] for t in count.nonzero().flatten().tolist()}}

    def _loop_weights(self) -> dict[str, Any]:
        shapes = loop_weight_shapes(self.model)
        weights = whole_weights(self.run.engine, shapes, self.run.process.device)
        figures: dict[str, Any] = {}
        match self.model.injection:
            case "diagonal":
                step = F.softplus(weights["injection.dt_bias"])
                decay = torch.exp(-step * torch.exp(weights["injection.A_log"]))
                figures = {"rho_A": float(decay.max()), "decay_mean": float(decay.mean())}
                figures["B_norm"] = self._norm("B", step[:, None] * weights["injection.B"])
            case "linear":
                A, B = weights["injection.weight"].split(self.model.hidden_size, dim=1)
                figures = {"rho_A": self._norm("A", A), "B_norm": self._norm("B", B)}
            case "additive":
                figures = {"rho_A": 1.0, "B_norm": 1.0}
        if self.model.readout:
            figures["C_norm"] = self._norm("C", weights["readout.weight"])
        return figures

    def _norm(self, name: str, matrix: Tensor) -> float:
        norm, direction = spectral_norm(matrix, self.directions.get(name))
        self.directions[name] = direction
        return norm


def spectral_norm(matrix: Tensor, direction: Tensor | None) -> tuple[float, Tensor]:
    """Largest singular value by power iteration from `direction`, and where it ended.

    A lower bound, close once the matrix changes slowly between calls.
    """
    iterations = LATER_ITERATIONS
    if direction is None or not bool(direction.isfinite().all()):
        iterations = FIRST_ITERATIONS
        generator = torch.Generator().manual_seed(0)
        direction = torch.randn(matrix.shape[1], generator=generator).to(matrix)
    for _ in range(iterations):
        direction = F.normalize(matrix.T @ (matrix @ direction), dim=0)
    return float((matrix @ direction).norm()), direction


def loop_weight_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of injection and readout."""
    d = model.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    if model.injection == "diagonal":
        shapes = {
            f"injection.{n}": s for n, s in (("A_log", (d,)), ("dt_bias", (d,)), ("B", (d, d)))
        }
    elif model.injection == "linear":
        shapes = {"injection.weight": (d, 2 * d)}
    return {**shapes, "readout.weight": (d, d)} if model.readout else shapes


def whole_weights(
    engine: Engine, shapes: dict[str, tuple[int, ...]], device: torch.device
) -> dict[str, Tensor]:
    """Full copies on every rank of a few weights, put together from what each rank owns."""
    whole = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
    for fragment in engine.owned_fragments():
        name = fragment.name.removeprefix("model.")
        if name in whole:
            at = zip(fragment.offset, fragment.tensor.shape, strict=True)
            whole[name][tuple(slice(o, o + n) for o, n in at)] = fragment.tensor
    return {name: _total(weight) for name, weight in whole.items()}


def _total(x: Tensor) -> Tensor:
    """Sum over all ranks, in place. Copies count twice in sums and in the counts they go by."""
    if dist.get_world_size() > 1:
        dist.all_reduce(x)
    return x
