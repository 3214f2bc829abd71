"""The operators of a layer that the executor computes again one by one."""

from simulator.models.attention import UNFUSED
from simulator.models.transformer import Transformer

UNFUSED_CORE = ("scores", "softmax", "context")
"""The operators of unfused attention, which run as one here."""


def recomputable(spec: Transformer) -> tuple[str, ...]:
    """Return the operators of a layer that the executor computes again one by one."""
    core = UNFUSED_CORE if spec.attention == UNFUSED else ("attention",)
    return ("input_norm", "qkv", *core, "projection", "feed_forward_norm", "up", "activation", "down")
