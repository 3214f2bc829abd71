"""Rank correlation: how well a predicted order of plans agrees with the measured one."""

from collections.abc import Sequence
from math import isnan


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Kendall's tau-b [1]_: 1 for the same order, -1 for the opposite one, 0 where there is no order.

    >>> kendall_tau([(1, 1), (2, 3), (3, 2)])
    0.333333333333

    References
    ----------
    .. [1] Kendall, "The treatment of ties in ranking problems", Biometrika 33(3), 1945.
    """
    from scipy.stats import kendalltau  # takes most of a second to load, and only tables of measured plans need it

    if len(pairs) < 2:
        return 0.0
    tau = float(kendalltau(*zip(*pairs, strict=True)).statistic)
    return 0.0 if isnan(tau) else round(tau, 12)
