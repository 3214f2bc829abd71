"""Assembles operators, named dims and blocks into an operator graph.

A dim is named by the role that an operator gives it, and has one name within a block.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from meshwise.executor.capture.captured import CaptureError, NamedDims
from meshwise.executor.capture.reading import Reading, Value, is_part
from meshwise.executor.capture.rules.dims import Axes, Dim, leaves
from meshwise.executor.capture.segments import Draft, Placed, unique
from meshwise.simulator.operator_graph import BATCH, SEQUENCE, Block, Operator, OperatorGraph, OperatorKind, Tensor

NO_HINT = (99, "d")


def named(blocks: Sequence[Iterable[Dim]], same: Mapping[Dim, Dim]) -> dict[Dim, str]:
    """Return the name of every dim.

    Parameters
    ----------
    blocks
        The dims of each block in the order of use. Two dims of one block get different names;
        dims of different blocks may share a name.
    same
        Dim of a later copy of a block -> the same dim of the first copy.
    """
    homes: dict[Dim, list[int]] = {}
    for number, dims in enumerate(blocks):
        for dim in dict.fromkeys(dims):
            homes.setdefault(dim, []).append(number)
    hints = {dim: set(dim.hints) for dim in homes}
    for dim, first in same.items():
        hints.setdefault(first, set()).update(dim.hints)
    taken: list[set[str]] = [set() for _ in blocks]
    names: dict[Dim, str] = {}
    for dim, places in homes.items():
        names[dim] = BATCH if dim.batch else _free(_role(hints[dim]), [taken[place] for place in places])
        for place in places:
            taken[place].add(names[dim])
    return names | {dim: names[first] for dim, first in same.items() if first in names}


def _role(hints: set[tuple[int, str]]) -> str:
    return min(hints, default=NO_HINT)[1]


def _free(name: str, taken: Sequence[set[str]]) -> str:
    used = {BATCH}.union(*taken)
    number = 0 if name == NO_HINT[1] else 1
    while (candidate := name if number == 1 else f"{name}_{number}") in used:
        number += 1
    return candidate


_WIDE = frozenset(
    {"up", "gate", "fc1", "c_fc", "w1", "w3", "wi", "wi_0", "wi_1", "intermediate", "gate_proj", "up_proj"}
    | {"lin1", "linear1", "dense_h_to_4h"}
)
"""Last parts of the module names by which published transformers call the layer into the feed-forward width."""


def hint_parameter(path: str, axes: Sequence[Dim | None]) -> None:
    """Give the dims of a parameter weak name hints, by the name of its module; hints of operators go before them."""
    *modules, own = path.split(".")
    wide = (modules[-1] if modules and own in ("weight", "bias") else own) in _WIDE
    for place, dim in enumerate(axes):
        if dim is not None and len(dim.leaves) == 1:
            dim.leaves[0].hints.add((6, "ffn") if wide and place == 0 and len(axes) <= 2 else (9, "hidden"))


def hint_input(axes: Sequence[Dim | None], *, floating: bool) -> None:
    """Give the dims of an input weak name hints, as of features, tokens or an image; operators' hints go first."""
    names = {2: ("features",), 3: ("sequence", "features"), 4: ("channels", "height", "width")}.get(len(axes), ())
    for dim, name in zip(axes[1:], names, strict=False):
        if dim is not None and floating and len(dim.leaves) == 1:
            dim.leaves[0].hints.add((8, name))


DTYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
    torch.bool: "mask",
    torch.complex64: "fp64",
    **dict.fromkeys((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8), "int64"),
}
"""Name of each torch dtype in the graph: complex64 counts as fp64, which has as many bytes; integers are indices."""


@dataclass
class Maps:
    """How nodes of the program map to the graph; `CapturedModule` describes the fields."""

    operators: dict[str, str] = field(default_factory=dict)
    occurrence: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)
    parameter_names: dict[tuple[str, int, str], str] = field(default_factory=dict)
    dims: dict[str, NamedDims] = field(default_factory=dict)


