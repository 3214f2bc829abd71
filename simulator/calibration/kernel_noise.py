"""How far publishers' kernels are from each other."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence

from simulator.calibration.kernels import FusedAttention, Product
from simulator.calibration.noise import ITSELF, Compared, Floor, Sizes, Times, floor, repeats
from simulator.calibration.rows import SIXTEEN_BITS, Row


def kernel_floors(
    left_out: Sequence[Row], others: Iterable[Row], predicted: Callable[[Row], float] | None = None
) -> list[Floor]:
    """Return how far the rows of one publisher and accelerator are from those of each other, and from themselves.

    Parameters
    ----------
    predicted
        Seconds that the model without the publisher predicts for a row.
    """
    first = left_out[0]
    publishers: dict[str, list[Row]] = defaultdict(list)
    for row in others:
        if row.device == first.device and row.publisher != first.publisher:
            publishers[row.publisher].append(row)
    found = []
    for other, rows in sorted(publishers.items()):
        times = Times((*what(row), row.seconds) for row in rows)
        groups: dict[str, list[Compared]] = defaultdict(list)
        for row in left_out:
            compared = times.compared(*what(row), row.seconds, predicted(row) if predicted else None)
            if compared is not None:
                groups[group(row)].append(compared)
        found += [floor(first.device, name, first.publisher, other, each) for name, each in sorted(groups.items())]
    return found + _own(left_out)


def _own(rows: Sequence[Row]) -> list[Floor]:
    """Return how far a publisher is from itself, where it timed a kernel more than once."""
    groups: dict[str, list[tuple[Hashable, Sizes, float]]] = defaultdict(list)
    for row in rows:
        groups[group(row)].append((*what(row), row.seconds))
    several = {name: repeats(each) for name, each in sorted(groups.items())}
    first = rows[0]
    return [floor(first.device, name, first.publisher, ITSELF, each) for name, each in several.items() if each]


def group(row: Row) -> str:
    """Return what a row's kernel is reported among."""
    kernel = row.kernel
    if isinstance(kernel, FusedAttention):
        return "attention"
    if not isinstance(kernel, Product):
        return "memory-bound"
    if kernel.grouped:
        return "experts"
    return "products" if kernel.dtype in SIXTEEN_BITS else f"products {kernel.dtype}"


def what(row: Row) -> tuple[Hashable, Sizes]:
    """Return what no size can stand in for, and the sizes."""
    kernel = row.kernel
    if isinstance(kernel, Product):
        dtype = "16 bits" if kernel.dtype in SIXTEEN_BITS else kernel.dtype
        product = kernel.matmul
        return (kernel.grouped, kernel.gradient, dtype), (product.count, product.m, product.n, product.k)
    if isinstance(kernel, FusedAttention):
        shape = kernel.shape
        mask = shape.seen / shape.keys
        return (kernel.passes, mask, shape.queries / shape.keys), (shape.heads, shape.keys, shape.width, shape.padded)
    return (kernel.name, row.bandwidth), (kernel.traffic,)
