"""Profiles steps with torch's profiler: the spans of a typical step, and the memory of one more.

Recording the shapes of messages slows a profiled step by some percent, and recording allocations by more, so spans and
memory come from different steps. Spans are those of the step of median time out of several, because one step on a
shared machine says little. While allocations are recorded, passes wait for the device, so that the memory that a pass
allocates falls into its time.

The memory of a rank over a step, by category, follows from the address, the bytes and the time of every allocation and
free. The profiler does not tell what an allocation is for, but three facts are known: the addresses of gradients at the
end of the step, the pass in which memory was allocated, and whether it outlived that pass. So

* a gradient is memory at the address of a gradient at the end;
* a parameter was allocated while ``fully_shard`` gathered, and stayed;
* an optimizer state was allocated in the update, and stayed;
* an activation was allocated by a forward pass or a recomputation, and outlived it;
* everything else is a buffer: freed in the pass that allocated it, or a gradient between two passes.
"""

import platform
from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from meshwise.executor.recording import trace
from meshwise.executor.recording.accelerator import Accelerator
from meshwise.executor.recording.recorder import Record, Recorder
from meshwise.executor.recording.tensors import local
from meshwise.executor.recording.trace import Allocation, TraceEvent
from meshwise.simulator.memory import CATEGORIES
from meshwise.simulator.program import Category, TaskKind

_FORWARD = (TaskKind.FORWARD, TaskKind.RECOMPUTE)
_GATHER = "FSDP::all_gather"


class _Window(NamedTuple):
    """An interval of the step, and the category of memory that is allocated in it and outlives it."""

    start: int
    end: int
    leaves: Category


def categories(
    allocations: Sequence[Allocation],
    records: Iterable[Record],
    events: Iterable[TraceEvent],
    gradients: Container[int],
) -> list[tuple[int, Category, int]]:
    """Return (ns, category, bytes) of every allocation and, with bytes below 0, of every free, in order.

    Parameters
    ----------
    records
        The passes of the step.
    events
        Events of the profiler, among them the gathers of ``fully_shard``.
    gradients
        Addresses of gradients at the end of the step.
    """
    windows = sorted(_windows(records, events), key=lambda window: (window.start, -window.end))
    starts = [window.start for window in windows]
    found: list[tuple[int, Category, int]] = []
    held: dict[int, Allocation] = {}
    for taken in allocations:
        if taken.size > 0:
            held[taken.address] = taken
        elif (before := held.pop(taken.address, None)) is not None:
            window = _window(windows, starts, before.time)
            category = window.leaves if window is not None and taken.time > window.end else Category.BUFFERS
            found += [(before.time, category, before.size), (taken.time, category, taken.size)]
        else:  # allocated before the step
            found.append((taken.time, Category.BUFFERS, taken.size))
    for address, left in held.items():
        window = _window(windows, starts, left.time)
        rest = window.leaves if window is not None else Category.BUFFERS
        found.append((left.time, Category.GRADIENTS if address in gradients else rest, left.size))
    return sorted(found)


def _windows(records: Iterable[Record], events: Iterable[TraceEvent]) -> Iterator[_Window]:
    for record in records:
        leaves = Category.ACTIVATIONS if record.kind in _FORWARD else Category.BUFFERS
        leaves = Category.OPTIMIZER if record.kind is TaskKind.OPTIMIZER else leaves
        yield _Window(record.start, record.end, leaves)
    for event in events:
        if event.name.startswith(_GATHER):
            yield _Window(event.start, event.end, Category.PARAMETERS)


def _window(windows: Sequence[_Window], starts: Sequence[int], instant: int) -> _Window | None:
    """Return the innermost window at ``instant``: of those that have not ended, the one that began last."""
    index = bisect_right(starts, instant)
    return next((window for window in reversed(windows[:index]) if instant <= window.end), None)


def turning_points(changes: Iterable[tuple[int, Category, int]], start: int) -> list[tuple[int, list[int]]]:
    """Return (ns, change of bytes by category since ``start``) where the total turns between rising and falling."""
    level = [0] * len(CATEGORIES)
    result, rising = [(start, level.copy())], True
    for instant, category, size in changes:
        if instant < start:
            continue
        level[CATEGORIES.index(category)] += size
        if (size > 0) == rising and len(result) > 1:
            result[-1] = (instant, level.copy())
        else:
            result.append((instant, level.copy()))
        rising = size > 0
    return result


