"""What the sharded optimizer asks of the update mathematics, which it is given (`optim.recipe`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol

from torch import Tensor


class ParameterRule(Protocol):
    """How one parameter is updated."""

    @property
    def kind(self) -> Literal["muon", "adamw"]: ...

    @property
    def decayed(self) -> bool: ...


class VectorRule(Protocol):
    """An update that takes tensors element by element, in any pieces."""

    @property
    def lr(self) -> float: ...

    def update(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        *,
        lr: float,
        decayed: Sequence[bool],
        step: int,
        mean_over_parameters: Callable[[Tensor], Tensor],
    ) -> None:
        """In place. `mean_over_parameters` turns one sum per tensor into means over the whole
        parameters; a rule calls it in every step on every rank, or never."""


class MatrixRule(Protocol):
    """An update of whole matrices, batched."""

    @property
    def lr(self) -> float: ...

    def look_ahead(self, gradient: Tensor, momentum: Tensor, mu: float) -> Tensor: ...

    def second_moment_shape(self, full_shape: tuple[int, int]) -> tuple[int, int]: ...

    def direction(self, look_ahead: Tensor, second_moment: Tensor) -> Tensor: ...

    def apply(
        self,
        parameters: Sequence[Tensor],
        direction: Tensor,
        *,
        full_shape: tuple[int, int],
        lr: float,
        weight_decay: float,
    ) -> None: ...


class Recipe(Protocol):
    """The updates of a run."""

    @property
    def adamw(self) -> VectorRule: ...

    @property
    def muon(self) -> MatrixRule: ...

    @property
    def grad_clip(self) -> float: ...

    def rule(self, name: str, full_shape: tuple[int, ...]) -> ParameterRule: ...

    def describe(self, parameters: Iterable[tuple[str, tuple[int, ...]]]) -> str: ...
