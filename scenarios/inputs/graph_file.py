"""Graph files: operator graphs as JSON, read strictly and written so that they read back equal."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

from meshwise.scenarios.files.checking import check
from meshwise.scenarios.files.errors import ScenarioError, nearest
from meshwise.scenarios.files.reader import MAX_FAULTS, Document, FieldPath, read
from meshwise.scenarios.schema.graph import VERSION, GraphBlockTable, GraphOperatorTable, GraphTable, GraphTensorTable
from meshwise.simulator.brief import brief
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

    operators: OperatorGraph
    dtype: str

    __repr__ = brief()

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.operators.name

    @property
    def summary(self) -> str:
        """The sizes of the model in one line."""
        graph = self.operators
        return f"{len(graph.occurrences)} blocks, {graph.num_parameters} parameters, {graph.flops:.4g} FLOP a sample"

    def graph(self, sequence: int, precision: str) -> OperatorGraph:
        """Return the graph in a precision; ``sequence`` is ignored, as a graph has one length of samples."""
        return replace(self.operators, blocks=tuple(self._in(block, precision) for block in self.operators.blocks))

    def _in(self, block: Block, precision: str) -> Block:
        tensors = (replace(each, dtype=precision) if each.dtype == self.dtype else each for each in block.tensors)
        return replace(block, tensors=tuple(tensors))


def load_graph(path: str | Path) -> GraphModel:
    """Return the graph of a file; `ScenarioError` lists all its faults."""
    return graph_in(read(path))


def graph_in(document: Document) -> GraphModel:
    """Return the graph of a document; `ScenarioError` lists all its faults."""
    table, faults = check(GraphTable, document)
    if table is None:
        raise ScenarioError(tuple(faults))
    messages = list(islice(_graph_messages(table), MAX_FAULTS))
    if messages:
        raise ScenarioError(tuple(document.fault(path, message) for path, message in messages))
    tied = tuple(((first[0], first[1]), (second[0], second[1])) for first, second in table.tied)
    blocks = tuple(_block(block) for block in table.blocks)
    return GraphModel(OperatorGraph(table.name, blocks, table.sequence, tied), table.precision)


def _block(table: GraphBlockTable) -> Block:
    tensors = tuple(
        Tensor(each.name, tuple(each.dims), tuple(each.shape), each.dtype, each.differentiable)
        for each in table.tensors
    )
    operators = tuple(_operator(each) for each in table.operators)
    return Block(table.name, operators, tensors, tuple(table.inputs), tuple(table.outputs), table.repeat, table.layer)


def _operator(table: GraphOperatorTable) -> Operator:
    return Operator(
        table.name,
        OperatorKind(table.kind),
        tuple(zip(table.dims, table.sizes, strict=True)),
        tuple(table.inputs),
        tuple(table.outputs),
        tuple(table.parameters),
        tuple(table.reduced),
        table.flops_per_point,
        tuple(table.saved),
        table.recompute_selectively,
        table.executed_fraction,
        uncut=tuple(table.uncut),
    )


def graph_document(graph: OperatorGraph) -> dict[str, Any]:
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
        "blocks": [_block_document(block) for block in graph.blocks],
        "tied": [[list(first), list(second)] for first, second in graph.tied],
    }


def _block_document(block: Block) -> dict[str, Any]:
    return {
        "name": block.name,
        "repeat": block.repeat,
        "layer": block.layer,
        "inputs": list(block.inputs),
        "outputs": list(block.outputs),
        "tensors": [
            {"name": each.name, "dims": list(each.dims), "shape": list(each.shape), "dtype": each.dtype}
            | ({} if each.differentiable else {"differentiable": False})
            for each in block.tensors
        ],
        "operators": [_operator_document(each) for each in block.operators],
    }


def _operator_document(operator: Operator) -> dict[str, Any]:
    return {
        "name": operator.name,
        "kind": operator.kind.value,
        "dims": [dim for dim, _ in operator.dims],
        "sizes": [size for _, size in operator.dims],
        "inputs": list(operator.inputs),
        "outputs": list(operator.outputs),
        "parameters": list(operator.parameters),
        "reduced": list(operator.reduced),
        "uncut": list(operator.uncut),
        "flops_per_point": operator.flops_per_point,
        "saved": list(operator.saved),
        "executed_fraction": operator.executed_fraction,
        "recompute_selectively": operator.recompute_selectively,
    }


def dump_graph(graph: OperatorGraph) -> str:
    """Return a graph as the text of its file: one line a tensor or operator; equal graphs give equal text."""
    document = graph_document(graph)
    blocks = []
    for block in document.pop("blocks"):
        lists = {name: ",\n".join(f"    {json.dumps(each)}" for each in block.pop(name)) for name in _LISTS}
        rest = json.dumps(block)[:-1]
        inner = ",\n".join(f'   "{name}": [\n{lines}\n   ]' for name, lines in lists.items())
        blocks.append(f"  {rest},\n{inner}\n  }}")
    head = ",\n".join(f' "{name}": {json.dumps(value)}' for name, value in document.items())
    return "{\n" + head + ',\n "blocks": [\n' + ",\n".join(blocks) + "\n ]\n}\n"


_LISTS = ("tensors", "operators")


def _graph_messages(table: GraphTable) -> Iterator[Message]:
    """Yield all faults of a graph whose fields are valid by themselves."""
    yield from _repeated(("blocks",), (block.name for block in table.blocks), "block")
    for index, block in enumerate(table.blocks):
        for path, message in _block_messages(block):
            yield ("blocks", index, *path), message
    yield from _boundaries(table)
    yield from _tied(table)
    elements = sum(
        prod(tensor.shape) * block.repeat
        for block in table.blocks
        for tensor in block.tensors
        if _owned(block, tensor.name)
    )
    if elements >= MAX_PRODUCT:
        yield ("blocks",), f"parameters have fewer than 2**63 elements, met {_power(elements)}"


def _owned(block: GraphBlockTable, name: str) -> bool:
    return any(name in operator.parameters for operator in block.operators)


def _repeated(path: FieldPath, names: Iterable[str], what: str) -> Iterator[Message]:
    seen: dict[str, int] = {}
    for index, name in enumerate(names):
        if seen.setdefault(name, index) != index:
            yield (*path, index, "name"), f"a {what} has a name of its own, met {name} a second time"


def _block_messages(block: GraphBlockTable) -> Iterator[Message]:
    yield from _repeated(("tensors",), (each.name for each in block.tensors), "tensor")
    yield from _repeated(("operators",), (each.name for each in block.operators), "operator")
    yield from _sizes(block)
    known = [each.name for each in block.tensors]
    for field in ("inputs", "outputs"):
        yield from _unknown((field,), getattr(block, field), known, "tensors of the block")
    for index, operator in enumerate(block.operators):
        for path, message in _operator_messages(block, operator, known):
            yield ("operators", index, *path), message
    yield from _order(block)


def _unknown(path: FieldPath, names: list[str], known: list[str], what: str) -> Iterator[Message]:
    there = set(known)
    missing = ((index, name) for index, name in enumerate(names) if name not in there)
    for index, name in missing:
        yield (*path, index), f"names one of the {what}, met {name}{nearest(name, known)}"


def _sizes(block: GraphBlockTable) -> Iterator[Message]:
    """Yield where a dim has two sizes, a product of sizes is too large, or numbers of sizes and dims differ."""
    size: dict[str, int] = {BATCH: 1}
    places: list[tuple[FieldPath, list[str], list[int]]] = []
    places += [(("tensors", index, "shape"), each.dims, each.shape) for index, each in enumerate(block.tensors)]
    places += [(("operators", index, "sizes"), each.dims, each.sizes) for index, each in enumerate(block.operators)]
    for path, dims, sizes in places:
        if len(dims) != len(sizes):
            yield path, f"has one size a dim({len(dims)}), met {len(sizes)}"
            continue
        for dim, met in zip(dims, sizes, strict=True):
            if size.setdefault(dim, met) != met:
                why = "one sample" if dim == BATCH else "the one of the dim in this block"
                yield path, f"the size of {dim} is {size[dim]}, {why}, met {met}"
        if prod(sizes) * max(ITEMSIZE.values()) >= MAX_PRODUCT:  # bytes in the widest dtype, hence 2**60 elements
            yield path, f"a product of sizes is below 2**60, met {_power(prod(sizes))}"


def _power(number: int) -> str:
    """Return in words the power of two below a number, which may be too large to print."""
    return f"more than 2**{number.bit_length() - 1}"


def _operator_messages(block: GraphBlockTable, operator: GraphOperatorTable, known: list[str]) -> Iterator[Message]:
    for field in ("inputs", "outputs", "parameters", "saved"):
        yield from _unknown((field,), getattr(operator, field), known, "tensors of the block")
    for field in ("reduced", "uncut"):
        yield from _unknown((field,), getattr(operator, field), operator.dims, "operator's dims")
    if len(set(operator.dims)) < len(operator.dims):
        yield ("dims",), f"an operator has each dim once, met {', '.join(operator.dims)}"
    if not operator.outputs:
        yield ("outputs",), "an operator makes a tensor, met none"
    yield from _kind_messages(block, operator)


def _kind_messages(block: GraphBlockTable, operator: GraphOperatorTable) -> Iterator[Message]:
    """Yield what an operator lacks that its kind needs."""
    kind, dims = OperatorKind(operator.kind), {each.name: each.dims for each in block.tensors}
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
        known = {*query[:-1], *keys[:-1]} <= set(operator.dims)
        if min(len(query), len(keys), len(context)) < 2 or not known:
            yield ("inputs",), "attention reads queries and keys, whose dims but the last are the operator's"


def _order(block: GraphBlockTable) -> Iterator[Message]:
    """Yield where an operator reads a tensor before it is produced, or produces a tensor a second time.

    Operators are in the order of execution, so this also finds cycles.
    """
    # of several producers of one name the first counts, so that the others are the faulty ones: hence reversed
    makers = {name: index for index, each in reversed(list(enumerate(block.operators))) for name in each.outputs}
    parameters = {name for each in block.operators for name in each.parameters}
    for index, operator in enumerate(block.operators):
        for place, name in enumerate(operator.inputs):
            if makers.get(name, -1) >= index and name not in block.inputs:
                maker = block.operators[makers[name]].name
                what = "itself makes" if makers[name] == index else f"{maker} makes later"
                yield (
                    ("operators", index, "inputs", place),
                    f"an operator reads what is made before it, without cycles; met {name}, which {what}",
                )
        for place, name in enumerate(operator.outputs):
            if makers[name] != index or name in block.inputs or name in parameters:
                yield ("operators", index, "outputs", place), f"a tensor is made once, met {name} again"
    made = set(makers) | set(block.inputs)
    for place, name in enumerate(block.outputs):
        if name not in made:
            yield ("outputs", place), f"an output is made by the block or comes into it, met {name}"


def _boundaries(table: GraphTable) -> Iterator[Message]:
    """Yield where the outputs of a block do not match, in order, the inputs of the next block or repetition."""
    flows = [
        (index, block, after)
        for index, block in enumerate(table.blocks)
        for after in ([block] if block.repeat > 1 else []) + table.blocks[index + 1 : index + 2]
    ]
    for index, block, after in flows:
        where: FieldPath = ("blocks", index, "outputs")
        if len(block.outputs) != len(after.inputs):
            yield where, f"outputs are the inputs of {after.name}({len(after.inputs)}), met {len(block.outputs)}"
            continue
        one, other = ({each.name: each for each in of.tensors} for of in (block, after))
        for place, (out, into) in enumerate(zip(block.outputs, after.inputs, strict=True)):
            if out in one and into in other and _words(one[out]) != _words(other[into]):
                needed = f"{after.name} reads {_words(other[into])} in its place"
                yield (*where, place), f"{needed}, met {_words(one[out])}"


def _words(tensor: GraphTensorTable) -> str:
    return f"{tensor.dtype} of shape {tensor.shape}"


def _tied(table: GraphTable) -> Iterator[Message]:
    shapes = {
        (block.name, tensor.name): tensor.shape
        for block in table.blocks
        for tensor in block.tensors
        if _owned(block, tensor.name)
    }
    for index, pair in enumerate(table.tied):
        one, other = ((block, name) for block, name in pair)
        missing = [each for each in (one, other) if each not in shapes]
        for block, name in missing:
            yield ("tied", index), f"names parameters of blocks, met {name} of {block}"
        if not missing and prod(shapes[one]) != prod(shapes[other]):
            yield ("tied", index), f"tied parameters are of one size, met {shapes[one]} and {shapes[other]}"
