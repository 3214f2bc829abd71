"""Prediction intervals from errors that were met before: split conformal prediction for correlated errors.

Errors of one publisher are alike, so that a hundred of its runs say little more of the next publisher than ten do.
Errors are therefore taken by groups, and every group counts alike (CDF pooling [1]_). How far predictions are off
differs with what is known of a run: each category has an interval of its own (Mondrian conformal prediction [2]_).

The half width of a category is the ``coverage`` quantile of its errors' sizes [3]_, where an error of a group of ``n``
weighs ``1 / n`` [4]_. Of a new group exchangeable with ``k`` known ones, the expected fraction inside is then at least
``coverage * k / (k + 1)``; a promise of ``coverage`` itself needs the quantile at ``coverage * (k + 1) / k`` [5]_,
which few groups do not have. What intervals hold is therefore measured, by leaving groups out one at a time.

References
----------
.. [1] Dunn, Wasserman and Ramdas 2022, "Distribution-free prediction sets for two-layer hierarchical models", JASA
       (arXiv:1809.07441).
.. [2] Vovk, Gammerman and Shafer 2005, "Algorithmic learning in a random world", section 4.5.
.. [3] Lei, G'Sell, Rinaldo, Tibshirani and Wasserman 2018, "Distribution-free predictive inference for regression",
       JASA 113, section 2.2.
.. [4] Barber, Candes, Ramdas and Tibshirani 2023, "Conformal prediction beyond exchangeability", Annals of Statistics
       51, section 3.
.. [5] Lee, Barber and Willett 2023, "Distribution-free inference with hierarchical data" (arXiv:2306.06342).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple


class Residual(NamedTuple):
    """An error that was met: its size, the category of its run, and the group whose errors are alike."""

    size: float
    category: str
    group: str


def half_widths(residuals: Sequence[Residual], coverage: float) -> dict[str, float]:
    """Return for every category the half width of the interval that holds the fraction ``coverage`` of errors.

    Half of what follows is one group's three errors, half the other's one:

    >>> errors = [Residual(size, "all", "a") for size in (0.1, 0.2, 0.3)] + [Residual(0.4, "all", "b")]
    >>> half_widths(errors, 0.5), half_widths(errors, 0.6)
    ({'all': 0.3}, {'all': 0.4})
    """
    members: dict[str, list[Residual]] = defaultdict(list)
    for residual in residuals:
        members[residual.category].append(residual)
    return {name: _quantile(members[name], coverage) for name in sorted(members)}


def half_width(widths: Mapping[str, float], category: str) -> float:
    """Return the half width of a category; the widest there is for one of which no error was met."""
    return widths.get(category, max(widths.values()))


def left_out(groups: Iterable[str], residuals: Sequence[Residual], coverage: float) -> Iterator[tuple[int, float]]:
    """Yield the place of every error and the half width from those of the other ``groups``, one of them an error.

    Raises
    ------
    ValueError
        Where there is one group only.
    """
    places: dict[str, list[int]] = defaultdict(list)
    for place, group in enumerate(groups):
        places[group].append(place)
    if len(places) == 1:
        raise ValueError(f"leaving a group out needs two, met {next(iter(places))} alone")
    for held_out in places.values():
        apart = set(held_out)
        widths = half_widths([each for place, each in enumerate(residuals) if place not in apart], coverage)
        yield from ((place, half_width(widths, residuals[place].category)) for place in held_out)


def _quantile(residuals: Sequence[Residual], fraction: float) -> float:
    """Return the smallest size that so much of the weight is not above; every group weighs the same."""
    members = Counter(residual.group for residual in residuals)
    ordered = sorted(residuals)
    reached = 0.0
    for residual in ordered:
        reached += 1 / (members[residual.group] * len(members))
        if reached >= fraction - 1e-9:
            return residual.size
    return ordered[-1].size
