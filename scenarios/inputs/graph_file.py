"""Graph files: operator graphs as JSON, read strictly and written so that they read back equal."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

from meshwise.scenarios.files.checking import check_table
from meshwise.scenarios.files.errors import ScenarioError, suggest_nearest
from meshwise.scenarios.files.fields import Table
from meshwise.scenarios.files.reader import MAX_FAULTS, Document, FieldPath, read_document
from meshwise.scenarios.schema.graph import VERSION, GraphBlockTable, GraphOperatorTable, GraphTable, GraphTensorTable
from meshwise.simulator.brief import brief_repr
from meshwise.simulator.machine.compute import PRODUCTS
from meshwise.simulator.operator_graph import BATCH, ITEMSIZE, Block, Operator, OperatorGraph, OperatorKind, Tensor

MAX_PRODUCT = 2**63
"""Upper bound of elements, bytes and points, which torch has too."""
_FLOATS = ("fp64", "fp32", "fp16", "bf16")

Message = tuple[FieldPath, str]


@dataclass(frozen=True, slots=True)
class GraphModel:
    """A model given as an operator graph; ``dtype`` is the dtype of its parameters.

    In a scenario of another precision, tensors of ``dtype`` change to that precision; other tensors keep their dtype.
    """

    operator_graph: OperatorGraph
    dtype: str

    __repr__ = brief_repr()

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.operator_graph.name

    @property
    def summary(self) -> str:
        """The sizes of the model in one line."""
        graph = self.operator_graph
        return f"{len(graph.occurrences)} blocks, {graph.num_parameters} parameters, {graph.flops:.4g} FLOP a sample"

    def graph(self, sequence: int, precision: str) -> OperatorGraph:
        """Return the graph in a precision; ``sequence`` is ignored, as a graph has one length of samples."""
        return replace(
            self.operator_graph,
            blocks=tuple(self._with_precision(block, precision) for block in self.operator_graph.blocks),
        )

    def _with_precision(self, block: Block, precision: str) -> Block:
        tensors = (
            replace(tensor, dtype=precision) if tensor.dtype == self.dtype else tensor for tensor in block.tensors
        )
        return replace(block, tensors=tuple(tensors))


def load_graph(path: str | Path) -> GraphModel:
    """Return the graph of a file; `ScenarioError` lists all its faults."""
    return build_graph(read_document(path))


def build_graph(document: Document) -> GraphModel:
    """Return the graph of a document; `ScenarioError` lists all its faults."""
    table, faults = check_table(GraphTable, document)
    if table is None:
        raise ScenarioError(tuple(faults))
    messages = list(islice(_list_graph_messages(table), MAX_FAULTS))
    if messages:
        raise ScenarioError(tuple(document.fault(path, message) for path, message in messages))
    tied = tuple(((block, name), (tied_block, tied_name)) for (block, name), (tied_block, tied_name) in table.tied)
    blocks = tuple(map(_build_block, table.blocks))
    return GraphModel(OperatorGraph(table.name, blocks, table.sequence, tied), table.precision)


def _build_block(table: GraphBlockTable) -> Block:
    tensors = tuple(Tensor(**_freeze(tensor)) for tensor in table.tensors)
    return Block(**_freeze(table) | {"tensors": tensors, "operators": tuple(map(_build_operator, table.operators))})


def _build_operator(table: GraphOperatorTable) -> Operator:
    values = _freeze(table)
    dims = tuple(zip(values["dims"], values.pop("sizes"), strict=True))
    return Operator(**values | {"kind": OperatorKind(table.kind), "dims": dims})


def _freeze(table: Table) -> dict[str, Any]:
    """Return the fields of a table with tuples for its lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in table}


