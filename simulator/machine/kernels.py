"""Time of kernels from their shapes: matrix products, fused attention, and kernels bound by memory.

A matrix product has tiles on processors, a ramp along the reduction, and a soft roofline. Fused (flash) attention has
blocks of queries on processors, and ramps along keys and head dim. Norms, softmax, elementwise operators, dropout,
look-ups, losses, optimizers and casts are bound by memory.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, inf

MAX_ROUNDS = 2
"""Rounds of processors up to which tiles are cut into more parts: split-k is for few tiles."""

Tile = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Matmul:
    """A batch of ``count`` products of an [m, k] and a [k, n] matrix."""

    count: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        """FLOP of the batch."""
        return 2.0 * self.count * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class MatmulModel:
    """Rate of matrix products on an accelerator.

    A library cuts the result into tiles of one of the shapes ``tiles`` and, if tiles are few, the reduction of each
    into 2, 4 .. parts [1]_; ``units`` processors take a part each, round by round. The library runs the choice that
    ends first:

    ``compute = rounds * tile_work * (k / parts + half_k) / (peak * fraction * reuse(tile) / units)``

    The defaults are an ideal device, ``2 m n k / peak``.

    Parameters
    ----------
    fraction
        Largest fraction of the data-sheet peak, for the first of ``tiles`` and a long reduction.
    half_k
        Reduction length at which half of that is reached: the cost to begin and end a tile. A tile in parts costs it
        twice, as its parts are added up.
    tiles
        Rows and columns of the tiles to choose from, the one with the most reuse first.
    edge
        Loss of smaller tiles: a tile of ``a`` by ``b`` loads ``(a + b) / a b`` of an element for one multiplication,
        and runs at ``reuse = (1 + edge / x0) / (1 + edge / x)`` with ``x = a b / (a + b)``, and ``x0`` the ``x`` of
        the first tile [2]_.
    units
        Processors that work on tiles at once; 0 for no tiles.
    waves
        Cost of a last round that is not full: 1 for the cost of a full round, 0 for its share of one.
    sharpness
        ``p`` of the soft roofline ``(compute**p + memory**p)**(1/p)``; infinite for the larger of both.
    data_gradient, weight_gradient
        Rate of the product for the gradients of inputs, and of weights (added to a wider sum), over that of forward.
    batched
        Rate of a batch of products of activations, as in unfused attention, over that of one product.
    product_launch
        Extra seconds for each product of a group of experts: libraries launch them on several streams.
    fractions
        ``fraction`` of dtypes for which it differs, as ``(("fp8", 0.6),)``.

    References
    ----------
    .. [1] Osama et al., "Stream-K: work-centric parallel decomposition for dense matrix-matrix multiplication on
       the GPU", PPoPP 2023, sections 2 and 3.2 (tile quantisation, fixed-split).
    .. [2] NVIDIA, "Matrix multiplication background user's guide", sections 2 to 4 (arithmetic intensity, tile
       and wave quantisation).
    """

    fraction: float = 1.0
    half_k: float = 0.0
    tiles: tuple[Tile, ...] = ((1, 1),)
    edge: float = 0.0
    units: int = 0
    waves: float = 1.0
    sharpness: float = inf
    data_gradient: float = 1.0
    weight_gradient: float = 1.0
    batched: float = 1.0
    product_launch: float = 0.0
    fractions: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        shares = self.fraction, *(share for _, share in self.fractions)
        if not all(0 < share <= 1 for share in shares):
            raise ValueError(f"matmul fraction lies in (0, 1], met {min(shares)} to {max(shares)}")
        for name in ("data_gradient", "weight_gradient", "batched"):
            if not 0 < getattr(self, name) <= 2:
                raise ValueError(f"matmul {name} lies in (0, 2], met {getattr(self, name)}")
        if (
            min(self.half_k, self.units, self.edge, self.product_launch) < 0
            or not self.tiles
            or min(map(min, self.tiles)) < 1
        ):
            raise ValueError(f"matmul half_k, edge, units and tiles are not negative, met {self}")
        if not 0 <= self.waves <= 1 or self.sharpness < 1:
            raise ValueError(f"matmul waves lie in [0, 1] and sharpness is at least 1, met {self}")

    def share(self, dtype: str) -> float:
        """Return the largest fraction of the peak of ``dtype`` that products reach."""
        return dict(self.fractions).get(dtype, self.fraction)

    def with_gradient(self, rate: float) -> "MatmulModel":
        """Return this model with both gradients at ``rate`` times the rate of forward."""
        return replace(self, data_gradient=rate, weight_gradient=rate)


def compute_time(model: MatmulModel, peak: float, product: Matmul, dtype: str = "") -> float:
    """Return seconds of the arithmetic of a batch of products with the best of the model's tiles.

    >>> compute_time(MatmulModel(), 1e12, Matmul(count=1, m=1000, n=1000, k=1000))
    0.002
    """
    rate = peak * model.share(dtype)
    if not model.units:
        return 2.0 * product.count * product.m * product.n * (product.k + model.half_k) / rate
    return _tiled_work(model.tiles, model.edge, model.units, model.waves, model.half_k, product) / rate


@lru_cache(maxsize=65536)
def _tiled_work(
    tiles: tuple[Tile, ...], edge: float, units: int, waves: float, half_k: float, product: Matmul
) -> float:
    """Return the FLOP of the choice of tiles and parts that ends first, with the FLOP that idle processors lose."""
    best_work, first_loads = inf, _element_loads(tiles[0])
    for rows, columns in tiles:
        slowdown = (1.0 + edge * _element_loads((rows, columns))) / (1.0 + edge * first_loads)
        work = 2.0 * rows * columns * units * slowdown
        count = product.count * ceil(product.m / rows) * ceil(product.n / columns)
        parts = 1
        while parts == 1 or (count * parts <= MAX_ROUNDS * units):
            exact_rounds = count * parts / units
            rounds = waves * ceil(exact_rounds) + (1.0 - waves) * max(exact_rounds, 1.0)
            length = product.k + half_k if parts == 1 else ceil(product.k / parts) + 2.0 * half_k
            best_work = min(best_work, rounds * work * length)
            parts *= 2
    return best_work


def _element_loads(tile: Tile) -> float:
    """Return the number of elements that a tile loads for one multiplication."""
    rows, columns = tile
    return (rows + columns) / (rows * columns)


def soft_roofline(compute: float, memory: float, sharpness: float) -> float:
    """Return seconds of a kernel that computes and moves bytes at the same time: at least the longer of both times.

    >>> soft_roofline(3.0, 4.0, 2.0), soft_roofline(3.0, 4.0, inf)
    (5.0, 4.0)
    """
    # Powers of the ratio and not of the times, which may be too small for a power.
    long_time, short_time = max(compute, memory), min(compute, memory)
    if sharpness == inf or short_time <= 0:
        return long_time
    return float(long_time * (1.0 + (short_time / long_time) ** sharpness) ** (1.0 / sharpness))


BACKWARD_PRODUCTS = 2.5
"""Products of backward over those of forward, 5 to 2 (Dao et al. 2022, "FlashAttention", section 3.1)."""


KERNEL_SLOWDOWNS = {"flash_2": (1.0, 1.0), "flash_1": (2.0, 2.0), "flash_triton": (1.4, 2.0)}
"""Time of fused kernels over that of FlashAttention-2, forward and backward (Dao 2023, "FlashAttention-2", section 4.1,
on the A100: 2 for FlashAttention, 1.3 to 1.5 and 2 for its implementation in Triton)."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of a kernel of fused attention.

    Parameters
    ----------
    heads
        Query heads of all sequences together.
    queries
        Query tokens of a sequence.
    keys
        Keys that the last query attends to.
    width
        Mean of the head dims of queries and of values.
    mean_keys
        Keys that a query attends to, as a mean over queries: half of ``keys`` if attention is causal.
    padded_width
        The larger of both head dims, to which backward pads the other (published timings of latent attention, 192 and
        128: backward is 1.2 times as slow for its FLOP as at 128 and 128, forward is not).
    """

    heads: int
    queries: int
    keys: int
    width: float
    mean_keys: float
    padded_width: float

    @property
    def flops(self) -> float:
        """FLOP of the forward pass: two products."""
        return 4.0 * self.heads * self.queries * self.mean_keys * self.width


@dataclass(frozen=True, slots=True)
class AttentionModel:
    """Rate of fused attention relative to the best matrix product of an accelerator.

    A processor takes ``block`` queries of one head at a time and goes through their keys in blocks of the same length.
    To begin and end a block costs the time of ``half_sequence`` keys, and nothing overlaps the very last block:

    ``work = blocks * (mean_keys + diagonal + half_sequence) / units + tail * keys``

    Parameters
    ----------
    forward, backward
        Rate over that of the best matrix product, for long sequences and wide heads. FlashAttention-2 reaches 0.75 on
        the A100 (Dao 2023, figures 5 and 6: 0.6 of peak, a matrix product 0.8).
    half_sequence
        Number of keys at which half of that rate is reached.
    half_head
        Head dim at which forward reaches half of that rate. Backward, with as many exponentials for more products,
        reaches half of its own at 2 / 5 of it: exponentials take the same time for any head dim (Shah et al. 2024,
        "FlashAttention-3", section 3.1).
    tail, backward_tail
        Fraction of the longest block's time that nothing overlaps; backward has two kinds of blocks to choose from.
    block
        Queries and keys of one block; 1 for no blocks.
    launch
        Seconds of the kernels around the main one, besides its launch.
    second
        Time of FlashAttention-2 over that of the best kernel, on devices for which a later kernel is the best.
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
        """Return the time of a kernel over that of the device's best: 1 for names that `KERNEL_SLOWDOWNS` has not.

        >>> AttentionModel(second=1.5).slowdown("flash_triton", backward=True)
        3.0
        """
        return self.second * KERNEL_SLOWDOWNS[kernel][backward] if kernel in KERNEL_SLOWDOWNS else 1.0


