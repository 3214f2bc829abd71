"""Divides the operators of a program into blocks: segments that repeat, and the modules between them.

An operator is a draft until its dims have names and it belongs to a block. A repeated segment consists of equal
sequences of operators (copies), each of which reads from the copy before it in the same way.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.fx import Node

from meshwise.executor.capture.reading import Reading, Value, module_path
from meshwise.executor.capture.rules.dims import Axes, Dim, leaves
from meshwise.executor.capture.rules.table import name_of
from meshwise.executor.capture.rules.work import MASK, RESULT, Work
from meshwise.simulator.operator_graph import OperatorKind


@dataclass(frozen=True, eq=False)
class Draft:
    """One operator before its dims have names: its inputs and outputs as values of nodes, and its dims."""

    node: Node
    name: str
    path: str
    kind: OperatorKind
    space: tuple[Dim, ...]
    reduced: tuple[Dim, ...]
    uncut: tuple[Dim, ...]
    inputs: tuple[Value, ...]
    parameters: tuple[Value, ...]
    outputs: tuple[Value, ...]
    saved: tuple[Value, ...]
    flops: float
    executed: float

    @property
    def values(self) -> tuple[Value, ...]:
        """All values of the operator, each once."""
        return tuple(dict.fromkeys((*self.inputs, *self.parameters, *self.outputs, *self.saved)))


def drafts(reading: Reading) -> tuple[Draft, ...]:
    """Return the operators in the order of the program, without constants, views, and aliases that nothing reads."""
    nodes = (node for node in reading.program.module.graph.nodes if node in reading.works and node.users)
    return tuple(
        _draft(reading, node, work)
        for node in nodes
        if node not in reading.constant and (work := reading.works[node]).kind is not None
    )


def _draft(reading: Reading, node: Node, work: Work) -> Draft:
    operands = node.all_input_nodes
    views = [axes for each in operands for axes in reading.axes[each][:1]] + list(work.outputs)
    reduced = leaves(work.reduced)
    space = leaves(work.space) if work.space else leaves(axis for axes in (*work.outputs, *views) for axis in axes)
    space = tuple(dict.fromkeys((*space, *reduced)))
    closed = {*leaves(work.uncut), *_inner(views)}
    roots = [reading.root(each) for each in operands]
    is_parameter = [value[0].name in reading.program.parameters for value in roots]
    read = [value for value, mine in zip(roots, is_parameter, strict=True) if not mine]
    owned = [value for value, mine in zip(roots, is_parameter, strict=True) if mine]
    kind, read = _sound(work.kind, read, owned)
    return Draft(
        node,
        name_of(node.target),
        module_path(node),
        kind,
        space,
        reduced,
        tuple(dim for dim in space if dim in closed),
        tuple(read),
        tuple(dict.fromkeys(owned)),
        tuple((node, index) for index in range(len(work.outputs))),
        tuple(dict.fromkeys(_saved(reading, node, work))),
        work.flops,
        work.executed,
    )


def _inner(views: list[Axes]) -> set[Dim]:
    """Return the inner dims of merged torch dims; a contiguous part of a merged dim is not a part of its inner dims."""
    return {leaf for axes in views for axis in axes if axis is not None for leaf in axis.leaves[1:]}


def _sound(kind: OperatorKind | None, read: list[Value], owned: list[Value]) -> tuple[OperatorKind, list[Value]]:
    """Return the kind that the cost model expects, and each input once.

    A product without two operands, and an embedding whose table is no parameter, count as elementwise.
    """
    assert kind is not None
    products = (OperatorKind.MATMUL, OperatorKind.BATCH_MATMUL, OperatorKind.CONVOLUTION)
    once = list(dict.fromkeys(read))
    if kind in products and (not read or len(once) + len(owned) < 2):
        return OperatorKind.ELEMENTWISE, once
    if kind is OperatorKind.EMBEDDING and not owned:
        return OperatorKind.ELEMENTWISE, once
    return kind, once


def _saved(reading: Reading, node: Node, work: Work) -> list[Value]:
    if node not in reading.differentiable:
        return []
    result: list[Value] = []
    for each in work.saves:
        if each == RESULT:
            result.append((node, 0))
        elif each == MASK:
            result.append((node, 1))
        elif isinstance(each, Node):
            root = reading.root(each)
            if root[0].name not in reading.program.parameters:
                result.append(root)
    return result


Renaming = dict[Dim, Dim]
"""Dim of a copy -> the same dim of the first copy."""


@dataclass(frozen=True)
class Segment:
    """Operators ``start .. start + length * repeat`` of a program as one block.

    Parameters
    ----------
    renamings
        For each copy, its dims -> the dims of the first copy.
    handed
        Pairs of a value that the first copy reads, and the value of the last copy that the next block reads instead.
    """

    start: int
    length: int
    repeat: int = 1
    renamings: tuple[Renaming, ...] = ()
    handed: tuple[tuple[Value, Value], ...] = ()

    @property
    def stop(self) -> int:
        """Index of the operator behind the segment."""
        return self.start + self.length * self.repeat


def repeated(reading: Reading, operators: Sequence[Draft]) -> tuple[Segment, ...]:
    """Return the repeated segments that cover the most operators, in order and without overlap."""
    finder = _Finder(reading, operators)
    return tuple(sorted(finder.within(0, len(operators)), key=lambda segment: segment.start))


class _Finder:
    def __init__(self, reading: Reading, operators: Sequence[Draft]) -> None:
        self.reading, self.operators = reading, operators
        self.made = {value: index for index, each in enumerate(operators) for value in each.outputs}
        self.readers: dict[Value, list[int]] = {}
        for index, each in enumerate(operators):
            for value in dict.fromkeys((*each.inputs, *each.parameters)):
                self.readers.setdefault(value, []).append(index)
        self.signatures = [_signature(reading, each) for each in operators]

    def within(self, start: int, stop: int) -> Iterator[Segment]:
        """Yield the repeated segment that covers most of a range, and those of the ranges before and after it."""
        best = next((run for run in self._candidates(start, stop) if run is not None), None)
        if best is None:
            return
        yield best
        yield from self.within(start, best.start)
        yield from self.within(best.stop, stop)

    def _candidates(self, start: int, stop: int) -> Iterator[Segment | None]:
        found = []
        for length in range(1, (stop - start) // 2 + 1):
            for first, count in self._equal(start, stop, length):
                found.append((-length * (count // length + 1), length, first, count))
        for _, length, first, count in sorted(found):  # the most operators first, of equals the shortest copy
            copies, slack = count // length + 1, count % length
            for repeat, spare in ((copies, slack), (copies - 1, slack + length)):
                if repeat < 2:
                    continue
                for begin in self._beginnings(first, spare, length):
                    yield self._run(begin, length, repeat)

    def _equal(self, start: int, stop: int, length: int) -> Iterator[tuple[int, int]]:
        """Yield start and number of consecutive operators equal to those ``length`` later, for at least ``length``."""
        count = 0
        for index in range(start, stop - length + 1):
            same = index + length < stop and self.signatures[index] == self.signatures[index + length]
            if same:
                count += 1
            elif count:
                if count >= length:
                    yield index - count, count
                count = 0

    def _beginnings(self, first: int, spare: int, length: int) -> list[int]:
        """Return where a repeated segment may start; first the places where a new module of a list starts."""
        places = range(first, first + spare + 1)
        return sorted(places, key=lambda place: not self._borders(place, length))

    def _borders(self, place: int, length: int) -> bool:
        here = member(self.operators[place].path)
        before = member(self.operators[place - 1].path) if place else ""
        after = member(self.operators[place + length].path)
        return bool(here) and here != before and after != here

    def _run(self, start: int, length: int, repeat: int) -> Segment | None:
        """Return the segment; None where copies differ, or read from the copy before them in different ways."""
        parts = [range(start + copy * length, start + (copy + 1) * length) for copy in range(repeat)]
        # repeated arithmetic without parameters is no layer
        if not any(self.operators[index].parameters for index in parts[0]):
            return None
        renamings, outsides = [], []
        for part in parts:
            outside = self._wired_like(parts[0], part)
            renaming = None if outside is None else self._renaming(parts[0], part)
            if outside is None or renaming is None:
                return None
            outsides.append(outside)
            renamings.append(renaming)
        roles = [self._roles(outsides, parts, copy) for copy in range(1, repeat)]
        if any(role is None or role != roles[0] for role in roles):
            return None
        handed = self._handed(parts, outsides, roles[0] or [])
        if handed is None or not self._steady(outsides, handed, renamings):
            return None
        return Segment(start, length, repeat, tuple(renamings), tuple(handed.items()))

    def _wired_like(self, first: range, part: range) -> list[Value] | None:
        """Return the values that a copy reads from before it, in the order of use; None where its wiring differs."""
        outside: dict[Value, Value] = {}
        for one, other in zip(first, part, strict=True):
            mine, theirs = self.operators[one], self.operators[other]
            if len(mine.values) != len(theirs.values):
                return None
            for value, like in zip(theirs.values, mine.values, strict=True):
                if not self._alike(like, value, first, part):
                    return None
                if value in self.made and self.made[value] < part.start and outside.setdefault(value, like) != like:
                    return None
        if len(set(outside.values())) < len(outside):
            return None
        return list(outside)

    def _alike(self, like: Value, value: Value, first: range, part: range) -> bool:
        if value in self.made:
            made, model = self.made[value], self.made.get(like)
            inside = made >= part.start
            if model is None or inside != (model >= first.start):
                return False
            return not inside or (made - part.start == model - first.start and value[1] == like[1])
        name = value[0].name
        if name in self.reading.program.parameters:
            alone = all(index in part for index in self.readers[value])
            return alone and like[0].name in self.reading.program.parameters
        if name in self.reading.program.inputs:
            return value == like
        return value[0] in self.reading.constant and like[0] in self.reading.constant

    def _renaming(self, first: range, part: range) -> Renaming | None:
        """Return the renaming of a copy's dims to those of the first copy; None where it is not one to one."""
        renaming: Renaming = {}
        for one, other in zip(first, part, strict=True):
            mine, theirs = self.operators[one], self.operators[other]
            pairs = [(mine.space, theirs.space), (mine.reduced, theirs.reduced), (mine.uncut, theirs.uncut)]
            pairs += [(self.dims(a), self.dims(b)) for a, b in zip(mine.values, theirs.values, strict=True)]
            for left, right in pairs:
                if len(left) != len(right):
                    return None
                for dim, like in zip(right, left, strict=True):
                    if dim.size != like.size or renaming.setdefault(dim, like) is not like:
                        return None
        one_to_one = len(set(renaming.values())) == len(renaming)
        return renaming if one_to_one else None

    def dims(self, value: Value) -> tuple[Dim, ...]:
        """Return the dims of a value."""
        return leaves(self.reading.axes[value[0]][value[1]])

    def _roles(self, outsides: list[list[Value]], parts: list[range], copy: int) -> list[tuple[int, int] | None] | None:
        """Return the origin of each value that a copy reads: the operator and output of the copy before.

        It is None for a value that the copy before read as well. The result is None where a value has neither origin.
        """
        roles: list[tuple[int, int] | None] = []
        for slot, value in enumerate(outsides[copy]):
            made = self.made[value]
            if made in parts[copy - 1]:
                roles.append((made - parts[copy - 1].start, value[1]))
            elif outsides[copy - 1][slot] == value:
                roles.append(None)
            else:
                return None
        return roles

    def _handed(
        self, parts: list[range], outsides: list[list[Value]], roles: list[tuple[int, int] | None]
    ) -> dict[Value, Value] | None:
        """Return the last copy's value for each input of the first copy; None where later reads need other values."""
        end = parts[-1].stop
        handed = {}
        for value, role in zip(outsides[0], roles, strict=True):
            made = None if role is None else self.operators[parts[-1].start + role[0]].outputs[role[1]]
            handed[value] = value if made is None else made
        for copy, part in enumerate(parts):
            last = copy == len(parts) - 1
            for value in (value for index in part for value in self.operators[index].outputs):
                readers = self.readers.get(value, [])
                if last and any(index >= end for index in readers) and value not in handed.values():
                    return None
                if not last and any(index >= parts[copy + 1].stop for index in readers):
                    return None
        return handed

    def _steady(self, outsides: list[list[Value]], handed: dict[Value, Value], renamings: list[Renaming]) -> bool:
        """Return whether dims that cross from copy to copy, or that copies share, are the same dims in all copies."""
        crossing = [value for outside in outsides for value in outside] + list(handed.values())
        shared = {dim for value in crossing for dim in self.dims(value)}
        shared |= {dim for renaming in renamings[1:] for dim in renaming if dim in renamings[0]}
        return all(renaming.get(dim, dim) is dim for renaming in renamings for dim in shared)


