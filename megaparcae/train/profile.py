"""Where a step's time goes: a trace for a viewer, and a page that sums it up by part.

Off, nothing is touched. During a traced step the methods that bound the parts of the model are
replaced by ones inside a `record_function` range. What runs inside a range is that part's forward
pass; a node of the backward pass belongs to the part whose forward pass made it, by autograd's
sequence number, and so does what activation checkpointing computes again inside of it.

On a GPU the time is that of the kernels, by the operator that launched them. On a CPU it is the
time of the main thread; while a collective is under way and no operator runs, it is communication.
"""

from __future__ import annotations

import bisect
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from megaparcae.checkpoint.ranks import gather
from megaparcae.log import logger
from megaparcae.train.build import Run
from megaparcae.train.metrics import StepClock

PREFIX = "part: "
BACKWARD = "autograd::engine::evaluate_function: "
COLLECTIVES = ("gloo:", "nccl")
NO_GRAD, GRAD = "loops without gradient", "loops with gradient"
PARTS = ("prelude", NO_GRAD, GRAD, "coda", "loss", "optimizer", "communication", "other")
"""Loss includes the head; other is what no range holds."""

Interval = tuple[float, float]


@dataclass
class Times:
    """Milliseconds of one rank's step."""

    whole: float = 0.0
    forward: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    backward: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def of(self, part: str) -> float:
        """Both passes."""
        return self.forward.get(part, 0.0) + self.backward.get(part, 0.0)


class StepProfiler:
    """Traces the steps that `profile.steps` names. All ranks take part."""

    def __init__(self, run: Run, folder: Path, clock: StepClock) -> None:
        self.run, self.folder, self.clock = run, folder, clock
        self.steps = frozenset(run.config.profile.steps)
        self.traced: list[tuple[int, list[Times]]] = []
        """Steps so far, with the times of every rank."""

    @contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """Trace what happens inside if the step is one to trace."""
        if step not in self.steps:
            yield
            return
        began = time.perf_counter()
        activities = [ProfilerActivity.CPU]
        if self.run.process.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with ranges(self.run), profile(activities=activities) as trace:
            inside = time.perf_counter()
            with record_function(f"{PREFIX}other"):
                yield
            inside = time.perf_counter() - inside
        self._write(step, trace)
        self.clock.exclude(time.perf_counter() - began - inside)

    def _write(self, step: int, trace: profile) -> None:
        rank = self.run.mesh.rank
        times = measure(trace.events() or [])
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(self.folder / f"step_{step:08d}_rank{rank}.json.gz"))
        except OSError as error:
            logger.warning(
                "no trace of step %d: %s can't be written (%s)", step, self.folder, error
            )
        self.traced.append((step, gather(times)))
        if rank == 0:
            text = summary(self.run.config.name, self.traced)
            (self.folder / "summary.txt").write_text(text, encoding="utf-8")
            logger.info("step %d traced: %s/summary.txt", step, self.folder)


@contextmanager
def ranges(run: Run) -> Iterator[None]:
    """Named ranges around the parts of the model and the optimizer, for a while."""
    model: Any = run.model
    config = run.config.model
    after_loop = config.num_prelude_layers if config.architecture == "looped" else config.num_layers
    seams: list[tuple[Any, str, Callable[..., str]]] = [
        (model, "embed", lambda *_: "prelude"),
        (model, "run_stored_block", lambda _, i, *__: "coda" if i >= after_loop else "prelude"),
        (model, "finish", lambda *_: "loss"),
        (run.engine.optimizer, "step", lambda *_: "optimizer"),
    ]
    if hasattr(getattr(model, "core", None), "run_units"):  # else another stage has it, or none
        seams += [
            (model, "enter_loop", lambda *_: "prelude"),
            (model, "core_value_rows", lambda *_: "prelude"),
            (model.injection, "forward", lambda *_: "prelude"),
            (model.core, "run_units", lambda *_: GRAD if torch.is_grad_enabled() else NO_GRAD),
            (model, "leave_loop", lambda *_: "coda"),
        ]
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in seams]
    for owner, name, part in seams:
        setattr(owner, name, _inside(getattr(owner, name), part))
    try:
        yield
    finally:
        for owner, name, replaced in before:
            if replaced is None:
                delattr(owner, name)
            else:
                setattr(owner, name, replaced)


