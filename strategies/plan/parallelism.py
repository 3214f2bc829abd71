"""How tensor, context and expert parallelism cut the operators of a network.

Tensor parallelism may have a grid of ranks, rows by columns (2-D), and data-parallel ranks around it (2.5-D).

Rows cut the tokens of an activation (its ``batch`` dim), columns cut its hidden, head, feed-forward or vocabulary
dim, so that a rank has ``1 / (rows * columns)`` of it. A rank has the same part of every parameter: columns cut the
output dim of a weight, rows cut its summed dim.

A product ``C = A B`` then needs a block row of A and a block column of B. SUMMA [1]_ broadcasts them block by block
in ``q`` steps. Here they are simulated as two all-gathers, one along columns and one along rows, in which a rank
receives the same ``(q - 1) / q`` of A and of B. In the backward pass A and B are gathered again, then reduce-scatters
sum ``dA = dC B'`` along columns and ``dB = A' dC`` along rows: per product ``A + B`` forward and ``2 (A + B)``
backward [2]_ [3]_. All products do so. GSPMD [4]_ keeps weights in the same way but sums the result of a layer's
second products along columns, which moves less where their input is wider than their result. Attention has whole
heads and whole sequences on a rank and moves nothing. A norm sums its statistics along columns [2]_. Columns cut the
vocabulary of the embedding as of the output layer, with which it may be tied: each rank of a row looks up its part of
the vocabulary, and the parts are summed, as in Megatron-LM.

The 2.5-D grid of ``depth * q * q`` ranks [5]_ is ``depth`` grids with equal weights, each with a part of the batch.
That is a plan with ``data = depth`` and the grid's axes inside the data axis; data groups sum gradients once a step.

References
----------
.. [1] van de Geijn and Watts 1997, "SUMMA: scalable universal matrix multiplication algorithm".
.. [2] Xu and You, "An efficient 2D method for training super-large deep learning models" (Optimus), IPDPS 2023,
   arXiv 2104.05343: section 3 and table 1.
.. [3] Colossal-AI, "2D tensor parallelism": 6 (q - 1) / q operands a linear layer, forward and backward.
.. [4] Xu et al. 2021, "GSPMD: general and scalable parallelization for ML computation graphs" (2D sharding).
.. [5] Wang et al., "Tesseract: parallelize the tensor parallelism efficiently", ICPP 2022, arXiv 2105.14500.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import chain
from math import gcd

from meshwise.simulator.machine.compute import PRODUCTS
from meshwise.simulator.memo import HashedTuple
from meshwise.simulator.operator_graph import BATCH, SEQUENCE, Block, Operator, OperatorGraph, OperatorKind, Tensor
from meshwise.strategies.plan.mesh import CONTEXT, EXPERT, TENSOR, TENSOR_ROWS, nearest_divisor
from meshwise.strategies.plan.sharding import OperatorSharding

HIDDEN = "hidden"
"""The dim of a token's features between layers."""

_MATRICES = frozenset({OperatorKind.MATMUL, OperatorKind.GROUPED_MATMUL})
"""Products with a matrix, whose summed dim is large enough to cut; a convolution sums few channels."""

Cuts = Mapping[str, tuple[str, ...]]
"""The axes that cut each dim, outermost first."""

KeptCuts = tuple[tuple[str, tuple[str, ...]], ...]
"""The cuts of one tensor, as a plan states them."""


def find_column_dim(operator: Operator, dim: str | None) -> str | None:
    """Return the dim of an operator that columns cut; ``dim`` is the one that a single tensor axis would cut.

    Columns never cut a summed dim of a product, because products gather their inputs.
    """
    names = [name for name, _ in operator.dims]
    summed_dims = operator.reduced if operator.kind in PRODUCTS else ()
    return next((name for name in (dim, HIDDEN) if name in names and name not in summed_dims), None)