class Assembly:
    """Builds the blocks in order; ``boundary`` has the values that flow from the last built block to the next."""

    def __init__(self, reading: Reading, operators: Sequence[Draft], placed: Sequence[Placed]) -> None:
        self.reading, self.operators, self.placed = reading, operators, placed
        self.maps = Maps()
        self.boundary: list[Value] = []
        self.owner: dict[Value, tuple[str, str]] = {}
        self.tied: list[tuple[tuple[str, str], tuple[str, str]]] = []
        self.last = {value: index for index, each in enumerate(operators) for value in each.inputs}
        self.made = {value: index for index, each in enumerate(operators) for value in each.outputs}
        self.handed = {value for block in placed for _, value in block.segment.handed}
        self.names = self._named()

    def graph(self, name: str) -> OperatorGraph:
        """Return the operator graph and fill ``maps``."""
        blocks = tuple(self._block(each) for each in self.placed)
        self._map_dims()
        sequence = next((dim.size for dim, word in self.names.items() if word == SEQUENCE), 1)
        return OperatorGraph(name, blocks, sequence, tuple(self.tied))

    def _axes(self, value: Value) -> Axes:
        return self.reading.axes[value[0]][value[1]]

    def _named(self) -> dict[Dim, str]:
        program = self.reading.program
        for node in program.module.graph.find_nodes(op="placeholder"):
            axes = self._axes((node, 0))
            if node.name in program.inputs:
                hint_input(axes, floating=node.meta["val"].is_floating_point())
            elif node.name in program.parameters:
                hint_parameter(program.parameters[node.name], axes)
        same: dict[Dim, Dim] = {}
        for each in self.placed:
            for renaming in each.segment.renamings[1:]:
                same |= {dim: first for dim, first in renaming.items() if dim is not first}
        homes = [list(self._dims_of(each)) for each in self.placed]
        return named(homes, same)

    def _dims_of(self, placed: Placed) -> Iterator[Dim]:
        segment = placed.segment
        for draft in self.operators[segment.start : segment.start + segment.length]:
            yield from draft.space
            for value in draft.values:
                yield from leaves(self._axes(value))
            for operand in draft.node.all_input_nodes:
                yield from leaves(axis for axes in self.reading.axes[operand] for axis in axes)
        for value, made in self.made.items():
            if made < segment.start and (self.last.get(value, -1) >= segment.start or value in self.handed):
                yield from leaves(self._axes(value))

    def _words(self, dims: Sequence[Dim]) -> tuple[str, ...]:
        return tuple(self.names[dim] for dim in dims)

    def _block(self, placed: Placed) -> Block:
        segment = placed.segment
        drafts = self.operators[segment.start : segment.start + segment.length]
        words = _Words(self, placed, drafts)
        incoming = list(self.boundary)
        inputs = tuple(words.of(value) for value in incoming)
        operators = tuple(self._operator(draft, words) for draft in drafts)
        outgoing, outputs = self._outgoing(placed, incoming, words)
        self.boundary = outgoing
        self._note(placed, words)
        tensors = tuple(self._tensor(value, word) for value, word in words.known.items())
        return Block(placed.name, operators, tensors, inputs, outputs, segment.repeat, placed.layer)

    def _operator(self, draft: Draft, words: "_Words") -> Operator:
        return Operator(
            words.operators[draft.node],
            draft.kind,
            tuple((self.names[dim], 1 if dim.batch else dim.size) for dim in draft.space),
            tuple(words.of(value) for value in draft.inputs),
            tuple(words.of(value) for value in draft.outputs),
            tuple(words.of(value) for value in draft.parameters),
            self._words(draft.reduced),
            draft.flops,
            tuple(words.of(value) for value in draft.saved),
            recompute_selectively=draft.kind is OperatorKind.ATTENTION,
            executed_fraction=draft.executed,
            uncut=self._words(draft.uncut),
        )

    def _outgoing(self, placed: Placed, incoming: list[Value], words: "_Words") -> tuple[list[Value], tuple[str, ...]]:
        """Return the values that flow to the next block, and their names in this block."""
        segment = placed.segment
        if segment.repeat > 1:
            handed = dict(segment.handed)
            # names are those of the first copy, values are those of the last one
            model = segment.start + segment.length * (segment.repeat - 1)
            outgoing = [handed.get(value, value) for value in incoming]
            calls = [value if value in incoming else self._first(segment.start, model, value) for value in outgoing]
            return outgoing, tuple(words.of(value) for value in calls)
        carried = [value for value in incoming if self.last.get(value, -1) >= segment.stop]
        made = [value for each in self.operators[segment.start : segment.stop] for value in each.outputs]
        outgoing = carried + [value for value in made if self.last.get(value, -1) >= segment.stop]
        if segment.stop == len(self.operators):
            outgoing.append(self.reading.root(self.reading.program.module.graph.output_node().all_input_nodes[0]))
        return outgoing, tuple(words.of(value) for value in outgoing)

    def _first(self, start: int, model: int, value: Value) -> Value:
        """Return the first copy's value that corresponds to a value of the last copy."""
        return self.operators[start + self.made[value] - model].outputs[value[1]]

    def _note(self, placed: Placed, words: "_Words") -> None:
        """Record operator, tensor and parameter names of the nodes of every copy, and which parameters are tied."""
        segment, maps = placed.segment, self.maps
        for copy in range(segment.repeat):
            first = segment.start + copy * segment.length
            for mine, model in zip(
                self.operators[first : first + segment.length], self.operators[segment.start :], strict=False
            ):
                maps.operators[mine.node.name] = f"{placed.name}.{words.operators[model.node]}"
                maps.occurrence[mine.node.name] = copy
                for value, like in zip(mine.outputs, model.outputs, strict=True):
                    self._note_tensor(value, words.of(like), len(mine.outputs))
                for value, like in zip(mine.parameters, model.parameters, strict=True):
                    maps.parameter_names[placed.name, copy, words.of(like)] = value[0].name
                    self._note_owner(value, placed.name, words.of(like))

    def _note_tensor(self, value: Value, word: str, count: int) -> None:
        node, index = value
        if count == 1:
            self.maps.tensors[node.name] = word
        for user in node.users:
            if is_part(user) and user.args[1] == index:
                self.maps.tensors[user.name] = word

    def _note_owner(self, value: Value, block: str, word: str) -> None:
        first = self.owner.setdefault(value, (block, word))
        pair = (first, (block, word))
        if first[0] != block and pair not in self.tied:
            self.tied.append(pair)

    def _tensor(self, value: Value, word: str) -> Tensor:
        node, index = value
        held = node.meta["val"]
        dtype = (held[index] if isinstance(held, tuple | list) else held).dtype
        if dtype not in DTYPES:
            raise CaptureError(f"dtypes of a graph are {', '.join(map(str, DTYPES))}; {node.name} is of {dtype}")
        dims = leaves(self._axes(value))
        shape = tuple(1 if dim.batch else dim.size for dim in dims)
        return Tensor(word, self._words(dims), shape, DTYPES[dtype], node in self.reading.differentiable)

    def _map_dims(self) -> None:
        for node, values in self.reading.axes.items():
            parts = [tuple(leaf for leaf in axis.leaves) if axis is not None else () for axis in values[0]]
            if len(values) == 1 and all(leaf in self.names for part in parts for leaf in part):
                self.maps.dims[node.name] = tuple(self._words(part) for part in parts)
        for node in self.reading.program.module.graph.find_nodes(op="placeholder"):
            if node.name in self.reading.program.inputs:
                self.maps.tensors[node.name] = node.name


