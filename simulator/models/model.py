"""Models as values: the protocol of all families, and the builder of blocks with tensors and operators.

Tensors and operators have named dims, as a string separated by spaces.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from meshwise.simulator.operator_graph import BATCH, Block, Operator, OperatorGraph, OperatorKind, Tensor


class Model(Protocol):
    """The sizes of a network of one family, as a frozen dataclass."""

    def __hash__(self) -> int: ...

    @property
    def name(self) -> str:
        """Name of the model."""

    @property
    def summary(self) -> str:
        """The sizes in one line."""

    def graph(self, sequence: int, precision: str) -> OperatorGraph:
        """Return the operator graph of one sample of ``sequence`` tokens."""


@lru_cache(maxsize=64)
def build(spec: Model, sequence: int, precision: str) -> OperatorGraph:
    """Return the operator graph of one sample of a model.

    Parameters
    ----------
    sequence
        Tokens of the sample; ignored by models whose samples have one size (images).
    precision
        Dtype of parameters and activations.

    Raises
    ------
    ValueError
        Where the model has no graph for such a sample.
    """
    return spec.graph(sequence, precision)


@dataclass(frozen=True, slots=True)
class SymbolicOperator:
    """An `Operator` whose dims have names, separated by spaces, and no sizes yet.

    Parameters
    ----------
    dims
        The iteration space.
    reduced
        Dims that are summed away.
    flops
        FLOP for one point of the iteration space.
    selective
        Whether selective recompute drops what it saves.
    executed
        Part of the FLOP that the kernel really executes.
    """

    name: str
    kind: OperatorKind
    dims: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    reduced: str = ""
    flops: float = 0.0
    saved: tuple[str, ...] = ()
    selective: bool = False
    executed: float = 1.0
    imbalance: float = 1.0
    statistics: tuple[tuple[str, int], ...] = ()
    kernel: str = ""

    def with_sizes(self, sizes: Mapping[str, int]) -> Operator:
        """Return the operator in a block whose dims have these sizes."""
        return Operator(
            self.name,
            self.kind,
            tuple((dim, sizes[dim]) for dim in self.dims.split()),
            self.inputs,
            self.outputs,
            self.parameters,
            tuple(self.reduced.split()),
            self.flops,
            self.saved,
            self.selective,
            self.executed,
            self.imbalance,
            self.statistics,
            self.kernel,
        )


class BlockBuilder:
    """Collects the tensors and operators of one block.

    Parameters
    ----------
    precision
        Dtype of tensors that name none.
    sizes
        The size of every dim by name; the batch is one sample.
    """

    def __init__(self, precision: str, sizes: Mapping[str, int]) -> None:
        self.precision = precision
        self.size = {BATCH: 1, **sizes}
        self._tensors: dict[str, Tensor] = {}
        self._operators: list[Operator] = []

    def tensor(self, name: str, dims: str, dtype: str | None = None) -> str:
        """Add a tensor with space-separated dims and return its name."""
        names = tuple(dims.split())
        shape = tuple(self.size[dim] for dim in names)
        self._tensors[name] = Tensor(name, names, shape, dtype or self.precision)
        return name

    def dims(self, name: str) -> str:
        """Return the space-separated dims of a tensor."""
        return " ".join(self._tensors[name].dims)

    def operator(self, operator: SymbolicOperator) -> None:
        """Add an operator, with the sizes of the block."""
        self._operators.append(operator.with_sizes(self.size))

    def elementwise(
        self, name: str, dims: str, inputs: tuple[str, ...], outputs: tuple[str, ...], saved: tuple[str, ...] = ()
    ) -> None:
        """Add an elementwise operator."""
        self.operator(SymbolicOperator(name, OperatorKind.ELEMENTWISE, dims, inputs, outputs, saved=saved))

    def block(
        self, name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], repeat: int = 1, layer: bool = False
    ) -> Block:
        """Return the tensors and operators added so far as a block."""
        return Block(name, tuple(self._operators), tuple(self._tensors.values()), inputs, outputs, repeat, layer)
