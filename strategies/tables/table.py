"""The embedding tables of a network, and what one sample looks up in each."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from meshwise.simulator.operator_graph import BATCH, ITEMSIZE, Block, Operator, OperatorGraph, OperatorKind


@dataclass(frozen=True, slots=True)
class Table:
    """An embedding table, and what one sample does with it.

    Parameters
    ----------
    name, block, operator
        Its parameter, and the block and the operator that look it up.
    rows, width
        Rows, and elements of a row.
    lookups, vectors
        Rows that a sample looks up, and vectors of one row's width that come of them: 1 where they are pooled.
    itemsize, index_size
        Bytes of an element of a row, and of an index.
    popularity
        As `meshwise.simulator.operator_graph.Operator` has it.
    """

    name: str
    block: str
    operator: str
    rows: int
    width: int
    lookups: int
    vectors: int
    itemsize: int = 4
    index_size: int = 8
    popularity: float = 0.0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.width * self.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.row_bytes

    @property
    def is_pooled(self) -> bool:
        """Whether the rows of a sample become one vector: tables of recommenders, and not those of words."""
        return self.vectors == 1


@lru_cache(maxsize=64)
def list_tables(graph: OperatorGraph) -> tuple[Table, ...]:
    """Return the tables that ranks may share: each is looked up by one operator, by indices of samples.

    A table that is tied to another parameter is none. It has the name of its parameter, or of ``block.parameter`` where
    several tables have that one.
    """
    tied = {end for pair in graph.tied for end in pair}
    tables = [
        _build_table(block, operator)
        for block in graph.blocks
        for operator in block.operators
        if block.repeat == 1 and _is_lookup(block, operator) and (block.name, operator.parameters[0]) not in tied
    ]
    num_named = Counter(table.name for table in tables)
    return tuple(
        table if num_named[table.name] == 1 else replace(table, name=f"{table.block}.{table.name}") for table in tables
    )


def _is_lookup(block: Block, operator: Operator) -> bool:
    """Return whether an operator looks up rows of one table by indices that each sample has."""
    if operator.kind is not OperatorKind.EMBEDDING or len(operator.parameters) != 1 or len(operator.inputs) != 1:
        return False
    indices, table = block.tensor[operator.inputs[0]], block.tensor[operator.parameters[0]]
    users = [other for other in block.operators if table.name in other.parameters]
    return indices.dtype == "int64" and BATCH in indices.dims and len(table.dims) == 2 and len(users) == 1


def _build_table(block: Block, operator: Operator) -> Table:
    table, indices = block.tensor[operator.parameters[0]], block.tensor[operator.inputs[0]]
    rows, width = table.shape
    return Table(
        table.name,
        block.name,
        operator.name,
        rows,
        width,
        prod(indices.shape),
        prod(block.tensor[operator.outputs[0]].shape) // width,
        ITEMSIZE[table.dtype],
        ITEMSIZE[indices.dtype],
        operator.popularity,
    )


@lru_cache(maxsize=64)
def without_tables(graph: OperatorGraph, names: tuple[str, ...]) -> OperatorGraph:
    """Return a graph whose look-ups in some tables have no parameters: these are counted and timed elsewhere."""
    if not names:
        return graph
    operators = {(table.block, table.operator) for table in list_tables(graph) if table.name in names}
    blocks = tuple(
        replace(
            block,
            operators=tuple(
                replace(operator, parameters=()) if (block.name, operator.name) in operators else operator
                for operator in block.operators
            ),
        )
        for block in graph.blocks
    )
    return replace(graph, blocks=blocks)