def _inside(method: Callable[..., Any], part: Callable[..., str]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        with record_function(PREFIX + part(*args)):
            return method(*args, **options)

    return call


def measure(events: Sequence[FunctionEvent]) -> Times:
    """Times by part of one traced step."""
    on_cpu = [e for e in events if e.device_type == DeviceType.CPU]
    root = next(e for e in on_cpu if e.name == f"{PREFIX}other" and e.cpu_parent is None)
    times = Times(whole=_milliseconds(root.time_range.end - root.time_range.start))
    owner = Owner(on_cpu)
    if any(e.kernels for e in on_cpu):
        _add_kernels(times, on_cpu, owner)
    else:
        _add_main_thread(times, [e for e in on_cpu if e.thread == root.thread], on_cpu, owner)
    counted = sum(times.of(part) for part in PARTS if part != "other")
    times.backward.pop("other", None)
    times.forward["other"] = max(0.0, times.whole - counted)
    return times


class Owner:
    """Part and pass of an event."""

    def __init__(self, events: Sequence[FunctionEvent]) -> None:
        self.made_by: dict[tuple[int | None, int], FunctionEvent] = {}
        """(thread, sequence number) -> the operator that made the node: the number's last."""
        for event in sorted(events, key=lambda e: e.time_range.start):
            if event.sequence_nr >= 0 and _ancestor(event, BACKWARD) is None:
                self.made_by[event.thread, event.sequence_nr] = event
        nodes = [e for e in events if e.name.startswith(BACKWARD) and _ancestor(e, BACKWARD) is e]
        self.part_of_node: dict[int, str] = {}
        latest: dict[int, str] = {}
        for node in sorted(nodes, key=lambda e: e.time_range.start):
            maker = self.made_by.get((node.fwd_thread, node.sequence_nr))
            found = _ancestor(maker, PREFIX) if maker is not None else None
            if found is not None:  # accumulation into .grad has no number: it follows its node
                latest[node.thread] = found.name.removeprefix(PREFIX)
            self.part_of_node[node.id] = latest.get(node.thread, "other")

    def of(self, event: FunctionEvent) -> tuple[str, bool]:
        """(part, whether it is the backward pass)."""
        node = _ancestor(event, BACKWARD)
        if node is not None:
            return self.part_of_node.get(node.id, "other"), True
        found = _ancestor(event, PREFIX)
        return (found.name.removeprefix(PREFIX) if found else "other"), False


def _ancestor(event: FunctionEvent, prefix: str) -> FunctionEvent | None:
    """The event itself or the next outer one whose name begins so; of nodes of the backward pass
    the outermost, which is the one that autograd started."""
    found: FunctionEvent | None = None
    at: FunctionEvent | None = event
    while at is not None:
        if at.name.startswith(prefix):
            found = at
            if prefix != BACKWARD:
                break
        at = at.cpu_parent
    return found


def _add(times: Times, part: str, is_backward: bool, duration: float) -> None:
    (times.backward if is_backward else times.forward)[part] += _milliseconds(duration)


def _milliseconds(microseconds: float) -> float:
    return microseconds / 1000


def _add_kernels(times: Times, events: Sequence[FunctionEvent], owner: Owner) -> None:
    for event in events:
        for kernel in event.kernels:
            if kernel.name.lower().startswith(COLLECTIVES):
                _add(times, "communication", False, kernel.duration)
            else:
                _add(times, *owner.of(event), kernel.duration)


def _add_main_thread(
    times: Times, main: Sequence[FunctionEvent], events: Sequence[FunctionEvent], owner: Owner
) -> None:
    under_way = merged(
        [(e.time_range.start, e.time_range.end) for e in events if e.name.startswith(COLLECTIVES)]
    )
    for event, begin, end in innermost(main):
        waiting = 0.0
        if not event.name.startswith("aten::"):
            waiting = overlap(under_way, begin, end)
        _add(times, "communication", False, waiting)
        _add(times, *owner.of(event), end - begin - waiting)


def innermost(events: Sequence[FunctionEvent]) -> Iterator[tuple[FunctionEvent, float, float]]:
    """The time of nested events, cut into pieces of the innermost one: (event, begin, end)."""
    stack: list[FunctionEvent] = []
    now = 0.0
    nested = [e for e in events if not e.is_async]
    for event in sorted(nested, key=lambda e: (e.time_range.start, -e.time_range.end)):
        while stack and stack[-1].time_range.end <= event.time_range.start:
            done = stack.pop()
            yield done, now, max(now, done.time_range.end)
            now = max(now, done.time_range.end)
        if stack:
            yield stack[-1], now, max(now, event.time_range.start)
        now = max(now, event.time_range.start)
        stack.append(event)
    while stack:
        done = stack.pop()
        yield done, now, max(now, done.time_range.end)
        now = max(now, done.time_range.end)


def merged(intervals: Sequence[Interval]) -> list[Interval]:
    """The union, in order, without overlaps."""
    result: list[Interval] = []
    for begin, end in sorted(intervals):
        if result and begin <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((begin, end))
    return result


def overlap(intervals: Sequence[Interval], begin: float, end: float) -> float:
    """How much of [begin, end] disjoint ordered intervals cover."""
    first = bisect.bisect_left(intervals, begin, key=lambda interval: interval[1])
    covered = 0.0
    for low, high in intervals[first:]:
        if low >= end:
            break
        covered += max(0.0, min(high, end) - max(low, begin))
    return covered


def summary(name: str, traced: Sequence[tuple[int, Sequence[Times]]]) -> str:
    """One page: mean milliseconds of a step by part, and the rank that takes longest."""
    ranks = len(traced[0][1])
    every = [times for _, by_rank in traced for times in by_rank]
    whole = sum(times.whole for times in every) / len(every)
    lines = [
        f"{name}: steps {', '.join(str(step) for step, _ in traced)} on {ranks} rank(s), "
        "milliseconds of a step, mean over steps and ranks",
        "",
        f"{'part':<24}{'forward':>10}{'backward':>10}{'both':>10}{'share':>8}  slowest rank",
    ]
    for part in PARTS:
        forward = sum(times.forward.get(part, 0.0) for times in every) / len(every)
        backward = sum(times.backward.get(part, 0.0) for times in every) / len(every)
        by_rank = [
            sum(by_rank[rank].of(part) for _, by_rank in traced) / len(traced)
            for rank in range(ranks)
        ]
        slowest = max(range(ranks), key=by_rank.__getitem__)
        share = (forward + backward) / whole if whole else 0.0
        lines.append(
            f"{part:<24}{forward:>10.2f}{backward:>10.2f}{forward + backward:>10.2f}{share:>8.1%}"
            f"  {slowest}: {by_rank[slowest]:.2f}"
        )
    lines += [
        f"{'whole step':<24}{'':>20}{whole:>10.2f}",
        "",
        "Loss includes the head; communication includes waiting for slower ranks. Tracing itself",
        "takes time, most where operators are small. The traces (step_*_rank*.json.gz) open in",
        "https://ui.perfetto.dev or chrome://tracing.",
    ]
    return "\n".join(lines) + "\n"
