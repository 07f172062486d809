"""From optimizer options to the updates that the sharded optimizer runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megaparcae.config.schema import OptimizerConfig
from megaparcae.optim.adamw import AdamW, ClippedAdamW
from megaparcae.optim.muon import Muon
from megaparcae.optim.param_groups import ParameterRule, describe, parameter_rule


@dataclass(frozen=True)
class Recipe:
    """The updates of one run; what changes from step to step comes from `schedule`."""

    config: OptimizerConfig
    adamw: AdamW | ClippedAdamW
    muon: Muon

    @property
    def grad_clip(self) -> float:
        """Largest global gradient norm; 0 is off."""
        return self.config.grad_clip

    def rule(self, name: str, full_shape: tuple[int, ...]) -> ParameterRule:
        """The update of one parameter; see `parameter_rule`."""
        return parameter_rule(name, full_shape, self.config.name)

    def describe(self, parameters: Iterable[tuple[str, tuple[int, ...]]]) -> str:
        """One line for the log about names and full shapes; see `param_groups.describe`."""
        return describe((n, shape, self.rule(n, shape).kind) for n, shape in parameters)


def make_recipe(config: OptimizerConfig, *, apex: bool = False) -> Recipe:
    """The updates that `optimizer.*` asks for; `apex`: NVIDIA's apex is there to be used."""
    muon = Muon(lr=config.muon_lr, dtype=config.muon_dtype)
    match config.name:
        case "muon_adamw" | "adamw":
            adamw: AdamW | ClippedAdamW = AdamW(
                lr=config.lr,
                betas=config.betas,
                eps=config.eps,
                weight_decay=config.weight_decay,
                apex=apex,
            )
        case "adamw_rdm":
            adamw = ClippedAdamW(lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)
        case other:
            raise ValueError(f"optimizer.name={other!r}: choose muon_adamw, adamw or adamw_rdm")
    return Recipe(config, adamw, muon)
