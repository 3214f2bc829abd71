"""What a rank holds over a step by category, from where and when each piece of memory was taken and given back.

torch's profiler tells address, bytes and moment of every allocation, not what it is for. What is known: the
addresses at which gradients lie when the step is over; the pass in which something was taken, and whether it lived
longer than that pass. So

* a gradient is what lies, at the end, where a gradient lies;
* a parameter is what was taken while ``fully_shard`` gathered, and stayed;
* an optimizer state is what was taken in the update, and stayed;
* an activation is what a forward or a recomputation took and left to a later pass;
* all else is a buffer: taken and given back inside one pass, or a gradient between two passes.
"""

from bisect import bisect_right
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import NamedTuple

from executor.recorder import Record
from executor.trace import Allocation, TraceEvent
from simulator.memory import CATEGORIES
from simulator.program import Category, TaskKind

_FORWARD = (TaskKind.FORWARD, TaskKind.RECOMPUTE)
_GATHER = "FSDP::all_gather"


class _Window(NamedTuple):
    """A stretch of the step, and what is taken in it that stays."""

    start: int
    end: int
    leaves: Category


def categories(
    allocations: Sequence[Allocation],
    records: Iterable[Record],
    events: Iterable[TraceEvent],
    gradients: Container[int],
) -> list[tuple[int, Category, int]]:
    """Return (ns, category, bytes) of everything that is taken and given back, in order.

    Parameters
    ----------
    records
        The passes of the step.
    events
        Among them the gathers of ``fully_shard``.
    gradients
        Addresses at which gradients lie at the end.
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
        else:  # of before the step
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
    """Return the innermost window at ``instant``: the last begun of those that have not ended."""
    index = bisect_right(starts, instant)
    return next((window for window in reversed(windows[:index]) if instant <= window.end), None)


def turning_points(changes: Iterable[tuple[int, Category, int]], start: int) -> list[tuple[int, list[int]]]:
    """Return (ns, bytes by category beyond what was held at ``start``) where the total turns, from ``start`` on."""
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
