"""Multi-head latent attention: keys and values are kept compressed.

References
----------
DeepSeek-AI 2024, "DeepSeek-V2", section 2.1 and appendix C.
"""

from dataclasses import dataclass

from simulator.models.attention import Attention, core, projection
from simulator.models.builder import BlockBuilder
from simulator.models.layers import linear, norm


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
    """Note latent attention of tokens to themselves, projections included, and return its output."""
    query = _query(builder, source, compressed=sizes.q_rank is not None)
    keys, rotary_key, values = _keys_and_values(builder, source)
    rotated = (
        builder.tensor("rotated_query", "batch sequence heads group query_dim"),
        builder.tensor("rotated_keys", "batch key heads query_dim"),
    )
    builder.elementwise("rotary", "batch sequence heads group query_dim", (query, keys, rotary_key), rotated)
    return projection(builder, core(builder, *rotated, values, how), how)


def _query(builder: BlockBuilder, source: str, *, compressed: bool) -> str:
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


def _keys_and_values(builder: BlockBuilder, source: str) -> tuple[str, str, str]:
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
