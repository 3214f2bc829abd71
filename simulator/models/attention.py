"""Attention: projections, rotation and the core, fused (flash) or operator by operator; also latent attention.

Queries have dims ``batch sequence heads group head_dim``: ``heads`` are those of keys and
values, ``group`` the query heads that share one (grouped-query attention). Multi-head latent attention keeps keys and
values compressed [1]_.

References
----------
.. [1] DeepSeek-AI 2024, "DeepSeek-V2", section 2.1 and appendix C.
"""

from dataclasses import dataclass, replace

from meshwise.simulator.machine.kernels import KERNEL_SLOWDOWNS
from meshwise.simulator.models.layers import TOKEN_DIMS, linear, norm
from meshwise.simulator.models.model import BlockBuilder, SymbolicOperator
from meshwise.simulator.operator_graph import OperatorKind

QUERY_DIMS = "batch sequence heads group head_dim"
UNFUSED = "unfused"
ATTENTION_KERNELS = ("flash", *KERNEL_SLOWDOWNS, UNFUSED)
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
    def context_dims(self) -> str:
        """Dims of the output of the core."""
        return f"batch sequence heads group {self.value_dim}"


def self_attention(builder: BlockBuilder, source: str, attention: Attention) -> str:
    """Add attention of tokens to themselves, projections included, and return its output."""
    query, keys, values = _project_qkv(builder, source, attention)
    if attention.qk_norm:
        query = norm(builder, "query_norm", query, bias=False, dim=attention.query_dim)
        keys = norm(builder, "key_norm", keys, bias=False, dim=attention.query_dim)
    if attention.rotary:
        query, keys = _rotate_queries_keys(builder, query, keys, attention)
    return output_projection(builder, attention_core(builder, query, keys, values, attention), attention)


def cross_attention(builder: BlockBuilder, source: str, memory: str, attention: Attention, memory_dim: str) -> str:
    """Add attention of ``source`` to other tokens, ``batch source memory_dim``, and return its output."""
    attention = replace(attention, key="source")
    width = "heads group head_dim"
    query = builder.add_tensor(f"{attention.prefix}query", QUERY_DIMS)
    linear(
        builder,
        f"{attention.prefix}query",
        source,
        (query,),
        f"batch sequence {width} hidden",
        weight=f"hidden {width}",
        summed_dims="hidden",
        bias=width if attention.qkv_bias else "",
    )
    keys, values = _add_keys_values(builder, attention)
    linear(
        builder,
        f"{attention.prefix}key_value",
        memory,
        (keys, values),
        f"batch source heads key_value {memory_dim}",
        weight=f"{memory_dim} heads key_value",
        summed_dims=memory_dim,
        bias="heads key_value" if attention.qkv_bias else "",
    )
    return output_projection(builder, attention_core(builder, query, keys, values, attention), attention)


def _add_keys_values(builder: BlockBuilder, attention: Attention) -> tuple[str, str]:
    keys = builder.add_tensor(f"{attention.prefix}keys", f"batch {attention.key} heads {attention.query_dim}")
    return keys, builder.add_tensor(f"{attention.prefix}values", f"batch {attention.key} heads {attention.value_dim}")


def _project_qkv(builder: BlockBuilder, source: str, attention: Attention) -> tuple[str, str, str]:
    query = builder.add_tensor(f"{attention.prefix}query", QUERY_DIMS)
    keys, values = _add_keys_values(builder, attention)
    linear(
        builder,
        f"{attention.prefix}qkv",
        source,
        (query, keys, values),
        "batch sequence heads qkv hidden",
        weight="hidden heads qkv",
        summed_dims="hidden",
        bias="heads qkv" if attention.qkv_bias else "",
    )
    return query, keys, values


def _rotate_queries_keys(builder: BlockBuilder, query: str, keys: str, attention: Attention) -> tuple[str, str]:
    rotated = (
        builder.add_tensor("rotated_query", QUERY_DIMS),
        builder.add_tensor("rotated_keys", f"batch {attention.key} heads {attention.query_dim}"),
    )
    builder.add_elementwise("rotary", QUERY_DIMS, (query, keys), rotated)
    return rotated


def output_projection(builder: BlockBuilder, context: str, attention: Attention) -> str:
    """Add the product of all heads' contexts with the output weight and return it."""
    out = builder.add_tensor(f"{attention.prefix}projected", TOKEN_DIMS)
    width = f"heads group {attention.value_dim}"
    linear(
        builder,
        f"{attention.prefix}projection",
        context,
        (out,),
        f"{TOKEN_DIMS} {width}",
        weight=f"{width} hidden",
        summed_dims=width,
        bias="hidden" if attention.bias else "",
    )
    return out


def attention_core(builder: BlockBuilder, query: str, keys: str, values: str, attention: Attention) -> str:
    """Add scores, softmax and the weighted sum of values, fused or not, and return the context."""
    return (_unfused_core if attention.kernel == UNFUSED else _fused_core)(builder, query, keys, values, attention)


def _fused_core(builder: BlockBuilder, query: str, keys: str, values: str, attention: Attention) -> str:
    context = builder.add_tensor(f"{attention.prefix}context", attention.context_dims)
    lse = builder.add_tensor(f"{attention.prefix}logsumexp", "batch heads group sequence", "fp32")
    dims, flops = f"batch heads group sequence {attention.key} {attention.query_dim}", 4.0
    # heads of latent attention have two widths: an operator has one iteration space, so both go into the FLOP
    if attention.query_dim != attention.value_dim:
        dims, flops = (
            _score_dims(attention),
            2.0 * (builder.dim_sizes[attention.query_dim] + builder.dim_sizes[attention.value_dim]),
        )
    builder.add_operator(
        SymbolicOperator(
            f"{attention.prefix}attention",
            OperatorKind.ATTENTION,
            dims,
            (query, keys, values),
            (context, lse),
            flops=flops * visible_share(builder.dim_sizes["sequence"], attention.window),
            saved=(query, keys, values, context, lse),
            selective=True,
            executed=0.5 if attention.causal else 1.0,
            kernel=attention.kernel,
        )
    )
    return context


