"""Collectives, the algorithms that run them, and measured curves of their times."""

from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

from meshwise.simulator.brief import brief_repr


class Collective(StrEnum):
    """A communication among a group of ranks, or between two.

    In a ``shift`` every rank sends its buffer to the next rank of its group, and the last to the first. ``push_pull``
    is the all-reduce of a parameter server: all ranks push their addends to the first rank of the group and pull the
    sum.
    """

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    SEND = "send"
    SHIFT = "shift"
    PUSH_PULL = "push_pull"


class Algorithm(StrEnum):
    """The algorithm by which a group runs a collective; ``measured`` takes its time from a `CollectiveCurve`."""

    RING = "ring"
    TREE = "tree"
    HIERARCHICAL = "hierarchical"
    IN_SWITCH = "in_switch"
    PAIRWISE = "pairwise"
    DIRECT = "direct"
    PARAMETER_SERVER = "parameter_server"
    MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class CollectiveCurve:
    """Measured time of a collective on ``ranks`` ranks: ``points`` of (bytes, seconds) in order of size.

    The size of all-reduce, push-pull, all-to-all, broadcast, send and shift is the buffer of one rank; the size of
    all-gather and reduce-scatter is the full buffer, all shards together.
    """

    collective: Collective
    ranks: int
    points: tuple[tuple[float, float], ...]

    __repr__ = brief_repr()

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)) or min(t for _, t in self.points) <= 0 or sizes[0] <= 0:
            raise ValueError(f"{self.collective} over {self.ranks} ranks: sizes rise and times are positive")

    def time(self, size: float) -> float:
        """Return seconds for ``size`` bytes: linear between points, the first time below them, the last rate above."""
        points = self.points
        if size <= points[0][0]:
            return points[0][1]
        for (x0, y0), (x1, y1) in pairwise(points):
            if size <= x1:
                return y0 + (y1 - y0) * (size - x0) / (x1 - x0)
        x1, y1 = points[-1]
        x0, y0 = points[-2] if len(points) > 1 else (0.0, 0.0)
        slope = max((y1 - y0) / (x1 - x0), 0.0)
        return y1 + slope * (size - x1)

    def at_speed(self, factor: float) -> "CollectiveCurve":
        """Return the curve of a network on which every message is ``factor`` times as fast."""
        return replace(self, points=tuple((size, seconds / factor) for size, seconds in self.points))
