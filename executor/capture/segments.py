"""Divides the operators of a program into blocks: segments that repeat, and the modules between them.

An operator is a draft until its dims have names and it belongs to a block. A repeated segment consists of equal
sequences of operators (copies), each of which reads from the copy before it in the same way.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.fx import Node

from meshwise.executor.capture.reading import Reading, Value, find_module_path
from meshwise.executor.capture.rules.dims import Dim, TensorDims, list_leaves
from meshwise.executor.capture.rules.table import get_name
from meshwise.executor.capture.rules.work import MASK, RESULT, Work, list_values
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
    saved_values: tuple[Value, ...]
    flops: float
    executed_fraction: float

    @property
    def values(self) -> tuple[Value, ...]:
        """All values of the operator, each once."""
        return tuple(dict.fromkeys((*self.inputs, *self.parameters, *self.outputs, *self.saved_values)))


def list_drafts(reading: Reading) -> tuple[Draft, ...]:
    """Return the operators in the order of the program, without constants, views, and aliases that nothing reads."""
    nodes = (node for node in reading.program.module.graph.nodes if node in reading.works and node.users)
    return tuple(
        _build_draft(reading, node, work)
        for node in nodes
        if node not in reading.constants and (work := reading.works[node]).kind is not None
    )


def _build_draft(reading: Reading, node: Node, work: Work) -> Draft:
    operands = node.all_input_nodes
    tensor_dims = [dims for operand in operands for dims in reading.node_dims[operand][:1]] + list(work.outputs)
    reduced = list_leaves(work.reduced_dims)
    all_dims = (torch_dim for dims in (*work.outputs, *tensor_dims) for torch_dim in dims)
    space = tuple(dict.fromkeys((*list_leaves(work.space or all_dims), *reduced)))
    inner_dims = set() if work.is_pointwise or work.kind in _PRODUCTS else _find_inner_dims(tensor_dims)
    uncut_dims = {*list_leaves(work.uncut_dims), *inner_dims}
    roots = [reading.find_root(operand) for operand in operands]
    is_parameter = [value[0].name in reading.program.parameters for value in roots]
    read_values = [value for value, is_owned in zip(roots, is_parameter, strict=True) if not is_owned]
    parameter_values = [value for value, is_owned in zip(roots, is_parameter, strict=True) if is_owned]
    kind, read_values = _adjust_kind(work.kind, read_values, parameter_values)
    return Draft(
        node,
        get_name(node.target),
        find_module_path(node),
        kind,
        space,
        reduced,
        tuple(dim for dim in space if dim in uncut_dims),
        tuple(read_values),
        tuple(dict.fromkeys(parameter_values)),
        tuple((node, index) for index in range(len(work.outputs))),
        tuple(dict.fromkeys(_list_saved(reading, node, work))),
        work.flops,
        work.executed_fraction,
    )


_PRODUCTS = (OperatorKind.MATMUL, OperatorKind.BATCH_MATMUL)
"""Operators that any part of a torch dim may be cut from, as of packed queries, keys and values the heads of each."""


def _find_inner_dims(tensor_dims: list[TensorDims]) -> set[Dim]:
    """Return the inner dims of merged torch dims; a contiguous part of a merged dim is not a part of these."""
    return {leaf for dims in tensor_dims for dim in dims if dim is not None for leaf in dim.leaves[1:]}


def _adjust_kind(
    kind: OperatorKind | None, read_values: list[Value], parameter_values: list[Value]
) -> tuple[OperatorKind, list[Value]]:
    """Return the kind that the cost model expects, and each input once.

    A product without two operands, and an embedding whose table is no parameter, count as elementwise.
    """
    assert kind is not None
    products = (*_PRODUCTS, OperatorKind.CONVOLUTION)
    unique_values = list(dict.fromkeys(read_values))
    if kind in products and (not read_values or len(unique_values) + len(parameter_values) < 2):
        return OperatorKind.ELEMENTWISE, unique_values
    if kind is OperatorKind.EMBEDDING and not parameter_values:
        return OperatorKind.ELEMENTWISE, unique_values
    return kind, unique_values


def _list_saved(reading: Reading, node: Node, work: Work) -> list[Value]:
    if node not in reading.differentiable_nodes:
        return []
    result: list[Value] = []
    for item in work.saves:
        if item == RESULT:
            result.append((node, 0))
        elif item == MASK:
            result.append((node, 1))
        elif isinstance(item, Node):
            root = reading.find_root(item)
            if root[0].name not in reading.program.parameters:
                result.append(root)
    return result


Renaming = dict[Dim, Dim]
"""Dim of a copy -> the same dim of the first copy."""


@dataclass(frozen=True)
class BlockSegment:
    """Operators ``start .. start + length * repeat`` of a program as one block.

    Parameters
    ----------
    renamings
        For each copy, its dims -> the dims of the first copy.
    handed_values
        Pairs of a value that the first copy reads, and the value of the last copy that the next block reads instead.
    """

    start: int
    length: int
    repeat: int = 1
    renamings: tuple[Renaming, ...] = ()
    handed_values: tuple[tuple[Value, Value], ...] = ()

    @property
    def stop(self) -> int:
        """Index of the operator behind the segment."""
        return self.start + self.length * self.repeat


def find_repeats(reading: Reading, operators: Sequence[Draft]) -> tuple[BlockSegment, ...]:
    """Return the repeated segments that cover the most operators, in order and without overlap."""
    finder = _RepeatFinder(reading, operators)
    return tuple(sorted(finder.find_segments(0, len(operators)), key=lambda segment: segment.start))


class _RepeatFinder:
    def __init__(self, reading: Reading, operators: Sequence[Draft]) -> None:
        self.reading, self.operators = reading, operators
        self.producers = {value: index for index, draft in enumerate(operators) for value in draft.outputs}
        self.readers: dict[Value, list[int]] = {}
        for index, draft in enumerate(operators):
            for value in dict.fromkeys((*draft.inputs, *draft.parameters)):
                self.readers.setdefault(value, []).append(index)
        self.signatures = [_build_signature(reading, draft) for draft in operators]

    def find_segments(self, start: int, stop: int) -> Iterator[BlockSegment]:
        """Yield the repeated segment that covers most of a range, and those of the ranges before and after it."""
        best_segment = next((segment for segment in self._list_candidates(start, stop) if segment is not None), None)
        if best_segment is None:
            return
        yield best_segment
        yield from self.find_segments(start, best_segment.start)
        yield from self.find_segments(best_segment.stop, stop)

    def _list_candidates(self, start: int, stop: int) -> Iterator[BlockSegment | None]:
        candidates = [
            (-length * (num_equal // length + 1), length, run_start, num_equal)
            for length in range(1, (stop - start) // 2 + 1)
            for run_start, num_equal in self._find_equal(start, stop, length)
        ]
        # the most operators first, of equals the shortest copy
        for _, length, run_start, num_equal in sorted(candidates):
            copies, slack = num_equal // length + 1, num_equal % length
            for repeat, num_spare in ((copies, slack), (copies - 1, slack + length)):
                if repeat < 2:
                    continue
                for copy_start in self._list_starts(run_start, num_spare, length):
                    yield self._build_segment(copy_start, length, repeat)

    def _find_equal(self, start: int, stop: int, length: int) -> Iterator[tuple[int, int]]:
        """Yield start and number of consecutive operators equal to those ``length`` later, for at least ``length``."""
        num_equal = 0
        for index in range(start, stop - length + 1):
            is_same = index + length < stop and self.signatures[index] == self.signatures[index + length]
            if is_same:
                num_equal += 1
            elif num_equal:
                if num_equal >= length:
                    yield index - num_equal, num_equal
                num_equal = 0

    def _list_starts(self, run_start: int, num_spare: int, length: int) -> list[int]:
        """Return where a repeated segment may start; first the places where a new module of a list starts."""
        places = range(run_start, run_start + num_spare + 1)
        return sorted(places, key=lambda place: not self._is_border(place, length))

    def _is_border(self, place: int, length: int) -> bool:
        member_path = find_member(self.operators[place].path)
        previous_path = find_member(self.operators[place - 1].path) if place else ""
        next_path = find_member(self.operators[place + length].path)
        return bool(member_path) and member_path != previous_path and next_path != member_path

    def _build_segment(self, start: int, length: int, repeat: int) -> BlockSegment | None:
        """Return the segment; None where copies differ, or read from the copy before them in different ways."""
        parts = [range(start + copy * length, start + (copy + 1) * length) for copy in range(repeat)]
        # repeated arithmetic without parameters is no layer
        if not any(self.operators[index].parameters for index in parts[0]):
            return None
        renamings, outside_lists = [], []
        for part in parts:
            outside_values = self._match_wiring(parts[0], part)
            renaming = None if outside_values is None else self._match_dims(parts[0], part)
            if outside_values is None or renaming is None:
                return None
            outside_lists.append(outside_values)
            renamings.append(renaming)
        roles = [self._find_roles(outside_lists, parts, copy) for copy in range(1, repeat)]
        if any(role is None or role != roles[0] for role in roles):
            return None
        handed_values = self._find_handed(parts, outside_lists, roles[0] or [])
        if handed_values is None or not self._is_steady(outside_lists, handed_values, renamings):
            return None
        return BlockSegment(start, length, repeat, tuple(renamings), tuple(handed_values.items()))

    def _match_wiring(self, first_part: range, part: range) -> list[Value] | None:
        """Return the values that a copy reads from before it, in the order of use; None where its wiring differs."""
        outside_values: dict[Value, Value] = {}
        for first_index, copy_index in zip(first_part, part, strict=True):
            first_draft, copy_draft = self.operators[first_index], self.operators[copy_index]
            if len(first_draft.values) != len(copy_draft.values):
                return None
            for value, first_value in zip(copy_draft.values, first_draft.values, strict=True):
                if not self._is_alike(first_value, value, first_part, part):
                    return None
                if (
                    value in self.producers
                    and self.producers[value] < part.start
                    and outside_values.setdefault(value, first_value) != first_value
                ):
                    return None
        if len(set(outside_values.values())) < len(outside_values):
            return None
        return list(outside_values)

    def _is_alike(self, first_value: Value, value: Value, first_part: range, part: range) -> bool:
        if value in self.producers:
            producer, first_producer = self.producers[value], self.producers.get(first_value)
            is_inside = producer >= part.start
            if first_producer is None or is_inside != (first_producer >= first_part.start):
                return False
            return not is_inside or (
                producer - part.start == first_producer - first_part.start and value[1] == first_value[1]
            )
        name = value[0].name
        if name in self.reading.program.parameters:
            is_unshared = all(index in part for index in self.readers[value])
            return is_unshared and first_value[0].name in self.reading.program.parameters
        if name in self.reading.program.inputs:
            return value == first_value
        return value[0] in self.reading.constants and first_value[0] in self.reading.constants

    def _match_dims(self, first_part: range, part: range) -> Renaming | None:
        """Return the renaming of a copy's dims to those of the first copy; None where it is not one to one."""
        renaming: Renaming = {}
        for first_index, copy_index in zip(first_part, part, strict=True):
            first_draft, copy_draft = self.operators[first_index], self.operators[copy_index]
            dims_lists = [
                [draft.space, draft.reduced, draft.uncut, *map(self.list_dims, draft.values)]
                for draft in (first_draft, copy_draft)
            ]
            for first_dims, copy_dims in zip(*dims_lists, strict=True):
                if len(first_dims) != len(copy_dims):
                    return None
                for dim, first_dim in zip(copy_dims, first_dims, strict=True):
                    if dim.size != first_dim.size or renaming.setdefault(dim, first_dim) is not first_dim:
                        return None
        one_to_one = len(set(renaming.values())) == len(renaming)
        return renaming if one_to_one else None

    def list_dims(self, value: Value) -> tuple[Dim, ...]:
        """Return the dims of a value."""
        return list_leaves(self.reading.node_dims[value[0]][value[1]])

    def _find_roles(
        self, outside_lists: list[list[Value]], parts: list[range], copy: int
    ) -> list[tuple[int, int] | None] | None:
        """Return the origin of each value that a copy reads: the operator and output of the copy before.

        It is None for a value that the copy before read as well. The result is None where a value has neither origin.
        """
        roles: list[tuple[int, int] | None] = []
        for position, value in enumerate(outside_lists[copy]):
            producer = self.producers[value]
            if producer in parts[copy - 1]:
                roles.append((producer - parts[copy - 1].start, value[1]))
            elif outside_lists[copy - 1][position] == value:
                roles.append(None)
            else:
                return None
        return roles

    def _find_handed(
        self, parts: list[range], outside_lists: list[list[Value]], roles: list[tuple[int, int] | None]
    ) -> dict[Value, Value] | None:
        """Return the last copy's value for each input of the first copy; None where later reads need other values."""
        end = parts[-1].stop
        handed_values = {}
        for value, role in zip(outside_lists[0], roles, strict=True):
            last_value = None if role is None else self.operators[parts[-1].start + role[0]].outputs[role[1]]
            handed_values[value] = value if last_value is None else last_value
        for copy, part in enumerate(parts):
            is_last = copy == len(parts) - 1
            for value in (value for index in part for value in self.operators[index].outputs):
                readers = self.readers.get(value, [])
                if is_last and any(index >= end for index in readers) and value not in handed_values.values():
                    return None
                if not is_last and any(index >= parts[copy + 1].stop for index in readers):
                    return None
        return handed_values

    def _is_steady(
        self, outside_lists: list[list[Value]], handed_values: dict[Value, Value], renamings: list[Renaming]
    ) -> bool:
        """Return whether dims that cross from copy to copy, or that copies share, are the same dims in all copies."""
        crossing_values = [value for outside_values in outside_lists for value in outside_values] + list(
            handed_values.values()
        )
        shared_dims = {dim for value in crossing_values for dim in self.list_dims(value)}
        shared_dims |= {dim for renaming in renamings[1:] for dim in renaming if dim in renamings[0]}
        return all(renaming.get(dim, dim) is dim for renaming in renamings for dim in shared_dims)