def find_kept_cuts(block: Block, operator: Operator, dim: str | None, cuts: Cuts) -> tuple[tuple[str, KeptCuts], ...]:
    """Return the cuts in which an operator keeps its parameters, and a product its inputs; ``cuts`` are its dims'.

    Rows also cut the parameters, and columns the inputs: along ``dim``, which a single tensor axis would cut, or
    along the hidden dim, whichever is summed.
    """
    tensor_cuts = [(name, _cut_parameter(operator, block.tensor[name], cuts)) for name in operator.parameters]
    summed_dims = [sum_dim for sum_dim in (dim, HIDDEN) if sum_dim in operator.reduced]
    if operator.kind in _MATRICES and operator.parameters and summed_dims:
        input_cuts = {**cuts, summed_dims[0]: (TENSOR,)}
        tensor_cuts += [(name, _cut_tensor(block.tensor[name], input_cuts)) for name in operator.inputs]
    return tuple(tensor_cuts)


def _cut_tensor(tensor: Tensor, cuts: Cuts) -> KeptCuts:
    return tuple((dim, cuts[dim]) for dim in tensor.dims if dim in cuts)


def _cut_parameter(operator: Operator, parameter: Tensor, cuts: Cuts) -> KeptCuts:
    if not parameter.dims:  # one number, which every rank has
        return ()
    dim = _find_row_dim(operator, parameter, cuts)
    return _cut_tensor(parameter, {**cuts, dim: (*cuts.get(dim, ()), TENSOR_ROWS)})


def _find_row_dim(operator: Operator, parameter: Tensor, cuts: Cuts) -> str:
    """Return the dim of a parameter that rows cut: the hidden dim, else the summed dim of a weight, else any.

    A dim that columns do not cut comes first. Both axes cut the one dim of a vector, as in Colossal-AI, where
    ``Linear2D`` and ``LayerNorm2D`` keep 1 / q^2 of biases and norms.
    """
    uncut_dims = [dim for dim in parameter.dims if TENSOR not in cuts.get(dim, ())]
    summed_dims = [dim for dim in uncut_dims if dim in operator.reduced] if operator.kind in _MATRICES else []
    hidden_dims = [dim for dim in parameter.dims if dim == HIDDEN]
    return next(
        chain((dim for dim in hidden_dims if dim in uncut_dims), summed_dims, hidden_dims, uncut_dims, parameter.dims)
    )