def visible_share(sequence: int, window: int | None) -> float:
    """Return the fraction of a causal square of scores that a sliding window leaves.

    >>> visible_share(8, None), visible_share(8, 8), visible_share(8, 4)
    (1.0, 1.0, 0.75)
    """
    window_tokens = min(window or sequence, sequence)
    return window_tokens * (2 * sequence - window_tokens) / sequence**2


def _score_dims(attention: Attention) -> str:
    return f"batch heads group sequence {attention.key}"


def _unfused_core(builder: BlockBuilder, query: str, keys: str, values: str, attention: Attention) -> str:
    square = _score_dims(attention)
    scores = builder.add_tensor(f"{attention.prefix}scores", square)
    product, softmax = OperatorKind.BATCH_MATMUL, OperatorKind.SOFTMAX
    builder.add_operator(
        SymbolicOperator(
            f"{attention.prefix}scores",
            product,
            f"{square} {attention.query_dim}",
            (query, keys),
            (scores,),
            reduced=attention.query_dim,
            flops=2.0,
            saved=(query, keys),
            selective=True,
        )
    )
    scores = _add_position_bias(builder, scores, attention)
    probabilities = builder.add_tensor(f"{attention.prefix}probabilities", square)
    saved = (probabilities,)
    builder.add_operator(
        SymbolicOperator(
            f"{attention.prefix}softmax", softmax, square, (scores,), (probabilities,), saved=saved, selective=True
        )
    )
    weights = _drop_probabilities(builder, probabilities, attention)
    context = builder.add_tensor(f"{attention.prefix}context", attention.context_dims)
    builder.add_operator(
        SymbolicOperator(
            f"{attention.prefix}context",
            product,
            f"{square} {attention.value_dim}",
            (weights, values),
            (context,),
            reduced=attention.key,
            flops=2.0,
            saved=(weights, values),
            selective=True,
        )
    )
    return context


def _add_position_bias(builder: BlockBuilder, scores: str, attention: Attention) -> str:
    if attention.position_bias is None:
        return scores
    out = builder.add_tensor(f"{attention.prefix}biased_scores", _score_dims(attention))
    kind = OperatorKind.ELEMENTWISE
    inputs = (scores, attention.position_bias)
    builder.add_operator(
        SymbolicOperator(
            f"{attention.prefix}position_bias", kind, _score_dims(attention), inputs, (out,), selective=True
        )
    )
    return out


def _drop_probabilities(builder: BlockBuilder, probabilities: str, attention: Attention) -> str:
    if not attention.dropout:
        return probabilities
    out = builder.add_tensor(f"{attention.prefix}dropped", _score_dims(attention))
    masks = (builder.add_tensor(f"{attention.prefix}probabilities_mask", _score_dims(attention), "mask"),)
    name, kind = f"{attention.prefix}attention_dropout", OperatorKind.DROPOUT
    builder.add_operator(
        SymbolicOperator(name, kind, _score_dims(attention), (probabilities,), (out,), saved=masks, selective=True)
    )
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


def latent_attention(builder: BlockBuilder, source: str, sizes: LatentAttention, attention: Attention) -> str:
    """Add latent attention of tokens to themselves, projections included, and return its output."""
    query = _project_latent_query(builder, source, compressed=sizes.q_rank is not None)
    keys, rotary_key, values = _project_latent_keys_and_values(builder, source)
    rotated = (
        builder.add_tensor("rotated_query", "batch sequence heads group query_dim"),
        builder.add_tensor("rotated_keys", "batch key heads query_dim"),
    )
    builder.add_elementwise("rotary", "batch sequence heads group query_dim", (query, keys, rotary_key), rotated)
    return output_projection(builder, attention_core(builder, *rotated, values, attention), attention)


def _project_latent_query(builder: BlockBuilder, source: str, *, compressed: bool) -> str:
    query = builder.add_tensor("query", "batch sequence heads group query_dim")
    width = "hidden"
    if compressed:
        down = builder.add_tensor("compressed_query", "batch sequence q_rank")
        dims, weight = "batch sequence q_rank hidden", "hidden q_rank"
        linear(builder, "query_down", source, (down,), dims, weight=weight, summed_dims="hidden")
        source, width = norm(builder, "query_norm", down, bias=False, dim="q_rank"), "q_rank"
    dims, weight = f"batch sequence heads group query_dim {width}", f"{width} heads group query_dim"
    linear(builder, "query", source, (query,), dims, weight=weight, summed_dims=width)
    return query


def _project_latent_keys_and_values(builder: BlockBuilder, source: str) -> tuple[str, str, str]:
    compressed = builder.add_tensor("compressed_kv", "batch sequence kv_rank")
    rotary_key = builder.add_tensor("rotary_key", "batch sequence rope_dim")
    dims, weight = "batch sequence kv_joint hidden", "hidden kv_joint"
    linear(builder, "kv_down", source, (compressed, rotary_key), dims, weight=weight, summed_dims="hidden")
    normed = norm(builder, "kv_norm", compressed, bias=False, dim="kv_rank")
    keys = builder.add_tensor("keys", "batch key heads nope_dim")
    values = builder.add_tensor("values", "batch key heads value_dim")
    dims, weight = "batch sequence heads key_value kv_rank", "kv_rank heads key_value"
    linear(builder, "kv_up", normed, (keys, values), dims, weight=weight, summed_dims="kv_rank")
    return keys, rotary_key, values
