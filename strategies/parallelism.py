"""How tensor, context and expert parallelism cut the operators of a network."""

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from simulator.operator_graph import BATCH, SEQUENCE, Block, Operator, OperatorGraph, OperatorKind
from strategies.grid import column_dim, kept_cuts
from strategies.mesh import CONTEXT, EXPERT, TENSOR, TENSOR_ROWS
from strategies.sharding import OperatorSharding


class Attention(StrEnum):
    """How the ranks of a context group, each with a part of the sequence, compute attention."""

    RING = "ring"
    ALL_GATHER = "all_gather"
    ULYSSES = "ulysses"


TENSOR_DIMS = ("heads", "ffn", "expert_ffn", "vocab")
"""Dims of a transformer that tensor parallelism cuts: column first, row after."""

EXPERTS = "experts"
"""The dim of experts; routed tokens have it, and the parameters that only one expert uses."""

_SEQUENCE_CUT = frozenset(
    {OperatorKind.NORM, OperatorKind.DROPOUT, OperatorKind.ELEMENTWISE, OperatorKind.TOP_K, OperatorKind.MATMUL}
)
"""Kinds that sequence parallelism cuts: a product is one that tensor parallelism leaves whole, as a router's."""
CAPACITY = "capacity"
"""The dim of the slots that an expert has for the tokens of one sequence."""
_ALONG_SEQUENCE = ("key", CAPACITY)
"""Dims of tensors that an operator over ``sequence`` makes: keys and values, and tokens sent to experts."""


@dataclass(frozen=True, slots=True)
class Parallelism:
    """What cuts the operators of a network.

    Parameters
    ----------
    tensor, expert
        Whether those axes cut anything.
    rows
        Whether tensor parallelism has a second axis, along which tokens and parameters are cut.
    sequence_parallel
        Whether operators between tensor-parallel regions are cut along ``sequence`` by the tensor axis.
    attention
        How attention is computed where the context axis cuts the sequence; ``None`` where none does.
    gathers_logits
        Whether tensor ranks gather the logits, each for the whole loss; else the loss is cut over the vocabulary.
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
def shardings(graph: OperatorGraph, by: Parallelism) -> tuple[OperatorSharding, ...]:
    """Return how every operator of a transformer is cut: by tensor, context and expert parallelism.

    * tensor: along the one dim of `TENSOR_DIMS` that an operator has; others are replicated, or cut
      along ``sequence`` with sequence parallelism [1]_ [2]_. The loss, which sums over the sequence, is
      replicated: what it needs of cut logits is all-reduced [1]_. With rows besides, as `strategies.grid` says.
    * context: along ``sequence`` all operators [2]_; attention reads the keys of all ranks (`RING` [3]_,
      `ALL_GATHER` [4]_), or is cut along its heads instead (`ULYSSES` [5]_).
    * expert: experts' operators along ``experts``, all others along ``batch``, so that tokens go from one
      layout to the other and back in all-to-alls [6]_. With sequence parallelism each tensor rank sends
      its part of the tokens, and the parts of an expert's tokens are gathered where the expert is.

    References
    ----------
    .. [1] Shoeybi et al. 2019, "Megatron-LM".
    .. [2] Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", section 4.2.
    .. [3] Liu, Zaharia and Abbeel 2023, "Ring attention with blockwise transformers for near-infinite context".
    .. [4] Grattafiori et al. 2024, "The Llama 3 herd of models", section 3.3.2 (context parallelism).
    .. [5] Jacobs et al. 2023, "DeepSpeed Ulysses".
    .. [6] Lepikhin et al. 2020, "GShard", section 3.
    """
    if not by:
        return ()
    return tuple(_operator(block, operator, by) for block in graph.blocks for operator in block.operators)


def _operator(block: Block, operator: Operator, by: Parallelism) -> OperatorSharding:
    cuts: dict[str, tuple[str, ...]] = {}
    names = [dim for dim, _ in operator.dims]
    whole = by.gathers_logits and operator.kind is OperatorKind.CROSS_ENTROPY
    free = [dim for dim in TENSOR_DIMS if dim in names and dim not in operator.uncut and not whole]
    tensor = free[0] if by.tensor and free else None
    alone = tensor
    if by.rows:
        tensor = column_dim(operator, tensor) if by.tensor else None
        cuts |= {BATCH: (TENSOR_ROWS,)} if BATCH in names or _has(block, operator, BATCH) else {}
    if tensor is not None:
        cuts[tensor] = (TENSOR,)
    if by.attention is not None:
        cuts |= _context_cuts(block, operator, names, by.attention, cuts)
    between = tensor is None and operator.kind in _SEQUENCE_CUT and SEQUENCE in names
    if by.sequence_parallel and between and SEQUENCE not in operator.reduced + operator.uncut:
        cuts[SEQUENCE] = (*cuts.get(SEQUENCE, ()), TENSOR)
    if by.sequence_parallel and operator.kind is OperatorKind.PERMUTE:
        cuts |= {dim: (*cuts.get(dim, ()), TENSOR) for dim in (SEQUENCE, CAPACITY) if _has(block, operator, dim)}
    if by.expert:
        cuts[EXPERTS if is_expert(block, operator) else BATCH] = (EXPERT,)
    kept = kept_cuts(block, operator, alone, cuts) if by.rows else ()
    return OperatorSharding(f"{block.name}.{operator.name}", tuple(cuts.items()), kept)


def _context_cuts(
    block: Block, operator: Operator, names: list[str], attention: Attention, cuts: dict[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """Return what the context axis cuts of an operator."""
    if "key" in names and attention is Attention.ULYSSES:
        return {"heads": (*cuts.get("heads", ()), CONTEXT)}
    if "key" in names:
        ring = attention is Attention.RING and operator.kind is OperatorKind.ATTENTION
        return dict.fromkeys((SEQUENCE, "key") if ring else (SEQUENCE,), (CONTEXT,))
    dims = [dim for dim in (SEQUENCE, *_ALONG_SEQUENCE) if dim in names or _has(block, operator, dim)]
    return dict.fromkeys(dims, (CONTEXT,))


def _has(block: Block, operator: Operator, dim: str) -> bool:
    """Return whether an operator reads or makes a tensor with a dim."""
    return any(dim in block.tensor[name].dims for name in operator.inputs + operator.outputs)


def is_expert(block: Block, operator: Operator) -> bool:
    """Return whether an operator is one of experts on the tokens sent to them: none of its tensors has all tokens."""
    tensors = [block.tensor[name] for name in operator.inputs + operator.outputs]
    return all(EXPERTS in tensor.dims and SEQUENCE not in tensor.dims for tensor in tensors)
