"""The feed-forward layer of a transformer, plain or gated."""

from simulator.models.builder import BlockBuilder
from simulator.models.layers import TOKENS, linear

GATED = ("swiglu", "geglu")
"""Kinds with two matrices into the wide layer, of which one gates the other (Shazeer 2020)."""


def feed_forward(builder: BlockBuilder, source: str, *, gated: bool, bias: bool, prefix: str = "") -> str:
    """Note a feed-forward layer of width ``ffn`` and return its output; backward of the activation reads its input."""
    width = "ffn gate" if gated else "ffn"
    dims = f"batch sequence {width}"
    wide = builder.tensor(f"{prefix}wide", dims)
    linear(
        builder,
        f"{prefix}up",
        source,
        (wide,),
        f"{dims} hidden",
        weight=f"hidden {width}",
        reduced="hidden",
        bias=width if bias else "",
    )
    active = builder.tensor(f"{prefix}active", "batch sequence ffn")
    builder.elementwise(f"{prefix}activation", dims, (wide,), (active,), saved=(wide,))
    narrow = builder.tensor(f"{prefix}narrow", TOKENS)
    linear(
        builder,
        f"{prefix}down",
        active,
        (narrow,),
        f"{TOKENS} ffn",
        weight="ffn hidden",
        reduced="ffn",
        bias="hidden" if bias else "",
    )
    return narrow