def attention_compute_time(
    model: AttentionModel, rate: float, units: int, shape: AttentionShape, *, backward: bool = False
) -> float:
    """Return seconds of the arithmetic of fused attention.

    Parameters
    ----------
    rate
        FLOP/s of the best matrix product.
    units
        Processors that work on blocks at once; 0 if unknown, in which case the last block costs nothing extra.

    >>> shape = AttentionShape(heads=10, queries=100, keys=100, width=25.0, mean_keys=50.0, padded_width=25.0)
    >>> attention_compute_time(AttentionModel(forward=0.5), 1e7, 0, shape)
    1.0
    """
    rows = ceil(shape.queries / model.block) * model.block
    # A block that a causal mask cuts is computed in full: half a block more than the mean of keys.
    diagonal = (model.block - 1) / 2 if shape.mean_keys < shape.keys else 0.0
    length = shape.heads * rows * (shape.mean_keys + diagonal + model.half_sequence)
    length += (model.backward_tail if backward else model.tail) * shape.keys * model.block * units
    if backward:
        width = shape.padded_width + model.half_head / BACKWARD_PRODUCTS
        return BACKWARD_PRODUCTS * 4.0 * length * width / (rate * model.backward)
    return 4.0 * length * (shape.width + model.half_head) / (rate * model.forward)


def streaming_time(traffic: float, bandwidth: float, launch: float = 0.0) -> float:
    """Return seconds of a kernel that reads and writes ``traffic`` bytes, each tensor once.

    A kernel of ``launch * bandwidth`` bytes reaches half of ``bandwidth``, so that small kernels need no other ramp
    (published RMSNorm of the A100: 4 us at 1 MB, 52 us at 34 MB, 195 us at 134 MB).

    >>> streaming_time(2e9, 1e12, launch=1e-6)
    0.002001
    """
    return launch + traffic / bandwidth
