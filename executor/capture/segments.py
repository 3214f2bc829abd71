"""Divides the operators of a program into blocks: runs that repeat, and the modules between them."""

from collections.abc import Sequence
from dataclasses import dataclass

from executor.capture.drafts import Draft
from executor.capture.reading import Reading
from executor.capture.runs import Segment, member, repeated


@dataclass(frozen=True)
class Placed:
    """A segment with the name of its block; ``path`` is the module that its operators are part of."""

    segment: Segment
    name: str
    path: str
    layer: bool


def divided(reading: Reading, operators: Sequence[Draft]) -> tuple[Placed, ...]:
    """Return all operators as segments, in order; layers are those of lists of modules and all between them."""
    found: list[tuple[Segment, str]] = []
    start = 0
    for run in (*repeated(reading, operators), None):
        stop = len(operators) if run is None else run.start
        found += _between(operators, start, stop)
        if run is not None:
            found.append((run, member(operators[run.start].path) or operators[run.start].path))
            start = run.stop
    members = [index for index, (segment, path) in enumerate(found) if segment.repeat > 1 or member(path)]
    layers = range(members[0], members[-1] + 1) if members else range(len(found))
    names: dict[str, None] = {}
    result = []
    for index, (segment, path) in enumerate(found):
        whole = path.rpartition(".")[0] if segment.repeat > 1 and member(path) == path else path
        name = unique(whole.replace(".", "_") or "block", names)
        result.append(Placed(segment, name, path, index in layers))
    return tuple(result)


def unique(name: str, taken: dict[str, None]) -> str:
    """Return ``name``, or with a number where it is taken, and take it."""
    number, candidate = 1, name
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    taken[candidate] = None
    return candidate


def _between(operators: Sequence[Draft], start: int, stop: int) -> list[tuple[Segment, str]]:
    """Return a range of operators module by module; those without parameters go with the ones before."""
    bounds: list[tuple[int, str]] = []
    for index in range(start, stop):
        path = operators[index].path
        key = member(path) or path.partition(".")[0]
        owns = bool(operators[index].parameters)
        if not bounds or (key and owns and key != bounds[-1][1] and bounds[-1][1]):
            bounds.append((index, key if owns else ""))
        elif owns and not bounds[-1][1]:
            bounds[-1] = (bounds[-1][0], key)
    ends = [first for first, _ in bounds[1:]] + [stop]
    return [(Segment(first, end - first), key) for (first, key), end in zip(bounds, ends, strict=True)]