def member(path: str) -> str:
    """Return a module's name up to its first number, the index in a list of modules; empty without a number.

    >>> member("decoder.layers.3.attention.query"), member("head")
    ('decoder.layers.3', '')
    """
    parts = path.split(".")
    place = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    return "" if place is None else ".".join(parts[: place + 1])


def _signature(reading: Reading, draft: Draft) -> object:
    """Return a key that is equal for two operators that may be copies of each other."""
    numbers = tuple(repr(each) for each in (*draft.node.args, *sorted(draft.node.kwargs.items())) if not _reads(each))
    values = (*draft.inputs, *draft.parameters, *draft.outputs, *draft.saved)
    shapes = tuple(tuple(dim.size for dim in leaves(reading.axes[node][index])) for node, index in values)
    counts = len(draft.inputs), len(draft.parameters), len(draft.saved)
    return draft.kind, str(draft.node.target), numbers, shapes, counts, _dtype(draft.node)


def _reads(argument: object) -> bool:
    """Return whether an argument is a tensor or contains one."""
    if isinstance(argument, list | tuple):
        return any(_reads(each) for each in argument)
    return isinstance(argument, Node)


def _dtype(node: Node) -> str:
    value = node.meta["val"]
    return str([each.dtype for each in (value if isinstance(value, tuple | list) else (value,))])


@dataclass(frozen=True)
class Placed:
    """A segment with the name of its block; ``path`` is the module that its operators belong to."""

    segment: Segment
    name: str
    path: str
    layer: bool


def divided(reading: Reading, operators: Sequence[Draft]) -> tuple[Placed, ...]:
    """Return all operators as named segments; layers are those from the first to the last member of a list."""
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
    """Return ``name``, with a number where it is used already, and mark the result as used."""
    number, candidate = 1, name
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    taken[candidate] = None
    return candidate


def _between(operators: Sequence[Draft], start: int, stop: int) -> list[tuple[Segment, str]]:
    """Return a range of operators split by module; operators without parameters join the segment before them."""
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
