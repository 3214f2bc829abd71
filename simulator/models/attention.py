"""Attention: projections, rotation and the core, fused (flash) or operator by operator; also latent attention.

Queries have dims ``batch sequence heads group head_dim``: ``heads`` are those of keys and
values, ``group`` the query heads that share one (grouped-query attention). Multi-head latent attention keeps keys and
values compressed [1]_.

References
----------
.. [1] DeepSeek-AI 2024, "DeepSeek-V2", section 2.1 and appendix C.
"""

from dataclasses import dataclass, replace
from functools import partial

from meshwise.simulator.machine.kernels import KERNEL_SLOWDOWNS
from meshwise.simulator.models.layers import linear, norm
from meshwise.simulator.models.model import BlockBuilder
from meshwise.simulator.operator_graph import OperatorKind

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
    def query_dims(self) -> str:
        """Dims of queries."""
        return f"batch sequence heads group {self.query_dim}"

    @property
    def key_dims(self) -> str:
        """Dims of keys."""
        return f"batch {self.key} heads {self.query_dim}"

    @property
    def context_dims(self) -> str:
        """Dims of the output of the core."""
        return f"batch sequence heads group {self.value_dim}"

    @property
    def score_dims(self) -> str:
        """Dims of scores: a number for each query head and pair of tokens."""
        return f"batch heads group sequence {self.key}"


def self_attention(builder: BlockBuilder, source: str, attention: Attention) -> str:
    """Add attention of tokens to themselves, projections included, and return its output."""
    query = builder.add_tensor(f"{attention.prefix}query", attention.query_dims)
    keys, values = _add_keys_values(builder, attention)
    bias = attention.qkv_bias
    linear(builder, f"{attention.prefix}qkv", source, (query, keys, values), "heads qkv", bias=bias)
    if attention.qk_norm:
        query = norm(builder, "query_norm", query, bias=False, dim=attention.query_dim)
        keys = norm(builder, "key_norm", keys, bias=False, dim=attention.query_dim)
    if attention.rotary:
        query, keys = _rotate(builder, (query, keys), attention)
    return _attend(builder, query, keys, values, attention)


def cross_attention(builder: BlockBuilder, source: str, memory: str, attention: Attention, memory_dim: str) -> str:
    """Add attention of ``source`` to other tokens, ``batch source memory_dim``, and return its output."""
    attention = replace(attention, key="source")
    prefix, bias = attention.prefix, attention.qkv_bias
    query = linear(builder, f"{prefix}query", source, (f"{prefix}query",), "heads group head_dim", bias=bias)
    keys, values = _add_keys_values(builder, attention)
    outputs, columns = (keys, values), "heads key_value"
    linear(builder, f"{prefix}key_value", memory, outputs, columns, memory_dim, over="batch source", bias=bias)
    return _attend(builder, query, keys, values, attention)


def _add_keys_values(builder: BlockBuilder, attention: Attention) -> tuple[str, str]:
    keys = builder.add_tensor(f"{attention.prefix}keys", attention.key_dims)
    return keys, builder.add_tensor(f"{attention.prefix}values", f"batch {attention.key} heads {attention.value_dim}")


def _rotate(builder: BlockBuilder, inputs: tuple[str, ...], attention: Attention) -> tuple[str, str]:
    """Add the rotation of queries and keys by position and return both."""
    query = builder.add_tensor("rotated_query", attention.query_dims)
    keys = builder.add_tensor("rotated_keys", attention.key_dims)
    builder.add_elementwise("rotary", attention.query_dims, inputs, (query, keys))
    return query, keys


def _attend(builder: BlockBuilder, query: str, keys: str, values: str, attention: Attention) -> str:
    """Add the core, fused or not, and the product of all heads' contexts with the output weight, and return it."""
    core = _unfused_core if attention.kernel == UNFUSED else _fused_core
    context, prefix = core(builder, query, keys, values, attention), attention.prefix
    width, outputs = f"heads group {attention.value_dim}", (f"{prefix}projected",)
    return linear(builder, f"{prefix}projection", context, outputs, "hidden", width, bias=attention.bias)


