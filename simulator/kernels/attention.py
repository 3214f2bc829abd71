"""Fused (flash) attention from its shape: blocks of queries on processors, and ramps along keys and head dim."""

from dataclasses import dataclass
from math import ceil

BACKWARD_PRODUCTS = 2.5
"""Backward does 5 matrix products for forward's 2 (Dao et al. 2022, "FlashAttention", section 3.1)."""


SECOND = {"flash_2": (1.0, 1.0), "flash_1": (2.0, 2.0), "flash_triton": (1.4, 2.0)}
"""How many times as long as FlashAttention-2 other fused kernels take, forward and backward (Dao 2023,
"FlashAttention-2", section 4.1, on the A100: the first one 2, that in Triton 1.3 to 1.5 and 2)."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a kernel of fused attention computes.

    Parameters
    ----------
    heads
        Query heads of all sequences together.
    queries
        Tokens of a sequence that attend.
    keys
        Tokens attended to by the last of them.
    width
        Mean of the head dims of queries and of values.
    seen
        Mean of the tokens attended to: half of ``keys`` where attention is causal.
    padded
        The wider of both head dims, to which backward pads the other (published timings of latent attention, 192 and
        128: backward is 1.2 times as slow for its FLOP as at 128 and 128, forward is not).
    """

    heads: int
    queries: int
    keys: int
    width: float
    seen: float
    padded: float

    @property
    def flops(self) -> float:
        """FLOP of the forward pass: two products."""
        return 4.0 * self.heads * self.queries * self.seen * self.width


@dataclass(frozen=True, slots=True)
class AttentionModel:
    """How near fused attention comes to the best matrix product of an accelerator.

    A processor takes ``block`` queries of one head at a time and goes through the keys they see, in
    blocks as long; ``half_sequence`` keys' time goes by before and after, and the last block of all
    waits for nobody:

    ``work = blocks * (seen + diagonal + half_sequence) / units + tail * keys``

    Parameters
    ----------
    forward, backward
        Rate over that of the best matrix product, for long sequences and wide heads. 0.75 is what
        FlashAttention-2 reaches on the A100 (Dao 2023, figures 5 and 6: 0.6 of peak, a matrix product 0.8).
    half_sequence
        Keys at which half of it is reached.
    half_head
        Head dim at which forward reaches half of it, and backward, with as many of them to more products, at 2 / 5 of
        it: exponentials take the same time for any head dim (Shah et al. 2024,
        "FlashAttention-3", section 3.1).
    tail, backward_tail
        Part of the longest block's time that nothing else runs beside; backward has two kinds of blocks to choose from.
    block
        Queries and keys of one block; 1 for none.
    launch
        Seconds besides a kernel's launch: the kernels around the main one.
    second
        How many times as long FlashAttention-2 takes, where a later kernel is the device's best.
    """

    forward: float = 0.75
    backward: float = 0.75
    half_sequence: float = 0.0
    half_head: float = 0.0
    tail: float = 0.0
    backward_tail: float = 0.0
    block: int = 1
    launch: float = 0.0
    second: float = 1.0

    def __post_init__(self) -> None:
        if min(self.forward, self.backward) <= 0:
            raise ValueError(f"attention forward and backward are positive, met {self.forward} and {self.backward}")
        if min(self.half_sequence, self.half_head, self.tail, self.backward_tail, self.launch) < 0 or self.block < 1:
            raise ValueError(f"attention half_sequence, half_head, tail, launch are not negative, met {self}")
        if self.second < 1:
            raise ValueError(f"attention second is at least 1, met {self.second}")

    def slowdown(self, kernel: str, *, backward: bool) -> float:
        """Return how many times as long a kernel takes as the device's best: one of `SECOND`, or any other name.

        >>> AttentionModel(second=1.5).slowdown("flash_triton", backward=True)
        3.0
        """
        return self.second * SECOND[kernel][backward] if kernel in SECOND else 1.0


def attention_compute_time(
    model: AttentionModel, rate: float, units: int, shape: AttentionShape, *, backward: bool = False
) -> float:
    """Return seconds of the arithmetic of fused attention.

    Parameters
    ----------
    rate
        FLOP/s of the best matrix product.
    units
        Processors that work on blocks at once; 0 where they are not known, and then nothing waits.

    >>> shape = AttentionShape(heads=10, queries=100, keys=100, width=25.0, seen=50.0, padded=25.0)
    >>> attention_compute_time(AttentionModel(forward=0.5), 1e7, 0, shape)
    1.0
    """
    rows = ceil(shape.queries / model.block) * model.block
    diagonal = (model.block - 1) / 2 if shape.seen < shape.keys else 0.0
    length = shape.heads * rows * (shape.seen + diagonal + model.half_sequence)
    length += (model.backward_tail if backward else model.tail) * shape.keys * model.block * units
    if backward:
        width = shape.padded + model.half_head / BACKWARD_PRODUCTS
        return BACKWARD_PRODUCTS * 4.0 * length * width / (rate * model.backward)
    return 4.0 * length * (shape.width + model.half_head) / (rate * model.forward)
