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
        """Return the index whose name is ``name``, or else one that comes near."""
        if self.has_text:
            names = [self.name(index) for index in range(len(self.labels))]
            return names.index(get_close_matches(name, names, n=1, cutoff=0.0)[0])
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

    def link(self, name: str) -> int:
        """Return the number of the link called ``name``; ``ValueError`` tells the nearest name."""
        pattern = _NUMBER.sub("{}", name)
        for family in self._families:
            if family.has_text or family.pattern == pattern:
                index = family.nearest(name)
                if family.name(index) == name:
                    return family.first + index
        near = get_close_matches(name, [f.name(f.nearest(name)) for f in self._families], n=1, cutoff=0.0)
        raise ValueError(
            f"a link goes by the name it was built with, met {name!r}; nearest: {' '.join(near) or 'none'}"
        )


def _rows(labels: IntArray | tuple[IntArray, ...] | tuple[tuple[str, str], ...]) -> NDArray[Any]:
    if isinstance(labels, np.ndarray):
        return labels[:, None]
    if isinstance(labels[0], np.ndarray):
        return np.stack(labels, axis=1)
    return np.array(labels, dtype=object)