def _fused_core(builder: BlockBuilder, query: str, keys: str, values: str, attention: Attention) -> str:
    context = builder.add_tensor(f"{attention.prefix}context", attention.context_dims)
    lse = builder.add_tensor(f"{attention.prefix}logsumexp", "batch heads group sequence", "fp32")
    dims, flops = f"{attention.score_dims} {attention.query_dim}", 4.0
    # heads of latent attention have two widths: an operator has one iteration space, so both go into the FLOP
    if attention.query_dim != attention.value_dim:
        widths = builder.dim_sizes[attention.query_dim] + builder.dim_sizes[attention.value_dim]
        dims, flops = attention.score_dims, 2.0 * widths
    return builder.add_operator(
        f"{attention.prefix}attention",
        OperatorKind.ATTENTION,
        dims,
        (query, keys, values),
        (context, lse),
        flops_per_point=flops * visible_share(builder.dim_sizes["sequence"], attention.window),
        saved=(query, keys, values, context, lse),
        recompute_selectively=True,
        executed_fraction=0.5 if attention.causal else 1.0,
        kernel=attention.kernel,
    )


def visible_share(sequence: int, window: int | None) -> float:
    """Return the fraction of a causal square of scores that a sliding window leaves.

    >>> visible_share(8, None), visible_share(8, 8), visible_share(8, 4)
    (1.0, 1.0, 0.75)
    """
    window_tokens = min(window or sequence, sequence)
    return window_tokens * (2 * sequence - window_tokens) / sequence**2


def _unfused_core(builder: BlockBuilder, query: str, keys: str, values: str, attention: Attention) -> str:
    square, prefix = attention.score_dims, attention.prefix
    add, product = partial(builder.add_operator, recompute_selectively=True), OperatorKind.BATCH_MATMUL
    dim = attention.query_dim
    inputs: tuple[str, ...] = (query, keys)
    scores, dims = (f"{prefix}scores",), f"{square} {dim}"
    add(f"{prefix}scores", product, dims, inputs, scores, reduced=dim, flops_per_point=2.0, saved=inputs)
    if attention.position_bias is not None:
        inputs, scores = (*scores, attention.position_bias), (f"{prefix}biased_scores",)
        add(f"{prefix}position_bias", OperatorKind.ELEMENTWISE, square, inputs, scores)
    weights = (f"{prefix}probabilities",)
    add(f"{prefix}softmax", OperatorKind.SOFTMAX, square, scores, weights, saved=weights)
    if attention.dropout:
        inputs, weights = weights, (builder.add_tensor(f"{prefix}dropped", square),)
        mask = builder.add_tensor(f"{prefix}probabilities_mask", square, "mask")
        add(f"{prefix}attention_dropout", OperatorKind.DROPOUT, square, inputs, weights, saved=(mask,))
    context, inputs = builder.add_tensor(f"{prefix}context", attention.context_dims), (*weights, values)
    dims, dim = f"{square} {attention.value_dim}", attention.key
    add(f"{prefix}context", product, dims, inputs, (context,), reduced=dim, flops_per_point=2.0, saved=inputs)
    return context


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
    query = _project_latent_query(builder, source, attention, compressed=sizes.q_rank is not None)
    keys, rotary_key, values = _project_latent_keys_and_values(builder, source)
    return _attend(builder, *_rotate(builder, (query, keys, rotary_key), attention), values, attention)


def _project_latent_query(builder: BlockBuilder, source: str, attention: Attention, *, compressed: bool) -> str:
    query, width = builder.add_tensor("query", attention.query_dims), "hidden"
    if compressed:
        down = linear(builder, "query_down", source, ("compressed_query",), "q_rank")
        source, width = norm(builder, "query_norm", down, bias=False, dim="q_rank"), "q_rank"
    return linear(builder, "query", source, (query,), "heads group query_dim", width)


def _project_latent_keys_and_values(builder: BlockBuilder, source: str) -> tuple[str, str, str]:
    compressed = builder.add_tensor("compressed_kv", "batch sequence kv_rank")
    rotary_key = builder.add_tensor("rotary_key", "batch sequence rope_dim")
    linear(builder, "kv_down", source, (compressed, rotary_key), "kv_joint")
    normed = norm(builder, "kv_norm", compressed, bias=False, dim="kv_rank")
    keys = builder.add_tensor("keys", "batch key heads nope_dim")
    values = builder.add_tensor("values", "batch key heads value_dim")
    linear(builder, "kv_up", normed, (keys, values), "heads key_value", "kv_rank")
    return keys, rotary_key, values
