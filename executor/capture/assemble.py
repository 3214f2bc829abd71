"""Assembles operators, named dims and blocks into an operator graph.

A dim is named by the role that an operator gives it, and has one name within a block.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch.fx import Node

from meshwise.executor.capture.captured import CaptureError, Maps, is_part
from meshwise.executor.capture.reading import Reading, Value
from meshwise.executor.capture.rules.dims import Dim, TensorDims, list_leaves
from meshwise.executor.capture.rules.work import list_values
from meshwise.executor.capture.segments import Draft, NamedSegment, make_unique
from meshwise.simulator.operator_graph import BATCH, SEQUENCE, Block, Operator, OperatorGraph, OperatorKind, Tensor

NO_HINT = (99, "d")


def name_dims(blocks: Sequence[Iterable[Dim]], first_copies: Mapping[Dim, Dim]) -> dict[Dim, str]:
    """Return the name of every dim.

    Parameters
    ----------
    blocks
        The dims of each block in the order of use. Two dims of one block get different names;
        dims of different blocks may share a name.
    first_copies
        Dim of a later copy of a block -> the same dim of the first copy.
    """
    dim_blocks: dict[Dim, list[int]] = {}
    for number, dims in enumerate(blocks):
        for dim in dict.fromkeys(dims):
            dim_blocks.setdefault(dim, []).append(number)
    hints = {dim: set(dim.hints) for dim in dim_blocks}
    for dim, first_dim in first_copies.items():
        hints.setdefault(first_dim, set()).update(dim.hints)
    block_names: list[set[str]] = [set() for _ in blocks]
    names: dict[Dim, str] = {}
    for dim, block_indices in dim_blocks.items():
        used_names = [block_names[block_index] for block_index in block_indices]
        role = min(hints[dim], default=NO_HINT)[1]
        names[dim] = BATCH if dim.batch else _find_free_name(role, used_names)
        for block in used_names:
            block.add(names[dim])
    return names | {dim: names[first_dim] for dim, first_dim in first_copies.items() if first_dim in names}


def _find_free_name(name: str, block_names: Sequence[set[str]]) -> str:
    used_names = {BATCH}.union(*block_names)
    number = 0 if name == NO_HINT[1] else 1
    while (candidate := name if number == 1 else f"{name}_{number}") in used_names:
        number += 1
    return candidate


_WIDE_MODULES = frozenset(
    {"up", "gate", "fc1", "c_fc", "w1", "w3", "wi", "wi_0", "wi_1", "intermediate", "gate_proj", "up_proj"}
    | {"lin1", "linear1", "dense_h_to_4h"}
)
"""Last parts of the module names by which published transformers call the layer into the feed-forward width."""


def hint_parameter(path: str, axes: Sequence[Dim | None]) -> None:
    """Give the dims of a parameter weak name hints, by the name of its module; hints of operators go before them."""
    *modules, attribute = path.split(".")
    is_wide = (modules[-1] if modules and attribute in ("weight", "bias") else attribute) in _WIDE_MODULES
    for place, dim in enumerate(axes):
        if dim is not None and len(dim.leaves) == 1:
            dim.leaves[0].hints.add((6, "ffn") if is_wide and place == 0 and len(axes) <= 2 else (9, "hidden"))


def hint_input(axes: Sequence[Dim | None], *, is_floating: bool) -> None:
    """Give the dims of an input weak name hints, as of features, tokens or an image; operators' hints go first."""
    names = {2: ("features",), 3: ("sequence", "features"), 4: ("channels", "height", "width")}.get(len(axes), ())
    for dim, name in zip(axes[1:], names, strict=False):
        if dim is not None and is_floating and len(dim.leaves) == 1:
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
    torch.complex128: "fp64",
    **dict.fromkeys((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8), "int64"),
}
"""Name of each torch dtype in the graph: complex numbers count as fp64, which has the bytes of complex64; integers are
indices."""


