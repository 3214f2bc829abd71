"""Operator graphs: the operators and tensors of a network, in blocks that may repeat.

A graph is for **one sample** (one sequence): the dim named ``batch`` has size 1, and lowering multiplies it. A network
of 96 equal layers is one block with ``repeat=96``.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from math import prod
from typing import TYPE_CHECKING

from meshwise.simulator.brief import brief_repr

if TYPE_CHECKING:
    import networkx as nx

BATCH = "batch"
SEQUENCE = "sequence"
GATES = "gate"
"""Dim of size 2 of the input of a gated activation: the values, and the gates that multiply them."""

ITEMSIZE = {"fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "mask": 1, "int64": 8}
"""Bytes of one element by dtype; a dropout mask keeps one byte (Korthikanti et al. 2022, section 4)."""


class OperatorKind(StrEnum):
    """Kind of an operator, as far as its cost is concerned."""

    MATMUL = "matmul"
    BATCH_MATMUL = "batch_matmul"
    ATTENTION = "attention"
    SOFTMAX = "softmax"
    NORM = "norm"
    ELEMENTWISE = "elementwise"
    DROPOUT = "dropout"
    EMBEDDING = "embedding"
    CROSS_ENTROPY = "cross_entropy"
    GROUPED_MATMUL = "grouped_matmul"
    CONVOLUTION = "convolution"
    TOP_K = "top_k"
    PERMUTE = "permute"
    POOLING = "pooling"
    INTERACTION = "interaction"
    VIEW = "view"


@dataclass(frozen=True, slots=True)
class Tensor:
    """An activation or a parameter, with named ``dims`` and their ``shape``.

    Parameters
    ----------
    differentiable
        Whether backward computes its gradient: not so for data, indices and masks.
    """

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    differentiable: bool = True

    def __post_init__(self) -> None:
        if len(self.dims) != len(self.shape) or min(self.shape, default=1) < 1:
            raise ValueError(f"tensor {self.name}: one positive size a dim, met {self.dims} {self.shape}")
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"tensor {self.name}: dtype is one of {', '.join(ITEMSIZE)}, met {self.dtype}")

    @property
    def has_gradient(self) -> bool:
        """Whether backward computes its gradient."""
        return self.differentiable and self.dtype not in ("int64", "mask")

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.size * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class MeasuredTime:
    """Seconds that an operator took on a machine, in place of a model of its kernels: ``(fixed, per sample)``.

    >>> MeasuredTime(forward=(1.0, 0.5), backward=(2.0, 1.0)).compute(4, backward=True)
    6.0
    """

    forward: tuple[float, float]
    backward: tuple[float, float]

    def compute(self, samples: int, *, backward: bool) -> float:
        """Return the seconds of a pass with so many samples."""
        fixed, per_sample = self.backward if backward else self.forward
        return fixed + per_sample * samples


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of the network.

    Parameters
    ----------
    dims
        The iteration space, ``(("batch", 1), ("sequence", 2048), ...)``.
    reduced
        Dims that the operator sums over; cutting one leaves a partial sum on each rank.
    flops_per_point
        FLOP for one point of the iteration space (2 for a multiply and add).
    saved
        Names of the tensors that the backward pass reads. A block stores those of its inputs that its own operators
        save; a tensor that is carried through several blocks is stored once.
    recompute_selectively
        Whether selective recomputation drops the tensors that this operator saves (the attention core).
    executed_fraction
        Part of ``flops`` that the kernel executes: causal flash attention skips half.
    imbalance
        Tokens of the most loaded expert over the mean, for operators on routed tokens.
    statistics
        Dims along which the operator takes statistics, each with its number of values of 4 bytes, in either pass.
        Ranks that cut such a dim sum their values.
    kernel
        Name of the kernel, for operators that have several: ``flash_2`` and others for fused attention.
    uncut
        Dims that no axis may cut, besides those that the kind forbids, because the result is not a sum or a
        concatenation over parts of them.
    popularity
        Zipf exponent of how often the rows of a table are looked up; 0 where all are looked up as often.
    measured
        What it took on the one machine that the graph is for; ``None`` for the time by the model of its kind.
    """

    name: str
    kind: OperatorKind
    dims: tuple[tuple[str, int], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    reduced: tuple[str, ...] = ()
    flops_per_point: float = 0.0
    saved: tuple[str, ...] = ()
    recompute_selectively: bool = False
    executed_fraction: float = 1.0
    imbalance: float = 1.0
    statistics: tuple[tuple[str, int], ...] = ()
    kernel: str = ""
    uncut: tuple[str, ...] = ()
    popularity: float = 0.0
    measured: MeasuredTime | None = None

    __repr__ = brief_repr()

    @property
    def flops(self) -> float:
        """FLOP of the forward pass for one sample."""
        return self.flops_per_point * prod(size for _, size in self.dims)


@dataclass(frozen=True)
class Block:
    """Operators in execution order that occur ``repeat`` times in a row.

    ``inputs`` and ``outputs`` name the tensors that cross the block's boundary; the outputs of a block are, in order,
    the inputs of the next one. A tensor that a block only passes on is named in both.

    Parameters
    ----------
    layer
        Whether the block counts as a layer, the unit of pipeline stages and recomputation; a block that repeats
        always does.
    """

    name: str
    operators: tuple[Operator, ...]
    tensors: tuple[Tensor, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    repeat: int = 1
    layer: bool = False

    __repr__ = brief_repr()

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer", self.layer or self.repeat > 1)
        tensor_names = {tensor.name for tensor in self.tensors}
        for operator in self.operators:
            names = operator.inputs + operator.outputs + operator.parameters + operator.saved
            unknown_names = [name for name in names if name not in tensor_names]
            if unknown_names:
                raise ValueError(f"block {self.name}: operator {operator.name} names unknown tensors {unknown_names}")

    @cached_property
    def tensor(self) -> dict[str, Tensor]:
        """Tensors by name."""
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def parameters(self) -> tuple[Tensor, ...]:
        """Parameters of one occurrence of the block, without duplicates."""
        names = dict.fromkeys(name for operator in self.operators for name in operator.parameters)
        return tuple(self.tensor[name] for name in names)

    @cached_property
    def loss(self) -> tuple[Operator, ...]:
        """Operators of a loss over classes: all after the last one with parameters, if one is a cross-entropy."""
        last_index = max((index for index, operator in enumerate(self.operators) if operator.parameters), default=None)
        operators = () if last_index is None else self.operators[last_index + 1 :]
        return operators if any(operator.kind is OperatorKind.CROSS_ENTROPY for operator in operators) else ()

    @property
    def num_parameters(self) -> int:
        """Number of parameter elements of one occurrence."""
        return sum(tensor.size for tensor in self.parameters)

    @property
    def flops(self) -> float:
        """FLOP of one occurrence's forward pass for one sample."""
        return sum(operator.flops for operator in self.operators)

    def names(self) -> tuple[str, ...]:
        """Return the name of each occurrence: ``layers.0``, ``layers.1``, ... or the bare name."""
        return (self.name,) if self.repeat == 1 else tuple(f"{self.name}.{i}" for i in range(self.repeat))


@dataclass(frozen=True)
class OperatorGraph:
    """A network as a sequence of blocks.

    Parameters
    ----------
    sequence
        Tokens in one sample; 1 if a sample is not a sequence.
    tied
        Pairs of ``(block, parameter)`` that name one parameter. It is counted once, and stored twice if the two
        blocks are on different stages.
    """

    name: str
    blocks: tuple[Block, ...]
    sequence: int
    tied: tuple[tuple[tuple[str, str], tuple[str, str]], ...] = ()

    __repr__ = brief_repr()

    def __hash__(self) -> int:
        # Graphs are keys of many caches: hashing all operators each time would be slow, and equality compares them.
        return hash((self.name, self.sequence, len(self.blocks)))

    @cached_property
    def occurrences(self) -> tuple[tuple[str, Block], ...]:
        """Every block occurrence with its name, in execution order."""
        return tuple((name, block) for block in self.blocks for name in block.names())

    @property
    def num_parameters(self) -> int:
        """Number of parameter elements, tied parameters counted once."""
        total = sum(block.num_parameters * block.repeat for block in self.blocks)
        block_by_name = {block.name: block for block in self.blocks}
        return total - sum(block_by_name[second[0]].tensor[second[1]].size for _, second in self.tied)

    @property
    def flops(self) -> float:
        """FLOP of the forward pass for one sample."""
        return sum(block.flops * block.repeat for block in self.blocks)

    def to_networkx(self) -> "nx.DiGraph[str]":
        """Return a directed graph with a vertex, by name, for every operator of every block occurrence."""
        return _to_networkx(self)


@lru_cache(maxsize=4)
def _to_networkx(graph: OperatorGraph) -> "nx.DiGraph[str]":
    import networkx as nx

    result: nx.DiGraph[str] = nx.DiGraph()
    boundary: list[str | None] = []
    for name, block in graph.occurrences:
        # Blocks name their tensors each on their own: only the order of outputs and inputs connects them.
        producers = {t: source for t, source in zip(block.inputs, boundary, strict=False) if source is not None}
        for operator in block.operators:
            full_name = f"{name}.{operator.name}"
            result.add_node(full_name, operator=operator)
            for tensor in operator.inputs:
                if tensor in producers:
                    result.add_edge(producers[tensor], full_name, tensor=tensor)
            producers |= dict.fromkeys(operator.outputs, full_name)
        boundary = [producers.get(tensor) for tensor in block.outputs]
    return result
