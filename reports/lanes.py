"""Lanes of a timeline picture: one a rank class, with a tall compute row and thin strips below it."""

from collections.abc import Sequence
from dataclasses import dataclass

from reports.bars import Row
from reports.text import plain
from simulator.program import RankClass

_STRIP, _MOST_STRIP, _LEAST_STRIP = 0.14, 14, 3  # share of a lane; pixels
_LEAST_GROUP = 14  # pixels of a lane in which shares of time can be told apart


@dataclass(frozen=True, slots=True)
class Lanes:
    """Where rows lie: lane i goes from y = i down to y = i + 1.

    Parameters
    ----------
    labels
        Names of the lanes, from the top.
    rows
        Rows that are drawn; compute first.
    pixels
        Height of a lane.
    group
        Rank classes that share a lane.
    """

    labels: tuple[str, ...]
    rows: tuple[Row, ...]
    pixels: int
    group: int = 1

    def extent(self, rank_class: int, row: Row) -> tuple[float, float]:
        """Return top and bottom of a row of the lane of ``rank_class``."""
        lane = rank_class // self.group
        compute = self.compute_pixels
        if row is Row.COMPUTE:
            return lane, lane + compute / self.pixels
        top = compute + 1 + (self.rows.index(row) - 1) * (self._strip + 1)
        return lane + top / self.pixels, lane + (top + self._strip) / self.pixels

    @property
    def compute_pixels(self) -> int:
        """How high a compute row is."""
        margin = 0 if self.pixels < 4 else max(1, self.pixels // 8)
        return self.pixels - margin - (len(self.rows) - 1) * (self._strip + 1)

    @property
    def _strip(self) -> int:
        return _strip(self.pixels)


def lanes(classes: Sequence[RankClass], rows: Sequence[Row], height: int, *, grouped: bool = False) -> Lanes:
    """Return the lanes of ``classes`` on at most ``height`` pixels.

    Strips are drawn only where they can be seen; where ``grouped``, low lanes are put together.
    """
    pixels = max(1, height // len(classes))
    group = -(-_LEAST_GROUP // pixels) if grouped and pixels < _LEAST_GROUP // 2 else 1
    count = -(-len(classes) // group)
    pixels = max(1, height // count)
    strips = sorted(set(rows) - {Row.COMPUTE}) if _strip(pixels) >= _LEAST_STRIP else []
    labels = [label(c, classes) for c in classes] if group == 1 else _group_labels(classes, group)
    return Lanes(tuple(labels), (Row.COMPUTE, *strips), pixels, group)


def _strip(pixels: int) -> int:
    return min(_MOST_STRIP, int(_STRIP * pixels))


def label(rank_class: RankClass, classes: Sequence[RankClass]) -> str:
    """Return what a lane is called: its stages and its ranks, and its name where those are not enough.

    >>> pair = (RankClass("a", (0, 8), tuple(range(192))), RankClass("b", (1, 9), (192,)))
    >>> [label(c, pair) for c in pair]
    ['stages 0, 8 (192 ranks)', 'stages 1, 9 (rank 192)']
    """
    own = _label(rank_class)
    shared = sum(_label(other) == own for other in classes) > 1
    return f"{own} {plain(rank_class.name, 12)}" if shared else own


def _label(rank_class: RankClass) -> str:
    stages, ranks = rank_class.stages, rank_class.ranks
    numbers = ", ".join(map(str, stages if len(stages) <= 3 else (stages[0], "…", stages[-1])))
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks):,} ranks"
    return f"{'stage' if len(stages) == 1 else 'stages'} {numbers} ({who})" if stages else who


def _group_labels(classes: Sequence[RankClass], group: int) -> list[str]:
    """Return names of lanes that hold ``group`` rank classes each."""
    parts = [classes[i : i + group] for i in range(0, len(classes), group)]
    return [f"stages {p[0].stages[0]} to {p[-1].stages[0]}" if p[0].stages else plain(p[0].name, 20) for p in parts]