class Assembly:
    """Builds the blocks in order; ``boundary`` has the values that flow from the last built block to the next."""

    def __init__(self, reading: Reading, operators: Sequence[Draft], named_segments: Sequence[NamedSegment]) -> None:
        self.reading, self.operators, self.named_segments = reading, operators, named_segments
        self.maps = Maps()
        self.boundary: list[Value] = []
        self.owners: dict[Value, tuple[str, str]] = {}
        self.tied_parameters: list[tuple[tuple[str, str], tuple[str, str]]] = []
        self.last_readers = {value: index for index, draft in enumerate(operators) for value in draft.inputs}
        self.producers = {value: index for index, draft in enumerate(operators) for value in draft.outputs}
        self.handed_values = {
            value for named_segment in named_segments for _, value in named_segment.segment.handed_values
        }
        self.dim_names = self._name_dims()

    def build_graph(self, name: str) -> OperatorGraph:
        """Return the operator graph and fill ``maps``."""
        blocks = tuple(self._build_block(named_segment) for named_segment in self.named_segments)
        self._map_dims()
        sequence = next((dim.size for dim, dim_name in self.dim_names.items() if dim_name == SEQUENCE), 1)
        return OperatorGraph(name, blocks, sequence, tuple(self.tied_parameters))

    def _get_dims(self, value: Value) -> TensorDims:
        return self.reading.node_dims[value[0]][value[1]]

    def _name_dims(self) -> dict[Dim, str]:
        program = self.reading.program
        for node in program.module.graph.find_nodes(op="placeholder"):
            dims = self._get_dims((node, 0))
            if node.name in program.inputs:
                hint_input(dims, is_floating=node.meta["val"].is_floating_point())
            elif node.name in program.parameters:
                hint_parameter(program.parameters[node.name], dims)
        first_copies: dict[Dim, Dim] = {}
        for named_segment in self.named_segments:
            for renaming in named_segment.segment.renamings[1:]:
                first_copies |= {dim: first_dim for dim, first_dim in renaming.items() if dim is not first_dim}
        block_dims = [list(self._list_dims(named_segment)) for named_segment in self.named_segments]
        return name_dims(block_dims, first_copies)

    def _list_dims(self, named_segment: NamedSegment) -> Iterator[Dim]:
        segment = named_segment.segment
        for draft in self.operators[segment.start : segment.start + segment.length]:
            yield from draft.space
            for value in draft.values:
                yield from list_leaves(self._get_dims(value))
            for operand in draft.node.all_input_nodes:
                yield from list_leaves(dim for dims in self.reading.node_dims[operand] for dim in dims)
        for value, producer in self.producers.items():
            if producer < segment.start and (
                self.last_readers.get(value, -1) >= segment.start or value in self.handed_values
            ):
                yield from list_leaves(self._get_dims(value))

    def _get_names(self, dims: Sequence[Dim]) -> tuple[str, ...]:
        return tuple(self.dim_names[dim] for dim in dims)

    def _build_block(self, named_segment: NamedSegment) -> Block:
        segment = named_segment.segment
        drafts = self.operators[segment.start : segment.start + segment.length]
        block_names = _BlockNames(self, named_segment, drafts)
        incoming_values = list(self.boundary)
        inputs = tuple(block_names.name_tensor(value) for value in incoming_values)
        operators = tuple(self._build_operator(draft, block_names) for draft in drafts)
        outgoing_values, outputs = self._find_outgoing(named_segment, incoming_values, block_names)
        self.boundary = outgoing_values
        self._note_copies(named_segment, block_names)
        tensors = tuple(
            self._build_tensor(value, tensor_name) for value, tensor_name in block_names.tensor_names.items()
        )
        return Block(named_segment.name, operators, tensors, inputs, outputs, segment.repeat, named_segment.layer)

    def _build_operator(self, draft: Draft, block_names: "_BlockNames") -> Operator:
        return Operator(
            block_names.operator_names[draft.node],
            draft.kind,
            tuple((self.dim_names[dim], 1 if dim.batch else dim.size) for dim in draft.space),
            tuple(block_names.name_tensor(value) for value in draft.inputs),
            tuple(block_names.name_tensor(value) for value in draft.outputs),
            tuple(block_names.name_tensor(value) for value in draft.parameters),
            self._get_names(draft.reduced),
            draft.flops,
            tuple(block_names.name_tensor(value) for value in draft.saved_values),
            recompute_selectively=draft.kind is OperatorKind.ATTENTION,
            executed_fraction=draft.executed_fraction,
            uncut=self._get_names(draft.uncut),
        )

    def _find_outgoing(
        self, named_segment: NamedSegment, incoming_values: list[Value], block_names: "_BlockNames"
    ) -> tuple[list[Value], tuple[str, ...]]:
        """Return the values that flow to the next block, and their names in this block."""
        segment = named_segment.segment
        if segment.repeat > 1:
            handed_values = dict(segment.handed_values)
            # names are those of the first copy, values are those of the last one
            last_start = segment.start + segment.length * (segment.repeat - 1)
            outgoing_values = [handed_values.get(value, value) for value in incoming_values]
            model_values = [
                value if value in incoming_values else self._find_model(segment.start, last_start, value)
                for value in outgoing_values
            ]
            return outgoing_values, tuple(block_names.name_tensor(value) for value in model_values)
        carried_values = [value for value in incoming_values if self.last_readers.get(value, -1) >= segment.stop]
        produced_values = [value for draft in self.operators[segment.start : segment.stop] for value in draft.outputs]
        outgoing_values = carried_values + [
            value for value in produced_values if self.last_readers.get(value, -1) >= segment.stop
        ]
        if segment.stop == len(self.operators):
            outgoing_values.append(
                self.reading.find_root(self.reading.program.module.graph.output_node().all_input_nodes[0])
            )
        return outgoing_values, tuple(block_names.name_tensor(value) for value in outgoing_values)

    def _find_model(self, start: int, last_start: int, value: Value) -> Value:
        """Return the first copy's value that corresponds to a value of the last copy."""
        return self.operators[start + self.producers[value] - last_start].outputs[value[1]]

    def _note_copies(self, named_segment: NamedSegment, block_names: "_BlockNames") -> None:
        """Record operator, tensor and parameter names of the nodes of every copy, and which parameters are tied."""
        segment, maps = named_segment.segment, self.maps
        for copy in range(segment.repeat):
            copy_start = segment.start + copy * segment.length
            for copy_draft, model_draft in zip(
                self.operators[copy_start : copy_start + segment.length], self.operators[segment.start :], strict=False
            ):
                maps.operators[copy_draft.node.name] = (
                    f"{named_segment.name}.{block_names.operator_names[model_draft.node]}"
                )
                maps.occurrence[copy_draft.node.name] = copy
                for value, model_value in zip(copy_draft.outputs, model_draft.outputs, strict=True):
                    self._note_tensor(value, block_names.name_tensor(model_value), len(copy_draft.outputs))
                for value, model_value in zip(copy_draft.parameters, model_draft.parameters, strict=True):
                    maps.parameter_names[named_segment.name, copy, block_names.name_tensor(model_value)] = value[0].name
                    self._note_owner(value, named_segment.name, block_names.name_tensor(model_value))

    def _note_tensor(self, value: Value, tensor_name: str, num_outputs: int) -> None:
        node, index = value
        if num_outputs == 1:
            self.maps.tensors[node.name] = tensor_name
        for user in node.users:
            if is_part(user) and user.args[1] == index:
                self.maps.tensors[user.name] = tensor_name

    def _note_owner(self, value: Value, block: str, tensor_name: str) -> None:
        first_owner = self.owners.setdefault(value, (block, tensor_name))
        pair = (first_owner, (block, tensor_name))
        if first_owner[0] != block and pair not in self.tied_parameters:
            self.tied_parameters.append(pair)

    def _build_tensor(self, value: Value, tensor_name: str) -> Tensor:
        node, index = value
        dtype = list_values(node)[index].dtype
        if dtype not in DTYPES:
            raise CaptureError(f"dtypes of a graph are {', '.join(map(str, DTYPES))}; {node.name} is of {dtype}")
        dims = list_leaves(self._get_dims(value))
        shape = tuple(1 if dim.batch else dim.size for dim in dims)
        return Tensor(
            tensor_name, self._get_names(dims), shape, DTYPES[dtype], node in self.reading.differentiable_nodes
        )

    def _map_dims(self) -> None:
        for node, values in self.reading.node_dims.items():
            parts = [tuple(leaf for leaf in dim.leaves) if dim is not None else () for dim in values[0]]
            if len(values) == 1 and all(leaf in self.dim_names for part in parts for leaf in part):
                self.maps.dims[node.name] = tuple(self._get_names(part) for part in parts)
        for node in self.reading.program.module.graph.find_nodes(op="placeholder"):
            if node.name in self.reading.program.inputs:
                self.maps.tensors[node.name] = node.name