_SHORT = {"scaled_dot_product_attention": "attention"}


class _Words:
    """The names of one block's operators and tensors."""

    def __init__(self, assembly: Assembly, placed: Placed, drafts: Sequence[Draft]) -> None:
        self.assembly, self.placed = assembly, placed
        self.known: dict[Value, str] = {}
        self._taken: dict[str, None] = {}
        names: dict[str, None] = {}
        self.operators: dict[Node, str] = {draft.node: unique(self._operator(draft), names) for draft in drafts}

    def of(self, value: Value) -> str:
        """Return the name of a tensor, and choose it at the first call."""
        if value not in self.known:
            self.known[value] = unique(self._tensor(value), self._taken)
        return self.known[value]

    def _operator(self, draft: Draft) -> str:
        """Return an operator's name: its module's name within the block, with the operator's own where they differ."""
        within = self._within(draft.path).replace(".", "_")
        own = _SHORT.get(draft.name, draft.name.strip("_"))
        if draft.parameters and draft.kind is not OperatorKind.ELEMENTWISE:
            last = draft.path.rpartition(".")[2]
            return within or (own if last.isdigit() else last) or own
        return within if within.endswith(own) else f"{within}_{own}".strip("_")

    def _within(self, path: str) -> str:
        """Return the qualified name of a module or parameter relative to the block's module."""
        if not self.placed.path or not f"{path}.".startswith(f"{self.placed.path}."):
            return path
        return path[len(self.placed.path) + 1 :]

    def _tensor(self, value: Value) -> str:
        node, index = value
        program = self.assembly.reading.program
        if node.name in program.parameters:
            return self._within(program.parameters[node.name])
        if node in self.operators:
            many = len(self.assembly.reading.axes[node]) > 1
            return f"{self.operators[node]}_{index}" if many else self.operators[node]
        return node.name if value not in self.assembly.made else "x"