def build_graph_document(graph: OperatorGraph) -> dict[str, Any]:
    """Return a graph as JSON-ready data; its precision is the float dtype of most elements of parameters."""
    elements: Counter[str] = Counter()
    for block in graph.blocks:
        for tensor in block.parameters:
            elements[tensor.dtype] += tensor.size * block.repeat
    precision = max(_FLOATS, key=lambda dtype: elements[dtype])
    return {
        "version": VERSION,
        "name": graph.name,
        "sequence": graph.sequence,
        "precision": precision if elements[precision] else "fp32",
        "blocks": [_build_block_document(block) for block in graph.blocks],
        "tied": [[list(parameter), list(tied_parameter)] for parameter, tied_parameter in graph.tied],
    }


def _build_block_document(block: Block) -> dict[str, Any]:
    tensors = [_thaw(GraphTensorTable, tensor) for tensor in block.tensors]
    for tensor in tensors:
        if tensor["differentiable"]:
            del tensor["differentiable"]
    operators = [_build_operator_document(operator) for operator in block.operators]
    return _thaw(GraphBlockTable, block, tensors=tensors, operators=operators)


def _build_operator_document(operator: Operator) -> dict[str, Any]:
    dims, sizes = ([dim[part] for dim in operator.dims] for part in (0, 1))
    return _thaw(GraphOperatorTable, operator, kind=operator.kind.value, dims=dims, sizes=sizes)


def _thaw(model: type[Table], part: Any, **values: Any) -> dict[str, Any]:
    """Return the fields of a table with the values of a part of a graph, but for ``values``; lists for its tuples."""
    items = {name: values[name] if name in values else getattr(part, name) for name in model.model_fields}
    return {name: list(item) if isinstance(item, tuple) else item for name, item in items.items()}


def dump_graph(graph: OperatorGraph) -> str:
    """Return a graph as the text of its file: one line a tensor or operator; equal graphs give equal text."""
    document = build_graph_document(graph)
    blocks = []
    for block in document.pop("blocks"):
        names = ("tensors", "operators")
        lists = {name: ",\n".join(f"    {json.dumps(item)}" for item in block.pop(name)) for name in names}
        block_fields = json.dumps(block)[:-1]
        list_text = ",\n".join(f'   "{name}": [\n{lines}\n   ]' for name, lines in lists.items())
        blocks.append(f"  {block_fields},\n{list_text}\n  }}")
    head = ",\n".join(f' "{name}": {json.dumps(value)}' for name, value in document.items())
    return "{\n" + head + ',\n "blocks": [\n' + ",\n".join(blocks) + "\n ]\n}\n"


def _list_graph_messages(table: GraphTable) -> Iterator[Message]:
    """Yield all faults of a graph whose fields are valid by themselves."""
    yield from _list_repeated(("blocks",), (block.name for block in table.blocks), "block")
    for index, block in enumerate(table.blocks):
        for path, message in _list_block_messages(block):
            yield ("blocks", index, *path), message
    yield from _check_boundaries(table)
    yield from _check_tied(table)
    elements = sum(
        prod(tensor.shape) * block.repeat
        for block in table.blocks
        for tensor in block.tensors
        if _is_parameter(block, tensor.name)
    )
    if elements >= MAX_PRODUCT:
        yield ("blocks",), f"parameters have fewer than 2**63 elements, met {_format_power(elements)}"


def _is_parameter(block: GraphBlockTable, name: str) -> bool:
    return any(name in operator.parameters for operator in block.operators)


def _list_repeated(path: FieldPath, names: Iterable[str], kind: str) -> Iterator[Message]:
    first_index: dict[str, int] = {}
    for index, name in enumerate(names):
        if first_index.setdefault(name, index) != index:
            yield (*path, index, "name"), f"a {kind} has a name of its own, met {name} a second time"


