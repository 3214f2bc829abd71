"""Attention: projections, rotation and the core, fused (flash) or operator by operator; also latent attention.

Queries have dims ``batch sequence heads group head_dim``: ``heads`` are those of keys and
values, ``group`` the query heads that share one (grouped-query attention). Multi-head latent attention keeps keys and
values compressed [1]_.

References
----------
.. [1] DeepSeek-AI 2024, "DeepSeek-V2", section 2.1 and appendix C.
"""

from dataclasses import dataclass, replace

from meshwise.simulator.machine.kernels import SECOND
from meshwise.simulator.models.layers import TOKENS, linear, norm
from meshwise.simulator.models.model import BlockBuilder, SymbolicOperator
from meshwise.simulator.operator_graph import OperatorKind

QUERY = "batch sequence heads group head_dim"
UNFUSED = "unfused"
ATTENTION = ("flash", *SECOND, UNFUSED)
"""Attention kernels: a device's best fused one, others by name, and separate operators that keep the scores."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Options of an attention layer.

    Parameters
    ----------
    kernel
        One of `ATTENTION_KERNELS`; all but ``unfused`` keep no scores.
    causal
        Whether a token sees only those before it; the fused kernel skips the others.
    dropout
        Whether probabilities are dropped out.
    window
        Number of tokens that a token sees, itself included; None for all before it.
    qkv_bias, bias
        Whether the projections into and out of attention have biases.
    rotary
        Whether queries and keys are rotated by position.
    qk_norm
        Whether queries and keys are normalised head by head.
    position_bias
        A tensor that is added to the scores, or None; unfused only.
    prefix
        Begins the names of operators and tensors, for layers that attend twice.
    key
        Dim of the tokens attended to.
    query_dim, value_dim
        Dims of one head of queries and keys, and of values.
    """

    kernel: str = "flash"
    causal: bool = True
    dropout: bool = False
    window: int | None = None
    qkv_bias: bool = False
    bias: bool = False
    rotary: bool = False
    qk_norm: bool = False
    position_bias: str | None = None
    prefix: str = ""
    key: str = "key"
    query_dim: str = "head_dim"
    value_dim: str = "head_dim"

    @property
    def context(self) -> str:
        """Dims of the output of the core."""
        return f"batch sequence heads group {self.value_dim}"


def self_attention(builder: BlockBuilder, source: str, how: Attention) -> str:
    """Add attention of tokens to themselves, projections included, and return its output."""
    query, keys, values = _qkv(builder, source, how)
    if how.qk_norm:
        query = norm(builder, "query_norm", query, bias=False, over=how.query_dim)
        keys = norm(builder, "key_norm", keys, bias=False, over=how.query_dim)
    if how.rotary:
        query, keys = _rotary(builder, query, keys, how)
    return projection(builder, core(builder, query, keys, values, how), how)


def cross_attention(builder: BlockBuilder, source: str, memory: str, how: Attention, memory_dim: str) -> str:
    """Add attention of ``source`` to other tokens, ``batch source memory_dim``, and return its output."""
    how = replace(how, key="source")
    width = "heads group head_dim"
    query = builder.tensor(f"{how.prefix}query", QUERY)
    linear(
        builder,
        f"{how.prefix}query",
        source,
        (query,),
        f"batch sequence {width} hidden",
        weight=f"hidden {width}",
        reduced="hidden",
        bias=width if how.qkv_bias else "",
    )
    keys, values = _keys_and_values(builder, how)
    linear(
        builder,
        f"{how.prefix}key_value",
        memory,
        (keys, values),
        f"batch source heads key_value {memory_dim}",
        weight=f"{memory_dim} heads key_value",
        reduced=memory_dim,
        bias="heads key_value" if how.qkv_bias else "",
    )
    return projection(builder, core(builder, query, keys, values, how), how)


def _keys_and_values(builder: BlockBuilder, how: Attention) -> tuple[str, str]:
    keys = builder.tensor(f"{how.prefix}keys", f"batch {how.key} heads {how.query_dim}")
    return keys, builder.tensor(f"{how.prefix}values", f"batch {how.key} heads {how.value_dim}")


def _qkv(builder: BlockBuilder, source: str, how: Attention) -> tuple[str, str, str]:
    query = builder.tensor(f"{how.prefix}query", QUERY)
    keys, values = _keys_and_values(builder, how)
    linear(
        builder,
        f"{how.prefix}qkv",
        source,
        (query, keys, values),
        "batch sequence heads qkv hidden",
        weight="hidden heads qkv",
        reduced="hidden",
        bias="heads qkv" if how.qkv_bias else "",
    )
    return query, keys, values


