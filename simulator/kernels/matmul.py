"""A matrix product from its shape: tiles on processors, a ramp along the reduction, and a soft roofline."""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, inf

MOST_ROUNDS = 2
"""Tiles are cut into parts while those fill at most so many rounds (split-k is for few tiles)."""

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
    """How near a matrix product comes to the peak of an accelerator.

    A library cuts the result into tiles of one of the shapes ``tiles``, and the reduction of each,
    where there are few, into 2, 4 .. parts [1]_; ``units`` processors take a part each, round by round, and it runs
    the choice that ends first:

    ``compute = rounds * tile_work * (k / parts + half_k) / (peak * fraction * reuse(tile) / units)``

    The defaults are an ideal device, ``2 m n k / peak``.

    Parameters
    ----------
    fraction
        Largest part of the data-sheet peak, for the first of ``tiles`` and a long reduction.
    half_k
        Reduction length at which half of that is reached: what it costs to begin and end a tile. A tile
        in parts costs it twice, as they are added up.
    tiles
        Rows and columns of the tiles to choose from, the one of most reuse first.
    edge
        How much smaller tiles lose: a tile of ``a`` by ``b`` loads ``(a + b) / a b`` of an element for one
        multiplication, and runs at ``reuse = (1 + edge / x0) / (1 + edge / x)``, ``x = a b / (a + b)`` and ``x0``
        that of the first tile [2]_.
    units
        Processors that work on tiles at once; 0 for no tiles.
    waves
        How much the last round of tiles costs where it is not full: 1 as much as a full one, 0 its part of one.
    sharpness
        ``p`` of the soft roofline ``(compute**p + memory**p)**(1/p)``; infinite for the larger of both.
    data_gradient, weight_gradient
        Rate of the product that makes gradients of inputs, and of weights (added to a wider sum), over forward.
    batched
        Rate of a batch of products of activations, as unfused attention's, over that of one product.
    product_launch
        Seconds that each product of a group of experts takes besides: libraries launch them on several streams.
    fractions
        ``fraction`` of dtypes that differ, as ``(("fp8", 0.6),)``.

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
        """Return the largest part of the peak of ``dtype`` that is reached."""
        return dict(self.fractions).get(dtype, self.fraction)

    def with_gradient(self, rate: float) -> "MatmulModel":
        """Return this model where both gradients run at ``rate`` times the forward's."""
        return replace(self, data_gradient=rate, weight_gradient=rate)


def compute_time(model: MatmulModel, peak: float, product: Matmul, dtype: str = "") -> float:
    """Return seconds of the arithmetic of a batch of products, by the best of the model's tiles.

    >>> compute_time(MatmulModel(), 1e12, Matmul(count=1, m=1000, n=1000, k=1000))
    0.002
    """
    rate = peak * model.share(dtype)
    if not model.units:
        return 2.0 * product.count * product.m * product.n * (product.k + model.half_k) / rate
    return _tiled(model.tiles, model.edge, model.units, model.waves, model.half_k, product) / rate


@lru_cache(maxsize=65536)
def _tiled(tiles: tuple[Tile, ...], edge: float, units: int, waves: float, half_k: float, product: Matmul) -> float:
    """Return the FLOP, those of idle processors included, of the choice that ends first."""
    best, first = inf, _loads(tiles[0])
    for rows, columns in tiles:
        slower = (1.0 + edge * _loads((rows, columns))) / (1.0 + edge * first)
        work = 2.0 * rows * columns * units * slower
        count = product.count * ceil(product.m / rows) * ceil(product.n / columns)
        parts = 1
        while parts == 1 or (count * parts <= MOST_ROUNDS * units):
            full = count * parts / units
            rounds = waves * ceil(full) + (1.0 - waves) * max(full, 1.0)
            length = product.k + half_k if parts == 1 else ceil(product.k / parts) + 2.0 * half_k
            best = min(best, rounds * work * length)
            parts *= 2
    return best


def _loads(tile: Tile) -> float:
    """Return the elements that a tile loads for one multiplication."""
    rows, columns = tile
    return (rows + columns) / (rows * columns)


def soft_roofline(compute: float, memory: float, sharpness: float) -> float:
    """Return seconds of a kernel that computes and moves bytes at once: at least the longer of both.

    >>> soft_roofline(3.0, 4.0, 2.0), soft_roofline(3.0, 4.0, inf)
    (5.0, 4.0)
    """
    longer, shorter = max(compute, memory), min(compute, memory)
    if sharpness == inf or shorter <= 0:
        return longer
    return float(longer * (1.0 + (shorter / longer) ** sharpness) ** (1.0 / sharpness))
