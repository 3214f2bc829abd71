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
from meshwise.executor.recording.tensors import to_local
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


def categorise_allocations(
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
    windows = sorted(_list_windows(records, events), key=lambda window: (window.start, -window.end))
    starts = [window.start for window in windows]
    changes: list[tuple[int, Category, int]] = []
    live_allocations: dict[int, Allocation] = {}
    for allocation in allocations:
        if allocation.size > 0:
            live_allocations[allocation.address] = allocation
        elif (origin := live_allocations.pop(allocation.address, None)) is not None:
            window = _find_window(windows, starts, origin.time)
            category = window.leaves if window is not None and allocation.time > window.end else Category.BUFFERS
            changes += [(origin.time, category, origin.size), (allocation.time, category, allocation.size)]
        else:  # allocated before the step
            changes.append((allocation.time, Category.BUFFERS, allocation.size))
    for address, survivor in live_allocations.items():
        window = _find_window(windows, starts, survivor.time)
        fallback = window.leaves if window is not None else Category.BUFFERS
        changes.append((survivor.time, Category.GRADIENTS if address in gradients else fallback, survivor.size))
    return sorted(changes)


def _list_windows(records: Iterable[Record], events: Iterable[TraceEvent]) -> Iterator[_Window]:
    for record in records:
        leaves = Category.ACTIVATIONS if record.kind in _FORWARD else Category.BUFFERS
        leaves = Category.OPTIMIZER if record.kind is TaskKind.OPTIMIZER else leaves
        yield _Window(record.start, record.end, leaves)
    for event in events:
        if event.name.startswith(_GATHER):
            yield _Window(event.start, event.end, Category.PARAMETERS)


def _find_window(windows: Sequence[_Window], starts: Sequence[int], instant: int) -> _Window | None:
    """Return the innermost window at ``instant``: of those that have not ended, the one that began last."""
    index = bisect_right(starts, instant)
    return next((window for window in reversed(windows[:index]) if instant <= window.end), None)


def find_turning_points(changes: Iterable[tuple[int, Category, int]], start: int) -> list[tuple[int, list[int]]]:
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


NUM_STEPS = 3
"""The number of profiled steps, of which the one of median time counts."""
Spans = Callable[[Sequence[Record], Sequence[TraceEvent]], list[trace.Row]]
_MARK = "meshwise mark "
_NUM_MARKS = 20
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class _ProfiledStep(NamedTuple):
    """One step under the profiler; times in ns of the host's clock."""

    start: int
    end: int
    records: list[Record]
    events: list[TraceEvent]
    spans: list[trace.Row]
    allocations: list[Allocation]


def profile_steps(
    step: Callable[[], object],
    recorder: Recorder,
    accelerator: Accelerator,
    resident: Mapping[str, int],
    gradients: Callable[[], Iterable[Tensor]],
    *,
    prepare_step: Callable[[], object],
    spans: Spans | None = None,
    single_step: bool = False,
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

    def run(*, timed: bool, memory: bool = False) -> _ProfiledStep:
        prepare_step()
        return _profile_step(step, recorder, accelerator, spans, timed=timed, memory=memory)

    if single_step:
        typical_step = memory_step = run(timed=True, memory=True)
    else:
        run(timed=True)  # the profiler's own first step is slow
        typical_step = _pick_median([run(timed=True) for _ in range(NUM_STEPS)])
        memory_step = run(timed=False, memory=True)
    result: dict[str, Any] = {
        "clock": identify_clock(),
        "engine": accelerator.engine,
        "capacity": accelerator.capacity,
        "start": typical_step.start,
        "end": typical_step.end,
        "spans": typical_step.spans,
        "resident": resident,
    }
    changes = categorise_allocations(
        memory_step.allocations, memory_step.records, memory_step.events, list_addresses(gradients())
    )
    offset = typical_step.start - memory_step.start  # the memory of this step is shown at the time of the typical one
    points = find_turning_points(changes, memory_step.start)
    result["memory"] = [(instant + offset, usage) for instant, usage in points]
    return result


def identify_clock() -> str:
    """Return an identifier of this host's monotonic clock: the id of its boot, or its name where there is no id."""
    return _BOOT.read_text().strip() if _BOOT.exists() else platform.node()


def list_addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Return the addresses of the storages of tensors."""
    return {to_local(tensor).untyped_storage().data_ptr() for tensor in tensors}


def _profile_step(
    step: Callable[[], object],
    recorder: Recorder,
    accelerator: Accelerator,
    spans: Spans | None,
    *,
    timed: bool,
    memory: bool,
) -> _ProfiledStep:
    records: list[Record] = []
    recorder.exact = spans is not None or not timed
    with accelerator.make_profiler(timed=timed, shapes=timed, memory=memory) as profiler:
        accelerator.synchronise()
        dist.barrier()
        marks = [_make_mark(index) for index in range(_NUM_MARKS)]
        recorder.records = records
        start = perf_counter_ns()
        step()
        accelerator.synchronise()
        end = perf_counter_ns()
        recorder.records = None
    recorder.exact = False
    raw = accelerator.read_events(profiler, timed=timed)
    offset = _find_offset(marks, raw)
    events = [event.shift_clock(offset) for event in raw]
    raw_allocations = accelerator.read_allocations(profiler) if memory else []
    allocations = [allocation._replace(time=allocation.time + offset) for allocation in raw_allocations]
    return _ProfiledStep(start, end, records, events, (spans or accelerator.build_rows)(records, events), allocations)


def _pick_median(steps: Sequence[_ProfiledStep]) -> _ProfiledStep:
    """Return the step of median time, taken on its slowest rank: the same step on every rank."""
    times = torch.tensor([step.end - step.start for step in steps])
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return steps[int(times.argsort()[len(steps) // 2])]


def _make_mark(index: int) -> tuple[int, int]:
    """Return the times of the host's clock between which the profiler records a mark."""
    start = perf_counter_ns()
    with record_function(f"{_MARK}{index}"):
        pass
    return start, perf_counter_ns()


def _find_offset(marks: Sequence[tuple[int, int]], events: Iterable[TraceEvent]) -> int:
    """Return the ns to add to the profiler's clock to get the host's.

    Of all marks the one with the narrowest bounds counts, because the host may pause inside a mark.
    """
    middles = {event.name: (event.start + event.end) // 2 for event in events if event.name.startswith(_MARK)}
    index = min(range(len(marks)), key=lambda index: marks[index][1] - marks[index][0])
    return sum(marks[index]) // 2 - middles[f"{_MARK}{index}"]