def _list_block_messages(block: GraphBlockTable) -> Iterator[Message]:
    yield from _list_repeated(("tensors",), (item.name for item in block.tensors), "tensor")
    yield from _list_repeated(("operators",), (item.name for item in block.operators), "operator")
    yield from _check_sizes(block)
    tensor_names = [item.name for item in block.tensors]
    for field in ("inputs", "outputs"):
        yield from _list_unknown((field,), getattr(block, field), tensor_names, "tensors of the block")
    for index, operator in enumerate(block.operators):
        for path, message in _list_operator_messages(block, operator, tensor_names):
            yield ("operators", index, *path), message
    yield from _check_order(block)


def _list_unknown(path: FieldPath, names: list[str], known_names: list[str], kind: str) -> Iterator[Message]:
    known_set = set(known_names)
    unknown_names = ((index, name) for index, name in enumerate(names) if name not in known_set)
    for index, name in unknown_names:
        yield (*path, index), f"names one of the {kind}, met {name}{suggest_nearest(name, known_names)}"


def _check_sizes(block: GraphBlockTable) -> Iterator[Message]:
    """Yield where a dim has two sizes, a product of sizes is too large, or numbers of sizes and dims differ."""
    size_by_dim: dict[str, int] = {BATCH: 1}
    places: list[tuple[FieldPath, list[str], list[int]]] = []
    places += [(("tensors", index, "shape"), item.dims, item.shape) for index, item in enumerate(block.tensors)]
    places += [(("operators", index, "sizes"), item.dims, item.sizes) for index, item in enumerate(block.operators)]
    for path, dims, sizes in places:
        if len(dims) != len(sizes):
            yield path, f"has one size a dim({len(dims)}), met {len(sizes)}"
            continue
        for dim, dim_size in zip(dims, sizes, strict=True):
            if size_by_dim.setdefault(dim, dim_size) != dim_size:
                expected_text = "one sample" if dim == BATCH else "the one of the dim in this block"
                yield path, f"the size of {dim} is {size_by_dim[dim]}, {expected_text}, met {dim_size}"
        if prod(sizes) * max(ITEMSIZE.values()) >= MAX_PRODUCT:  # bytes in the widest dtype, hence 2**60 elements
            yield path, f"a product of sizes is below 2**60, met {_format_power(prod(sizes))}"


def _format_power(number: int) -> str:
    """Return in words the power of two below a number, which may be too large to print."""
    return f"more than 2**{number.bit_length() - 1}"


def _list_operator_messages(
    block: GraphBlockTable, operator: GraphOperatorTable, tensor_names: list[str]
) -> Iterator[Message]:
    for field in ("inputs", "outputs", "parameters", "saved"):
        yield from _list_unknown((field,), getattr(operator, field), tensor_names, "tensors of the block")
    for field in ("reduced", "uncut"):
        yield from _list_unknown((field,), getattr(operator, field), operator.dims, "operator's dims")
    if len(set(operator.dims)) < len(operator.dims):
        yield ("dims",), f"an operator has each dim once, met {', '.join(operator.dims)}"
    if not operator.outputs:
        yield ("outputs",), "an operator makes a tensor, met none"
    yield from _list_kind_messages(block, operator)


def _list_kind_messages(block: GraphBlockTable, operator: GraphOperatorTable) -> Iterator[Message]:
    """Yield what an operator lacks that its kind needs."""
    kind, dims = OperatorKind(operator.kind), {tensor.name: tensor.dims for tensor in block.tensors}
    operands = len(operator.inputs) + len(operator.parameters)
    if kind in PRODUCTS and (not operator.inputs or operands < 2):
        yield ("inputs",), f"a {kind} multiplies an input by a parameter or another input, met {operands} operands"
    if kind is OperatorKind.EMBEDDING:
        rows = dims.get(operator.parameters[0], [])[:1] if operator.parameters else []
        if not rows or rows[0] not in operator.dims:
            yield ("parameters",), "an embedding has a table whose first dim is one of the operator's dims"
    if kind is OperatorKind.ATTENTION:
        query, keys = ([dims.get(name, []) for name in operator.inputs[:2]] + [[], []])[:2]
        context = dims.get(operator.outputs[0], []) if operator.outputs else []
        has_dims = {*query[:-1], *keys[:-1]} <= set(operator.dims)
        if min(len(query), len(keys), len(context)) < 2 or not has_dims:
            yield ("inputs",), "attention reads queries and keys, whose dims but the last are the operator's"


