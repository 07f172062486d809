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
    """The model from left to right; `mean_loops` are the expected loops without and with gradient."""
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
    """The division whose dearest stage is cheapest: bisection on its cost, filling from the left."""
    low, high = 0.0, sum(atom.cost for atom in line)
    best = _fill(line, pp, high)
    if best is None:
        divisible = sum(1 if atom.kind != "loop" else round(1 / SMALLEST_SHARE) for atom in line)
        raise UserError(
            f"parallel.pp={pp} stages are more than this model's {divisible} pieces; use fewer stages"
        )
    for _ in range(50):
        middle = (low + high) / 2
        pieces = _fill(line, pp, middle)
        if pieces is None:
            low = middle
        else:
            best, high = pieces, middle
    return best


def _fill(line: list[Atom], pp: int, limit: float) -> list[Taken] | None:
    """Stages of at most `limit`, none empty; None when that takes more than pp stages."""
    stages: list[Taken] = []
    current: Taken = []
    room = limit
    for position, atom in enumerate(line):
        begin = 0.0
        later = _num_pieces(line[position + 1 :])
        while begin < 1.0:
            stages_after = pp - len(stages) - 1
            share = min(1.0 - begin, room / atom.cost) if atom.kind == "loop" else 1.0 - begin
            if atom.kind == "loop" and 0 < 1.0 - begin - share < SMALLEST_SHARE:
                share = 1.0 - begin if room * 1.0001 >= (1.0 - begin) * atom.cost else share
            if stages_after > later and atom.kind == "loop":  # leave some of it to the others
                share = min(share, 1.0 - begin - SMALLEST_SHARE * (stages_after - later))
            full = (
                atom.cost * share > room * (1 + 1e-9)
                or share < min(SMALLEST_SHARE, 1.0 - begin) - 1e-9
            )
            needed = current and atom.kind != "loop" and stages_after > later
            if current and (full or needed):
                stages.append(current)
                current, room = [], limit
                if len(stages) == pp:
                    return None
                continue
            if full:
                return None
            current.append((atom, begin, begin + share))
            begin += share
            if 1.0 - begin < 1e-9:
                begin = 1.0
                current[-1] = (atom, current[-1][1], 1.0)
            room -= atom.cost * share
    stages.append(current)
    return stages if len(stages) == pp else None


def _num_pieces(line: list[Atom]) -> int:
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
    """`prelude | core | coda` or `prelude:0-1 | core:0.5 | core:0.5,coda`: stages from left to right.

    `core:0.5` is that share of the loop's work; `prelude:0-1` are layers; embedding and head may be
    left out, they belong to the first and the last stage.
    """
    names = layout.split("|")
    if len(names) != pp:
        raise _layout_error(layout, f"has {len(names)} stages, but parallel.pp is {pp}")
    atoms = {(atom.kind, atom.index): atom for atom in line}
    stages: list[Taken] = []
    done = 0.0
    for text in names:
        taken: Taken = []
        for item in filter(None, (piece.strip() for piece in text.split(","))):
            match = ITEM.fullmatch(item)
            if match is None:
                raise _layout_error(layout, f"has {item!r}, which is no part of a model")
            kind, first, last = match.groups()
            if kind == "core":
                end = 1.0 if first is None else done + float(first)
                end = 1.0 if abs(end - 1.0) < 1e-6 else end
                taken.append((atoms["loop", 0], done, end))
                done = end
            elif kind in ("prelude", "coda"):
                count = sum(k == kind for k, _ in atoms)
                begin = 0 if first is None else int(first)
                end = count - 1 if first is None else int(last or first)
                taken += [
                    (atoms[kind, i], 0.0, 1.0) for i in range(begin, end + 1) if (kind, i) in atoms
                ]
        stages.append(taken)
    stages[-1].append((atoms["head", 0], 0.0, 1.0))
    _check_complete(layout, line, stages)
    return [_stage(model, taken, first=i == 0) for i, taken in enumerate(stages)]


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
