"""Lanes of a timeline picture: one a rank class, with a tall compute row and thin strips below it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from reports.bars import Row
from reports.text import plain
from simulator.brief import brief
from simulator.program import RankClass

_STRIP, _STRIPS = 0.14, 0.5  # of a lane: one strip, and all with the gaps between them
_MOST_STRIP, _LEAST_STRIP = 14, 3  # pixels
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

    __repr__ = brief()

    def extent(self, rank_class: int, row: Row) -> tuple[float, float]:
        """Return top and bottom of a row of the lane of ``rank_class``."""
        lane = rank_class // self.group
        compute = self.compute_pixels
        if row is Row.COMPUTE:
            return lane, lane + compute / self.pixels
        strip = _strip(self.pixels, len(self.rows) - 1)
        top = compute + 1 + (self.rows.index(row) - 1) * (strip + 1)
        return lane + top / self.pixels, lane + (top + strip) / self.pixels

    @property
    def compute_pixels(self) -> int:
        """How high a compute row is."""
        margin = 0 if self.pixels < 4 else max(1, self.pixels // 8)
        strips = len(self.rows) - 1
        return self.pixels - margin - strips * (_strip(self.pixels, strips) + 1)


def lanes(classes: Sequence[RankClass], rows: Sequence[Row], height: int, *, grouped: bool = False) -> Lanes:
    """Return the lanes of ``classes`` on at most ``height`` pixels.

    The first strips are drawn, as many as can be seen; where ``grouped``, low lanes are put together.
    """
    pixels = max(1, height // len(classes))
    group = -(-_LEAST_GROUP // pixels) if grouped and pixels < _LEAST_GROUP // 2 else 1
    count = -(-len(classes) // group)
    pixels = max(1, height // count)
    strips = sorted(set(rows) - {Row.COMPUTE})
    while strips and _strip(pixels, len(strips)) < _LEAST_STRIP:
        strips.pop()
    names = labels(classes) if group == 1 else _group_labels(classes, group)
    return Lanes(names, (Row.COMPUTE, *strips), pixels, group)


def _strip(pixels: int, strips: int) -> int:
    """Return how high each of ``strips`` strips of a lane is, in pixels."""
    return min(_MOST_STRIP, int(_STRIP * pixels), int(_STRIPS * pixels / max(strips, 1)) - 1)


def labels(classes: Sequence[RankClass]) -> tuple[str, ...]:
    """Return what lanes are called: by stages and number of ranks, or by which ranks where that is not enough.

    >>> labels((RankClass("a", (0, 8), tuple(range(192))), RankClass("b", (1, 9), (192,))))
    ('stages 0, 8 (192 ranks)', 'stages 1, 9 (rank 192)')
    >>> labels((RankClass("a", (0,), (0, 1)), RankClass("b", (0,), (2, 3)), RankClass("c", (0,), (4, 6))))
    ('stage 0 (ranks 0 to 1)', 'stage 0 (ranks 2 to 3)', 'stage 0 (2 ranks from 4)')
    """
    counted = [_label(c, _number(c)) for c in classes]
    alike = Counter(counted)
    return tuple(_label(c, _which(c)) if alike[name] > 1 else name for c, name in zip(classes, counted, strict=True))


def _label(rank_class: RankClass, who: str) -> str:
    stages = rank_class.stages
    numbers = ", ".join(map(str, stages if len(stages) <= 3 else (stages[0], "…", stages[-1])))
    return f"{'stage' if len(stages) == 1 else 'stages'} {numbers} ({who})" if stages else who


def _number(rank_class: RankClass) -> str:
    ranks = rank_class.ranks
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks):,} ranks"


def _which(rank_class: RankClass) -> str:
    """Return which ranks they are: all where they follow each other, else the first."""
    ranks = rank_class.ranks
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"{len(ranks):,} ranks from {ranks[0]}"


def _group_labels(classes: Sequence[RankClass], group: int) -> tuple[str, ...]:
    """Return names of lanes that hold ``group`` rank classes each."""
    parts = (classes[i : i + group] for i in range(0, len(classes), group))
    return tuple(
        f"stages {p[0].stages[0]} to {p[-1].stages[0]}" if p[0].stages else plain(p[0].name, 20) for p in parts
    )