def _check_order(block: GraphBlockTable) -> Iterator[Message]:
    """Yield where an operator reads a tensor before it is produced, or produces a tensor a second time.

    Operators are in the order of execution, so this also finds cycles.
    """
    # of several producers of one name the first counts, so that the others are the faulty ones: hence reversed
    makers = {
        name: index for index, producer in reversed(list(enumerate(block.operators))) for name in producer.outputs
    }
    parameters = {name for producer in block.operators for name in producer.parameters}
    for index, operator in enumerate(block.operators):
        for place, name in enumerate(operator.inputs):
            if makers.get(name, -1) >= index and name not in block.inputs:
                maker = block.operators[makers[name]].name
                origin = "itself makes" if makers[name] == index else f"{maker} makes later"
                yield (
                    ("operators", index, "inputs", place),
                    f"an operator reads what is made before it, without cycles; met {name}, which {origin}",
                )
        for place, name in enumerate(operator.outputs):
            if makers[name] != index or name in block.inputs or name in parameters:
                yield ("operators", index, "outputs", place), f"a tensor is made once, met {name} again"
    available_names = set(makers) | set(block.inputs)
    for place, name in enumerate(block.outputs):
        if name not in available_names:
            yield ("outputs", place), f"an output is made by the block or comes into it, met {name}"


def _check_boundaries(table: GraphTable) -> Iterator[Message]:
    """Yield where the outputs of a block do not match, in order, the inputs of the next block or repetition."""
    flows = [
        (index, block, next_block)
        for index, block in enumerate(table.blocks)
        for next_block in ([block] if block.repeat > 1 else []) + table.blocks[index + 1 : index + 2]
    ]
    for index, block, next_block in flows:
        path: FieldPath = ("blocks", index, "outputs")
        if len(block.outputs) != len(next_block.inputs):
            yield (
                path,
                f"outputs are the inputs of {next_block.name}({len(next_block.inputs)}), met {len(block.outputs)}",
            )
            continue
        output_tensors, input_tensors = (
            {tensor.name: tensor for tensor in side.tensors} for side in (block, next_block)
        )
        for place, (output_name, input_name) in enumerate(zip(block.outputs, next_block.inputs, strict=True)):
            if (
                output_name in output_tensors
                and input_name in input_tensors
                and _describe_tensor(output_tensors[output_name]) != _describe_tensor(input_tensors[input_name])
            ):
                expected_text = f"{next_block.name} reads {_describe_tensor(input_tensors[input_name])} in its place"
                yield (*path, place), f"{expected_text}, met {_describe_tensor(output_tensors[output_name])}"


def _describe_tensor(tensor: GraphTensorTable) -> str:
    return f"{tensor.dtype} of shape {tensor.shape}"


def _check_tied(table: GraphTable) -> Iterator[Message]:
    shapes = {
        (block.name, tensor.name): tensor.shape
        for block in table.blocks
        for tensor in block.tensors
        if _is_parameter(block, tensor.name)
    }
    for index, pair in enumerate(table.tied):
        parameter, tied_parameter = ((block, name) for block, name in pair)
        unknown_parameters = [candidate for candidate in (parameter, tied_parameter) if candidate not in shapes]
        for block, name in unknown_parameters:
            yield ("tied", index), f"names parameters of blocks, met {name} of {block}"
        if not unknown_parameters and prod(shapes[parameter]) != prod(shapes[tied_parameter]):
            yield (
                ("tied", index),
                f"tied parameters are of one size, met {shapes[parameter]} and {shapes[tied_parameter]}",
            )