def _rotary(builder: BlockBuilder, query: str, keys: str, how: Attention) -> tuple[str, str]:
    rotated = (
        builder.tensor("rotated_query", QUERY),
        builder.tensor("rotated_keys", f"batch {how.key} heads {how.query_dim}"),
    )
    builder.elementwise("rotary", QUERY, (query, keys), rotated)
    return rotated


def projection(builder: BlockBuilder, context: str, how: Attention) -> str:
    """Add the product of all heads' contexts with the output weight and return it."""
    out = builder.tensor(f"{how.prefix}projected", TOKENS)
    width = f"heads group {how.value_dim}"
    linear(
        builder,
        f"{how.prefix}projection",
        context,
        (out,),
        f"{TOKENS} {width}",
        weight=f"{width} hidden",
        reduced=width,
        bias="hidden" if how.bias else "",
    )
    return out


def core(builder: BlockBuilder, query: str, keys: str, values: str, how: Attention) -> str:
    """Add scores, softmax and the weighted sum of values, fused or not, and return the context."""
    return (_unfused if how.kernel == UNFUSED else _flash)(builder, query, keys, values, how)


def _flash(builder: BlockBuilder, query: str, keys: str, values: str, how: Attention) -> str:
    context = builder.tensor(f"{how.prefix}context", how.context)
    lse = builder.tensor(f"{how.prefix}logsumexp", "batch heads group sequence", "fp32")
    dims, flops = f"batch heads group sequence {how.key} {how.query_dim}", 4.0
    # heads of latent attention have two widths: an operator has one iteration space, so both go into the FLOP
    if how.query_dim != how.value_dim:
        dims, flops = _square(how), 2.0 * (builder.size[how.query_dim] + builder.size[how.value_dim])
    builder.operator(
        SymbolicOperator(
            f"{how.prefix}attention",
            OperatorKind.ATTENTION,
            dims,
            (query, keys, values),
            (context, lse),
            flops=flops * visible(builder.size["sequence"], how.window),
            saved=(query, keys, values, context, lse),
            selective=True,
            executed=0.5 if how.causal else 1.0,
            kernel=how.kernel,
        )
    )
    return context


def visible(sequence: int, window: int | None) -> float:
    """Return the fraction of a causal square of scores that a sliding window leaves.

    >>> visible(8, None), visible(8, 8), visible(8, 4)
    (1.0, 1.0, 0.75)
    """
    seen = min(window or sequence, sequence)
    return seen * (2 * sequence - seen) / sequence**2


def _square(how: Attention) -> str:
    return f"batch heads group sequence {how.key}"


def _unfused(builder: BlockBuilder, query: str, keys: str, values: str, how: Attention) -> str:
    square = _square(how)
    scores = builder.tensor(f"{how.prefix}scores", square)
    product, softmax = OperatorKind.BATCH_MATMUL, OperatorKind.SOFTMAX
    builder.operator(
        SymbolicOperator(
            f"{how.prefix}scores",
            product,
            f"{square} {how.query_dim}",
            (query, keys),
            (scores,),
            reduced=how.query_dim,
            flops=2.0,
            saved=(query, keys),
            selective=True,
        )
    )
    scores = _biased(builder, scores, how)
    probabilities = builder.tensor(f"{how.prefix}probabilities", square)
    saved = (probabilities,)
    builder.operator(
        SymbolicOperator(
            f"{how.prefix}softmax", softmax, square, (scores,), (probabilities,), saved=saved, selective=True
        )
    )
    weights = _dropped(builder, probabilities, how)
    context = builder.tensor(f"{how.prefix}context", how.context)
    builder.operator(
        SymbolicOperator(
            f"{how.prefix}context",
            product,
            f"{square} {how.value_dim}",
            (weights, values),
            (context,),
            reduced=how.key,
            flops=2.0,
            saved=(weights, values),
            selective=True,
        )
    )
    return context


def _biased(builder: BlockBuilder, scores: str, how: Attention) -> str:
    if how.position_bias is None:
        return scores
    out = builder.tensor(f"{how.prefix}biased_scores", _square(how))
    kind = OperatorKind.ELEMENTWISE
    inputs = (scores, how.position_bias)
    builder.operator(SymbolicOperator(f"{how.prefix}position_bias", kind, _square(how), inputs, (out,), selective=True))
    return out


