"""Who runs what in a pipeline: a cost line through the unrolled model, cut at equal expected cost.

Every stage that runs loops holds a replica of the core. A border inside the loop is a fraction of
each micro-batch's own loop work, so that it adapts to the depths drawn; all other borders lie
between layers. Costs are forward passes of one core block on one token without gradient.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megaparcae.config.layout import Part, whole
from megaparcae.config.schema import ModelConfig
from megaparcae.errors import UserError

GRAD = 3
"""Forward and backward pass of a block, in forward passes."""
SMALLEST_SHARE = 0.02
"""A stage takes at least this share of the loop, or none of it."""


@dataclass(frozen=True)
class Atom:
    """A piece of the cost line. Only the loop can be divided."""

    kind: str
    """prelude, loop, coda or head"""
    index: int
    cost: float


@dataclass(frozen=True)
class Stage:
    """A pipeline stage and its expected cost per token."""

    part: Part
    cost: float


def cost_line(
    model: ModelConfig, mean_loops: tuple[float, float], recompute_core: bool
) -> list[Atom]:
    """The model from left to right; `mean_loops`: expected loops without and with gradient."""
    d, S = model.hidden_size, model.sequence_length
    heads = d * (2 * d + 2 * model.kv_heads * model.head_dim)  # q and o, k and v
    matrices = 3 if model.mlp == "swiglu" else 2
    block = 2 * (heads + matrices * d * model.intermediate_size) + 2 * S * d  # causal attention
    head = Atom("head", 0, GRAD * 2 * d * model.padded_vocab_size / block)
    if model.architecture == "transformer":
        return [*(Atom("prelude", i, GRAD) for i in range(model.num_layers)), head]
    no_grad, grad = mean_loops
    loop = model.num_core_layers * (no_grad + (GRAD + recompute_core) * grad)
    return [
        *(Atom("prelude", i, GRAD) for i in range(model.num_prelude_layers)),
        Atom("loop", 0, loop),
        *(Atom("coda", i, GRAD) for i in range(model.num_coda_layers)),
        head,
    ]


def make_stages(model: ModelConfig, line: list[Atom], *, pp: int, layout: str) -> list[Stage]:
    """The stages of a pipeline of `pp` ranks, balanced or as the user spelled them out.

    Raises UserError when there are more stages than pieces, or the layout does not name every
    piece once and in order.
    """
    if layout != "balanced":
        return _parse_layout(model, line, layout, pp)
    pieces = _balanced(line, pp)
    return [_stage(model, taken, first=i == 0) for i, taken in enumerate(pieces)]


Taken = list[tuple[Atom, float, float]]
"""Pieces of one stage: atom and the share [begin, end] of it."""


def _balanced(line: list[Atom], pp: int) -> list[Taken]:
    """The division whose dearest stage is cheapest: bisection on its cost, filled from the left."""
    low, high = 0.0, sum(atom.cost for atom in line)
    best = _fill(line, pp, high)
    if best is None:
        raise UserError(
            f"parallel.pp={pp} stages are more than this model can fill, which is {_most(line)}; "
            "use fewer stages"
        )
    for _ in range(50):
        limit = (low + high) / 2
        stages = _fill(line, pp, limit)
        if stages is None:
            low = limit
        else:
            best, high = stages, limit
    return best


def _fill(line: list[Atom], pp: int, limit: float) -> list[Taken] | None:
    """`pp` stages of at most `limit`, none empty; None when there is no such division."""
    stages: list[Taken] = [[]]
    room = limit
    for position, atom in enumerate(line):
        after = _most(line[position + 1 :])
        begin = 0.0
        while begin < 1.0:
            waiting = pp - len(stages)  # stages that still need something
            share = _share(atom, 1.0 - begin, room, waiting - after)
            must_wait = bool(stages[-1]) and atom.kind != "loop" and waiting > after
            if share == 0.0 or must_wait:
                if not stages[-1] or waiting == 0:
                    return None
                stages.append([])
                room = limit
                continue
            end = 1.0 if begin + share > 1.0 - 1e-9 else begin + share
            stages[-1].append((atom, begin, end))
            room -= atom.cost * share
            begin = end
    return stages if len(stages) == pp and stages[-1] else None


def _share(atom: Atom, left: float, room: float, needed: int) -> float:
    """How much of what is left of an atom goes into `room`; 0 when it does not fit.

    Of the loop, enough is kept back for `needed` later stages that nothing else could fill.
    """
    if atom.kind != "loop":
        return left if atom.cost <= room * (1 + 1e-9) else 0.0
    share = min(left, room / atom.cost, left - SMALLEST_SHARE * max(0, needed))
    return share if share >= min(SMALLEST_SHARE, left) - 1e-9 else 0.0


def _most(line: list[Atom]) -> int:
    """Most stages that these atoms can fill."""
    return sum(round(1 / SMALLEST_SHARE) if atom.kind == "loop" else 1 for atom in line)


def _stage(model: ModelConfig, taken: Taken, *, first: bool) -> Stage:
    def layers(kind: str) -> range:
        indices = [atom.index for atom, _, _ in taken if atom.kind == kind]
        return range(indices[0], indices[-1] + 1) if indices else range(0)

    shares = [(begin, end) for atom, begin, end in taken if atom.kind == "loop"]
    part = Part(
        embedding=first,
        prelude=layers("prelude"),
        loop=shares[0] if shares else None,
        coda=layers("coda"),
        head=any(atom.kind == "head" for atom, _, _ in taken),
    )
    return Stage(part, sum(atom.cost * (end - begin) for atom, begin, end in taken))


ITEM = re.compile(r"(embedding|prelude|core|coda|head)(?::([\d.]+)(?:-(\d+))?)?")


def _parse_layout(model: ModelConfig, line: list[Atom], layout: str, pp: int) -> list[Stage]:
    """`prelude | core | coda` or `prelude:0-1 | core:0.5 | core:0.5,coda`, from left to right.

    `core:0.5` is that share of the loop's work; `prelude:0-1` are layers. Embedding and head belong
    to the first and the last stage and may be left out.
    """
    names = layout.split("|")
    if len(names) != pp:
        raise _layout_error(layout, f"has {len(names)} stages, but parallel.pp is {pp}")
    stages: list[Taken] = []
    done = 0.0
    for text in names:
        taken: Taken = []
        for item in filter(None, (piece.strip() for piece in text.split(","))):
            match = ITEM.fullmatch(item)
            if match is None:
                raise _layout_error(layout, f"has {item!r}, which is no part of a model")
            pieces = _named_pieces(line, *match.groups(), done=done)
            taken += pieces
            done = max([done, *(end for atom, _, end in pieces if atom.kind == "loop")])
        stages.append(taken)
    stages[-1] += [(atom, 0.0, 1.0) for atom in line if atom.kind == "head"]
    _check_complete(layout, line, stages)
    return [_stage(model, taken, first=i == 0) for i, taken in enumerate(stages)]


def _named_pieces(
    line: list[Atom], kind: str, first: str | None, last: str | None, *, done: float
) -> Taken:
    """What one item of a layout names; `done` is the share of the loop that is taken already."""
    if kind in ("embedding", "head"):
        return []
    atoms = [atom for atom in line if atom.kind == ("loop" if kind == "core" else kind)]
    if kind == "core":
        end = 1.0 if first is None else done + float(first)
        return [(atom, done, 1.0 if abs(end - 1.0) < 1e-6 else end) for atom in atoms]
    if first is not None:
        wanted = range(int(first), int(last or first) + 1)
        atoms = [atom for atom in atoms if atom.index in wanted]
    return [(atom, 0.0, 1.0) for atom in atoms]


def _check_complete(layout: str, line: list[Atom], stages: list[Taken]) -> None:
    order = [(atom.kind, atom.index) for taken in stages for atom, _, _ in taken]
    once = list(dict.fromkeys(order))
    wanted = [(atom.kind, atom.index) for atom in line]
    shares = [(begin, end) for taken in stages for atom, begin, end in taken if atom.kind == "loop"]
    loops_done = not shares or shares[-1][1] == 1.0
    if once != wanted or not loops_done or any(begin >= end for begin, end in shares):
        need = ", ".join(f"{kind} {index}" for kind, index in wanted)
        raise _layout_error(layout, f"must name each of these once and in order: {need}")


def _layout_error(layout: str, problem: str) -> UserError:
    return UserError(
        f"parallel.pipeline_layout={layout!r} {problem}; "
        "use balanced, or stages such as 'prelude | core:0.5 | core:0.5,coda'"
    )


def describe_stages(stages: list[Stage]) -> str:
    """One line per stage: who does what, and the share of the expected work."""
    total = sum(stage.cost for stage in stages)
    lines = []
    for i, stage in enumerate(stages):
        part = stage.part
        items = ["embedding"] if part.embedding else []
        if part.prelude:
            items.append(f"prelude {part.prelude.start}-{part.prelude.stop - 1}")
        if part.loop:
            items.append(f"loop {part.loop[0]:.3f}-{part.loop[1]:.3f}")
        if part.coda:
            items.append(f"coda {part.coda.start}-{part.coda.stop - 1}")
        items += ["head"] if part.head else []
        lines.append(f"stage {i}: {', '.join(items):60} {stage.cost / total:6.1%} of the work")
    return "\n".join(lines)


def single_stage(model: ModelConfig) -> list[Stage]:
    """No pipeline."""
    return [Stage(whole(model), 1.0)]