_SHORT_NAMES = {"scaled_dot_product_attention": "attention"}


class _BlockNames:
    """The names of one block's operators and tensors."""

    def __init__(self, assembly: Assembly, named_segment: NamedSegment, drafts: Sequence[Draft]) -> None:
        self.assembly, self.named_segment = assembly, named_segment
        self.tensor_names: dict[Value, str] = {}
        self._used_names: dict[str, None] = {}
        used_names: dict[str, None] = {}
        self.operator_names: dict[Node, str] = {
            draft.node: make_unique(self._choose_operator_name(draft), used_names) for draft in drafts
        }

    def name_tensor(self, value: Value) -> str:
        """Return the name of a tensor, and choose it at the first call."""
        if value not in self.tensor_names:
            self.tensor_names[value] = make_unique(self._choose_tensor_name(value), self._used_names)
        return self.tensor_names[value]

    def _choose_operator_name(self, draft: Draft) -> str:
        """Return an operator's name: its module's name within the block, with the operator's own where they differ."""
        inner_path = self._strip_block_path(draft.path).replace(".", "_")
        operator_name = _SHORT_NAMES.get(draft.name, draft.name.strip("_"))
        if draft.parameters and draft.kind is not OperatorKind.ELEMENTWISE:
            module_name = draft.path.rpartition(".")[2]
            return inner_path or (operator_name if module_name.isdigit() else module_name) or operator_name
        return inner_path if inner_path.endswith(operator_name) else f"{inner_path}_{operator_name}".strip("_")

    def _strip_block_path(self, path: str) -> str:
        """Return the qualified name of a module or parameter relative to the block's module."""
        if not self.named_segment.path or not f"{path}.".startswith(f"{self.named_segment.path}."):
            return path
        return path[len(self.named_segment.path) + 1 :]

    def _choose_tensor_name(self, value: Value) -> str:
        node, index = value
        program = self.assembly.reading.program
        if node.name in program.parameters:
            return self._strip_block_path(program.parameters[node.name])
        if node in self.operator_names:
            is_multiple = len(self.assembly.reading.node_dims[node]) > 1
            return f"{self.operator_names[node]}_{index}" if is_multiple else self.operator_names[node]
        return node.name if value not in self.assembly.producers else "x"