def check_grid(
    graph: OperatorGraph, shardings: tuple[OperatorSharding, ...], rows: int, columns: int, microbatch: int
) -> Iterator[tuple[str, str]]:
    """Yield every rule that a grid breaks: the field to blame, and the message."""
    # rows cut the batch dim, which has the microbatch's size on a data rank
    if microbatch % rows:
        nearest = -(-microbatch // rows) * rows
        yield "microbatch", f"tensor_rows({rows}) divides microbatch, met {microbatch}; nearest: {nearest}"
    if not any(HIDDEN in dict(operator.dims) for block in graph.blocks for operator in block.operators):
        yield "tensor_rows", f"tensor_rows needs a transformer's dim {HIDDEN}, the model has none; nearest: 1"
        return
    for dim, (size, has_columns) in _find_row_sizes(graph, shardings).items():
        num_parts = rows * columns if has_columns else rows
        if size % num_parts:
            text = f"tensor_rows({rows}) * tensor({columns}) divides" if has_columns else "tensor_rows divides"
            nearest = nearest_divisor(size // gcd(size, columns) if has_columns else size, rows)
            yield "tensor_rows", f"{text} {dim}({size}), met {num_parts}; nearest tensor_rows: {nearest}"


@lru_cache(maxsize=64)
def _find_row_sizes(graph: OperatorGraph, shardings: tuple[OperatorSharding, ...]) -> Mapping[str, tuple[int, bool]]:
    """Return by dim the size of parameters that rows cut, and whether columns cut that dim of a parameter too.

    A dim of several sizes counts with their greatest common divisor.
    """
    tensors = {
        f"{block.name}.{name}": block_tensor for block in graph.blocks for name, block_tensor in block.tensor.items()
    }
    dim_sizes: dict[str, tuple[int, bool]] = {}
    for sharding in shardings:
        block = sharding.operator.rsplit(".", 1)[0]
        for name, cuts in sharding.kept:
            tensor = tensors[f"{block}.{name}"]
            for dim, axes in cuts:
                if TENSOR_ROWS in axes and dim != BATCH:
                    size, has_columns = dim_sizes.get(dim, (0, False))
                    dim_sizes[dim] = gcd(size, tensor.shape[tensor.dims.index(dim)]), has_columns or TENSOR in axes
    return dim_sizes


class Attention(StrEnum):
    """How the ranks of a context group, each with a part of every sequence, compute attention."""

    RING = "ring"
    ALL_GATHER = "all_gather"
    ULYSSES = "ulysses"


TENSOR_DIMS = ("heads", "ffn", "expert_ffn", "vocab")
"""Dims of a transformer that tensor parallelism cuts: first by column-parallel, then by row-parallel products."""

EXPERTS = "experts"
"""The dim of experts, of routed tokens and of the parameters that only one expert uses."""

_SEQUENCE_CUT_KINDS = frozenset(
    {OperatorKind.NORM, OperatorKind.DROPOUT, OperatorKind.ELEMENTWISE, OperatorKind.TOP_K, OperatorKind.MATMUL}
)
"""Kinds that sequence parallelism cuts; the products among them are not cut by tensor ranks, as those of routers."""
CAPACITY = "capacity"
"""The dim of an expert's slots for the tokens of one sequence."""
_SEQUENCE_DIMS = ("key", CAPACITY)
"""Dims that stand for ``sequence`` in tensors made along it: keys and values, and tokens sent to experts."""


@dataclass(frozen=True, slots=True)
class Parallelism:
    """The kinds of parallelism that cut the operators of a network.

    Parameters
    ----------
    tensor, expert
        Whether these axes have more than one rank.
    rows
        Whether tensor parallelism has a second axis, which cuts tokens and parameters.
    sequence_parallel
        Whether the tensor axis cuts operators between tensor-parallel regions along ``sequence``.
    attention
        How attention is computed where the context axis cuts the sequence; ``None`` without a context axis.
    gathers_logits
        Whether each tensor rank gathers the logits and computes the whole loss; otherwise the vocabulary of the loss
        is cut.
    """

    tensor: bool = False
    sequence_parallel: bool = False
    expert: bool = False
    attention: Attention | None = None
    rows: bool = False
    gathers_logits: bool = False

    def __bool__(self) -> bool:
        return self.tensor or self.rows or self.expert or self.attention is not None


@lru_cache(maxsize=64)
def shard_operators(graph: OperatorGraph, parallelism: Parallelism) -> tuple[OperatorSharding, ...]:
    """Return how tensor, context and expert parallelism cut every operator of a transformer.

    * tensor: along the one dim of `TENSOR_DIMS` that an operator has; other operators are replicated, or cut
      along ``sequence`` with sequence parallelism [1]_ [2]_. The loss sums over the sequence and is not cut along it;
      what it needs of cut logits is all-reduced [1]_. Rows cut as described at the top of the module.
    * context: all operators along ``sequence`` [2]_; attention reads the keys of all ranks (`RING` [3]_,
      `ALL_GATHER` [4]_), or is cut along its heads instead (`ULYSSES` [5]_).
    * expert: operators of experts along ``experts``, all others along ``batch``; all-to-alls move tokens from one
      layout to the other and back [6]_. With sequence parallelism each tensor rank sends its part of the tokens, and
      the parts of an expert's tokens are gathered at the expert.

    References
    ----------
    .. [1] Shoeybi et al. 2019, "Megatron-LM".
    .. [2] Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", section 4.2.
    .. [3] Liu, Zaharia and Abbeel 2023, "Ring attention with blockwise transformers for near-infinite context".
    .. [4] Grattafiori et al. 2024, "The Llama 3 herd of models", section 3.3.2 (context parallelism).
    .. [5] Jacobs et al. 2023, "DeepSpeed Ulysses".
    .. [6] Lepikhin et al. 2020, "GShard", section 3.
    """
    if not parallelism:
        return ()
    return HashedTuple(
        _shard_operator(block, operator, parallelism) for block in graph.blocks for operator in block.operators
    )


def _shard_operator(block: Block, operator: Operator, parallelism: Parallelism) -> OperatorSharding:
    cuts: dict[str, tuple[str, ...]] = {}
    names = [dim for dim, _ in operator.dims]
    gathers_logits = parallelism.gathers_logits and operator.kind is OperatorKind.CROSS_ENTROPY
    free_dims = [dim for dim in TENSOR_DIMS if dim in names and dim not in operator.uncut and not gathers_logits]
    cut_dim = free_dims[0] if parallelism.tensor and free_dims else None
    single_axis_dim = cut_dim  # with a grid the columns may cut another dim, but inputs are kept by this one
    if parallelism.rows:
        cut_dim = find_column_dim(operator, cut_dim) if parallelism.tensor else None
        cuts |= {BATCH: (TENSOR_ROWS,)} if BATCH in names or _has_dim(block, operator, BATCH) else {}
    if cut_dim is not None:
        cuts[cut_dim] = (TENSOR,)
    if parallelism.attention is not None:
        cuts |= _find_context_cuts(block, operator, names, parallelism.attention, cuts)
    is_between = cut_dim is None and operator.kind in _SEQUENCE_CUT_KINDS and SEQUENCE in names
    if parallelism.sequence_parallel and is_between and SEQUENCE not in operator.reduced + operator.uncut:
        cuts[SEQUENCE] = (*cuts.get(SEQUENCE, ()), TENSOR)
    # each tensor rank sends its part of the tokens to experts
    if parallelism.sequence_parallel and operator.kind is OperatorKind.PERMUTE:
        cuts |= {dim: (*cuts.get(dim, ()), TENSOR) for dim in (SEQUENCE, CAPACITY) if _has_dim(block, operator, dim)}
    if parallelism.expert:
        cuts[EXPERTS if is_expert(block, operator) else BATCH] = (EXPERT,)
    kept_tensors = find_kept_cuts(block, operator, single_axis_dim, cuts) if parallelism.rows else ()
    return OperatorSharding(f"{block.name}.{operator.name}", tuple(cuts.items()), kept_tensors)


def _find_context_cuts(
    block: Block, operator: Operator, names: list[str], attention: Attention, cuts: dict[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """Return the dims of an operator that the context axis cuts."""
    if "key" in names and attention is Attention.ULYSSES:
        return {"heads": (*cuts.get("heads", ()), CONTEXT)}
    if "key" in names:
        is_ring = attention is Attention.RING and operator.kind is OperatorKind.ATTENTION
        return dict.fromkeys((SEQUENCE, "key") if is_ring else (SEQUENCE,), (CONTEXT,))
    dims = [dim for dim in (SEQUENCE, *_SEQUENCE_DIMS) if dim in names or _has_dim(block, operator, dim)]
    return dict.fromkeys(dims, (CONTEXT,))


def _has_dim(block: Block, operator: Operator, dim: str) -> bool:
    """Return whether an operator reads or writes a tensor that has ``dim``."""
    return any(dim in block.tensor[name].dims for name in operator.inputs + operator.outputs)


def is_expert(block: Block, operator: Operator) -> bool:
    """Return whether an operator is one of an expert: all its tensors are tokens that were sent to experts."""
    tensors = [block.tensor[name] for name in operator.inputs + operator.outputs]
    return all(EXPERTS in tensor.dims and SEQUENCE not in tensor.dims for tensor in tensors)