def _dropped(builder: BlockBuilder, probabilities: str, how: Attention) -> str:
    if not how.dropout:
        return probabilities
    out = builder.tensor(f"{how.prefix}dropped", _square(how))
    masks = (builder.tensor(f"{how.prefix}probabilities_mask", _square(how), "mask"),)
    name, kind = f"{how.prefix}attention_dropout", OperatorKind.DROPOUT
    builder.operator(SymbolicOperator(name, kind, _square(how), (probabilities,), (out,), saved=masks, selective=True))
    return out


def head_sizes(heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    """Return the sizes of the dims of attention."""
    group = heads // kv_heads
    sizes = {"heads": kv_heads, "group": group, "head_dim": head_dim}
    return sizes | {"qkv": (group + 2) * head_dim, "key_value": 2 * head_dim}


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Sizes of multi-head latent attention.

    Parameters
    ----------
    kv_rank, q_rank
        Width of compressed keys and values, and of compressed queries (None: not compressed).
    nope_dim, rope_dim
        Parts of a head of queries and keys without and with rotary positions; all heads
        share the rotary part of the key.
    value_dim
        Width of a head of values.
    """

    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    q_rank: int | None = None

    def __post_init__(self) -> None:
        sizes = (self.kv_rank, self.nope_dim, self.rope_dim, self.value_dim, self.q_rank or 1)
        if min(sizes) < 1:
            raise ValueError(f"sizes of latent attention are at least 1, met {sizes}")

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the dims of latent attention."""
        return {
            "q_rank": self.q_rank or 1,
            "kv_rank": self.kv_rank,
            "kv_joint": self.kv_rank + self.rope_dim,
            "nope_dim": self.nope_dim,
            "rope_dim": self.rope_dim,
            "query_dim": self.nope_dim + self.rope_dim,
            "value_dim": self.value_dim,
            "key_value": self.nope_dim + self.value_dim,
        }


def latent_attention(builder: BlockBuilder, source: str, sizes: LatentAttention, how: Attention) -> str:
    """Add latent attention of tokens to themselves, projections included, and return its output."""
    query = _project_latent_query(builder, source, compressed=sizes.q_rank is not None)
    keys, rotary_key, values = _project_latent_keys_and_values(builder, source)
    rotated = (
        builder.tensor("rotated_query", "batch sequence heads group query_dim"),
        builder.tensor("rotated_keys", "batch key heads query_dim"),
    )
    builder.elementwise("rotary", "batch sequence heads group query_dim", (query, keys, rotary_key), rotated)
    return projection(builder, core(builder, *rotated, values, how), how)


def _project_latent_query(builder: BlockBuilder, source: str, *, compressed: bool) -> str:
    query = builder.tensor("query", "batch sequence heads group query_dim")
    width = "hidden"
    if compressed:
        down = builder.tensor("compressed_query", "batch sequence q_rank")
        dims, weight = "batch sequence q_rank hidden", "hidden q_rank"
        linear(builder, "query_down", source, (down,), dims, weight=weight, reduced="hidden")
        source, width = norm(builder, "query_norm", down, bias=False, over="q_rank"), "q_rank"
    dims, weight = f"batch sequence heads group query_dim {width}", f"{width} heads group query_dim"
    linear(builder, "query", source, (query,), dims, weight=weight, reduced=width)
    return query


def _project_latent_keys_and_values(builder: BlockBuilder, source: str) -> tuple[str, str, str]:
    compressed = builder.tensor("compressed_kv", "batch sequence kv_rank")
    rotary_key = builder.tensor("rotary_key", "batch sequence rope_dim")
    dims, weight = "batch sequence kv_joint hidden", "hidden kv_joint"
    linear(builder, "kv_down", source, (compressed, rotary_key), dims, weight=weight, reduced="hidden")
    normed = norm(builder, "kv_norm", compressed, bias=False, over="kv_rank")
    keys = builder.tensor("keys", "batch key heads nope_dim")
    values = builder.tensor("values", "batch key heads value_dim")
    dims, weight = "batch sequence heads key_value kv_rank", "kv_rank heads key_value"
    linear(builder, "kv_up", normed, (keys, values), dims, weight=weight, reduced="kv_rank")
    return keys, rotary_key, values
