"""What is between the two products of a feed-forward layer."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

_GATES: dict[str, Callable[..., Tensor]] = {"swiglu": functional.silu, "geglu": functional.gelu}


def width(kind: str, ffn: int) -> int:
    """Return the width of what comes into an activation of a kind that ``ffn`` values leave.

    >>> width("gelu", 8), width("swiglu", 8)
    (8, 16)
    """
    return 2 * ffn if kind in _GATES else ffn


def activated(kind: str, wide: Tensor) -> Tensor:
    """Return the activated middle, ``(..., ffn)``; with a gate every value lies beside its own: ``[ffn, 2]``."""
    if kind not in _GATES:
        return functional.gelu(wide)
    gate, value = wide.view(*wide.shape[:-1], wide.shape[-1] // 2, 2).unbind(-1)
    return _GATES[kind](gate) * value