def find_member(path: str) -> str:
    """Return a module's name up to its first number, the index in a list of modules; empty without a number.

    >>> find_member("decoder.layers.3.attention.query"), find_member("head")
    ('decoder.layers.3', '')
    """
    parts = path.split(".")
    place = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    return "" if place is None else ".".join(parts[: place + 1])


def _build_signature(reading: Reading, draft: Draft) -> object:
    """Return a key that is equal for two operators that may be copies of each other."""
    numbers = tuple(
        repr(argument)
        for argument in (*draft.node.args, *sorted(draft.node.kwargs.items()))
        if not _has_tensors(argument)
    )
    values = (*draft.inputs, *draft.parameters, *draft.outputs, *draft.saved_values)
    shapes = tuple(tuple(dim.size for dim in list_leaves(reading.node_dims[node][index])) for node, index in values)
    counts = len(draft.inputs), len(draft.parameters), len(draft.saved_values)
    dtypes = tuple(tensor.dtype for tensor in list_values(draft.node))
    return draft.kind, str(draft.node.target), numbers, shapes, counts, dtypes


def _has_tensors(argument: object) -> bool:
    """Return whether an argument is a tensor or contains one."""
    if isinstance(argument, list | tuple):
        return any(_has_tensors(item) for item in argument)
    return isinstance(argument, Node)


