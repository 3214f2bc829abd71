"""The links of a cluster by number and by name."""

import re
from bisect import bisect_right
from difflib import get_close_matches
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.interconnect.parts import Parts
from simulator.interconnect.routes import FloatArray, IntArray

_NUMBER = re.compile(r"\d+")
_LARGEST = 2**31
_SHOWN = 60
"""Characters of a foreign name that a message repeats at most."""
_COMPARED = 1000
"""Names that a wrong one is compared with."""
FEW = 16
"""Links that are looked for one by one; for more all names are written out once."""

Edge = tuple[str, str, int]
"""A link of the explicit graph: from, to, and its number."""


class Family(NamedTuple):
    """Links named alike: link ``first + i`` is ``pattern`` with the labels of row ``i`` in it."""

    first: int
    pattern: str
    labels: NDArray[Any]

    @property
    def kind(self) -> str:
        """The words of the name that hold no label; ``edge`` where there are none."""
        return " ".join(word for word in self.pattern.split() if "{" not in word) or "edge"

    @property
    def has_text(self) -> bool:
        """Whether labels are names that the user gave, not numbers."""
        return self.labels.dtype == object

    def name(self, index: int) -> str:
        """Return the name of link ``first + index``."""
        return self.pattern.format(*self.labels[index])

    def nearest(self, name: str) -> int:
        """Return the index whose name is ``name``, or else one that comes near: of many by text, one of the first."""
        if self.has_text:
            names = [self.name(index) for index in range(min(len(self.labels), _COMPARED))]
            return names.index(get_close_matches(name[:_SHOWN], names, n=1, cutoff=0.0)[0])
        width = self.labels.shape[1]
        numbers = [min(int(digits[:12]), _LARGEST) for digits in _NUMBER.findall(name)[:width]]
        wanted = np.array(numbers + [0] * (width - len(numbers)))
        return int(np.abs(self.labels - wanted).sum(axis=1).argmin())


class Links:
    """Links in the order in which they were added."""

    def __init__(self) -> None:
        self._families: list[Family] = []
        self._figures: list[tuple[float | FloatArray, ...]] = []
        self._owners: list[IntArray] = []
        self._count = 0
        self._places: dict[int, dict[str, int]] = {}
        self._asked = 0

    def add(
        self,
        pattern: str,
        labels: IntArray | tuple[IntArray, ...] | tuple[tuple[str, str], ...],
        bandwidth: float | FloatArray,
        latency: float | FloatArray = 0.0,
        launch: float | FloatArray = 0.0,
        owner: IntArray | None = None,
    ) -> IntArray:
        """Return the numbers of new links, one for each row of labels.

        Labels are a column of integers, several such columns, or rows of text. ``owner`` is the part
        (`Parts`) that has each link, rising; ``None`` where they belong to none.
        """
        rows = _rows(labels)
        if len(rows):
            self._figures.append((bandwidth, latency, launch))
            self._families.append(Family(self._count, pattern, rows))
            self._owners.append(np.full(len(rows), -1) if owner is None else owner)
        self._count += len(rows)
        return np.arange(self._count - len(rows), self._count)

    def figures(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return bandwidth, latency and launch of every link."""
        found = np.empty((3, self._count))
        for family, figures in zip(self._families, self._figures, strict=True):
            for column, figure in zip(found, figures, strict=True):
                column[family.first : family.first + len(family.labels)] = figure
        bandwidth, latency, launch = found
        return bandwidth, latency, launch

    def parts(self, of_device: IntArray) -> Parts:
        """Return which of the parts that each device is in has which links."""
        return Parts(of_device, tuple(self._owners))

    def family(self, link: int) -> Family:
        """Return the family of ``link``; ``ValueError`` where there is no such link."""
        if not 0 <= link < self._count:
            raise ValueError(f"links are numbered below {self._count}, met {link}")
        return self._families[bisect_right(self._families, link, key=lambda family: family.first) - 1]

    def name(self, link: int) -> str:
        """Return the name of ``link``."""
        family = self.family(link)
        return family.name(int(link) - family.first)

    def names(self, links: IntArray) -> list[str]:
        """Return the names of many links, a family at a time."""
        found = [""] * len(links)
        for family in self._families:
            where = np.flatnonzero((links >= family.first) & (links < family.first + len(family.labels)))
            rows = family.labels[links[where] - family.first].tolist()
            for place, row in zip(where.tolist(), rows, strict=True):
                found[place] = family.pattern.format(*row)
        return found

    def _named(self, family: Family) -> dict[str, int]:
        """Return the places of links in a family by name."""
        if family.first not in self._places:
            rows = family.labels.tolist()
            self._places[family.first] = {family.pattern.format(*row): index for index, row in enumerate(rows)}
        return self._places[family.first]

    def link(self, name: str) -> int:
        """Return the number of the link called ``name``; ``ValueError`` tells the nearest name."""
        pattern = _NUMBER.sub("{}", name)
        self._asked += 1
        for family in self._families:
            if not family.has_text and family.pattern != pattern:
                continue
            if family.has_text or self._asked > FEW:
                if (place := self._named(family).get(name)) is not None:
                    return family.first + place
            else:
                index = family.nearest(name)
                if family.name(index) == name:
                    return family.first + index
        near = get_close_matches(name[:_SHOWN], [f.name(f.nearest(name)) for f in self._families], n=1, cutoff=0.0)
        raise ValueError(
            f"a link goes by the name it was built with, met {name[:_SHOWN]!r}; nearest: {' '.join(near) or 'none'}"
        )


def _rows(labels: IntArray | tuple[IntArray, ...] | tuple[tuple[str, str], ...]) -> NDArray[Any]:
    if isinstance(labels, np.ndarray):
        return labels[:, None]
    if isinstance(labels[0], np.ndarray):
        return np.stack(labels, axis=1)
    return np.array(labels, dtype=object)