STEPS = 3
"""The number of profiled steps, of which the one of median time counts."""
Spans = Callable[[Sequence[Record], Sequence[TraceEvent]], list[trace.Row]]
_MARK = "meshwise mark "
_MARKS = 20
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class _Profiled(NamedTuple):
    """One step under the profiler; times in ns of the host's clock."""

    start: int
    end: int
    records: list[Record]
    events: list[TraceEvent]
    spans: list[trace.Row]
    allocations: list[Allocation]


def profiled(
    step: Callable[[], object],
    recorder: Recorder,
    accelerator: Accelerator,
    resident: Mapping[str, int],
    gradients: Callable[[], Iterable[Tensor]],
    *,
    before: Callable[[], object],
    spans: Spans | None = None,
    once: bool = False,
) -> dict[str, Any]:
    """Return the spans and the memory of profiled steps, in the form of a rank's result file.

    The steps are not among the timed ones, because the profiler slows them.

    Parameters
    ----------
    resident
        Bytes that live from step to step, by category.
    gradients
        Returns the gradients that a rank has when a step is over.
    prepare_step
        Called before each step, to free tensors of an earlier step unseen. If they were freed inside the step, torch
        would report them with what it last saw at their address, which may belong to another job.
    spans
        Returns spans from records that are exact by the host's clock and from events; by default the accelerator does.
    single_step
        Whether one step gives both spans and memory. It must where messages are in flight between steps: they would end
        under another profiler than they began under, which corrupts torch's memory.
    """

    def run(*, timed: bool, memory: bool = False) -> _Profiled:
        before()
        return _profiled(step, recorder, accelerator, spans, timed=timed, memory=memory)

    if once:
        typical = minded = run(timed=True, memory=True)
    else:
        run(timed=True)  # the profiler's own first step is slow
        typical = _median([run(timed=True) for _ in range(STEPS)])
        minded = run(timed=False, memory=True)
    result: dict[str, Any] = {
        "clock": clock(),
        "engine": accelerator.engine,
        "capacity": accelerator.capacity,
        "start": typical.start,
        "end": typical.end,
        "spans": typical.spans,
        "resident": resident,
    }
    changes = categories(minded.allocations, minded.records, minded.events, addresses(gradients()))
    later = typical.start - minded.start  # the memory of this step is shown at the time of the typical one
    points = turning_points(changes, minded.start)
    result["memory"] = [(instant + later, usage) for instant, usage in points]
    return result


def clock() -> str:
    """Return an identifier of this host's monotonic clock: the id of its boot, or its name where there is no id."""
    return _BOOT.read_text().strip() if _BOOT.exists() else platform.node()


def addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Return the addresses of the storages of tensors."""
    return {local(tensor).untyped_storage().data_ptr() for tensor in tensors}


def _profiled(
    step: Callable[[], object],
    recorder: Recorder,
    accelerator: Accelerator,
    spans: Spans | None,
    *,
    timed: bool,
    memory: bool,
) -> _Profiled:
    records: list[Record] = []
    recorder.exact = spans is not None or not timed
    with accelerator.profiler(timed=timed, shapes=timed, memory=memory) as profiler:
        accelerator.synchronise()
        dist.barrier()
        marks = [_mark(index) for index in range(_MARKS)]
        recorder.records = records
        start = perf_counter_ns()
        step()
        accelerator.synchronise()
        end = perf_counter_ns()
        recorder.records = None
    recorder.exact = False
    raw = accelerator.events(profiler, timed=timed)
    offset = _offset(marks, raw)
    events = [event.later(offset) for event in raw]
    taken = [each._replace(time=each.time + offset) for each in accelerator.allocations(profiler)] if memory else []
    return _Profiled(start, end, records, events, (spans or accelerator.rows)(records, events), taken)


def _median(steps: Sequence[_Profiled]) -> _Profiled:
    """Return the step of median time, taken on its slowest rank: the same step on every rank."""
    times = torch.tensor([each.end - each.start for each in steps])
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return steps[int(times.argsort()[len(steps) // 2])]


def _mark(index: int) -> tuple[int, int]:
    """Return the times of the host's clock between which the profiler records a mark."""
    before = perf_counter_ns()
    with record_function(f"{_MARK}{index}"):
        pass
    return before, perf_counter_ns()


def _offset(marks: Sequence[tuple[int, int]], events: Iterable[TraceEvent]) -> int:
    """Return the ns to add to the profiler's clock to get the host's.

    Of all marks the one with the narrowest bounds counts, because the host may pause inside a mark.
    """
    middles = {event.name: (event.start + event.end) // 2 for event in events if event.name.startswith(_MARK)}
    index = min(range(len(marks)), key=lambda index: marks[index][1] - marks[index][0])
    return sum(marks[index]) // 2 - middles[f"{_MARK}{index}"]
