"""What a search among sums of operators' costs has proven of the one that it took."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Certificate:
    """What is known of the sum of costs behind the plans that are yielded after it.

    It is of one mesh and one size of microbatches, and says nothing of simulated times.

    Parameters
    ----------
    gap
        Fraction by which the sum may be above the least within the same bytes: 0 is proven the least, ``None`` where
        nothing is known.
    memory_price
        Seconds of a step that one byte more on every device saves, over the next bytes; ``None`` where it is not known.
    among
        Of which choices the least is meant, where these are not all.
    """

    gap: float | None
    memory_price: float | None
    among: str = ""