@dataclass(frozen=True)
class NamedSegment:
    """A segment with the name of its block; ``path`` is the module that its operators belong to."""

    segment: BlockSegment
    name: str
    path: str
    layer: bool


def divide_operators(reading: Reading, operators: Sequence[Draft]) -> tuple[NamedSegment, ...]:
    """Return all operators as named segments; layers are those from the first to the last member of a list."""
    segments: list[tuple[BlockSegment, str]] = []
    start = 0
    for repeated_segment in (*find_repeats(reading, operators), None):
        stop = len(operators) if repeated_segment is None else repeated_segment.start
        segments += _split_between(operators, start, stop)
        if repeated_segment is not None:
            path = operators[repeated_segment.start].path
            segments.append((repeated_segment, find_member(path) or path))
            start = repeated_segment.stop
    members = [index for index, (segment, path) in enumerate(segments) if segment.repeat > 1 or find_member(path)]
    layers = range(members[0], members[-1] + 1) if members else range(len(segments))
    names: dict[str, None] = {}
    result = []
    for index, (segment, path) in enumerate(segments):
        block_path = path.rpartition(".")[0] if segment.repeat > 1 and find_member(path) == path else path
        name = make_unique(block_path.replace(".", "_") or "block", names)
        result.append(NamedSegment(segment, name, path, index in layers))
    return tuple(result)


def make_unique(name: str, used_names: dict[str, None]) -> str:
    """Return ``name``, with a number where it is used already, and mark the result as used."""
    number, candidate = 1, name
    while candidate in used_names:
        number += 1
        candidate = f"{name}_{number}"
    used_names[candidate] = None
    return candidate


def _split_between(operators: Sequence[Draft], start: int, stop: int) -> list[tuple[BlockSegment, str]]:
    """Return a range of operators split by module; operators without parameters join the segment before them."""
    if start == stop:  # two runs of layers follow each other
        return []
    bounds: list[tuple[int, str]] = []
    for index in range(start, stop):
        path = operators[index].path
        key = find_member(path) or path.partition(".")[0]
        has_parameters = bool(operators[index].parameters)
        if not bounds or (key and has_parameters and key != bounds[-1][1] and bounds[-1][1]):
            bounds.append((index, key if has_parameters else ""))
        elif has_parameters and not bounds[-1][1]:
            bounds[-1] = (bounds[-1][0], key)
    ends = [bound_start for bound_start, _ in bounds[1:]] + [stop]
    return [
        (BlockSegment(bound_start, end - bound_start), key)
        for (bound_start, key), end in zip(bounds, ends, strict=True)
    ]
