"""Parts of a cluster that links belong to: nodes, leaf switches and pods."""

from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from simulator.interconnect.routes import IntArray


class Parts:
    """Nodes, leaf switches and pods, numbered through the cluster, and the links that each has.

    Parts that are built alike have as many links of every family, in the same order.

    Parameters
    ----------
    of_device
        [levels, devices]: the node of every device, and the switches above its NIC; each level has
        higher numbers than the one before.
    owners
        For every family of links the part that has each, rising; -1 where links belong to none.
    """

    def __init__(self, of_device: IntArray, owners: tuple[IntArray, ...]) -> None:
        self.of_device, self._owners = of_device, owners
        self._starts = np.array([0, *accumulate(map(len, owners))])
        self.count = int(of_device.max()) + 1

    @cached_property
    def own_all(self) -> bool:
        """Whether every link belongs to a part."""
        return all(int(owner[0]) >= 0 for owner in self._owners)

    @cached_property
    def _owner(self) -> IntArray:
        """The part of every link."""
        return np.concatenate(self._owners)

    @cached_property
    def _first(self) -> IntArray:
        """[families, devices]: the first link of every family on the part that each device is in."""
        levels = self.of_device.min(axis=1)
        first = np.empty((len(self._owners), self.of_device.shape[1]), dtype=np.int64)
        for row, start, owner in zip(first, self._starts, self._owners, strict=False):
            counts = np.bincount(owner, minlength=self.count)
            level = np.searchsorted(levels, owner[0], side="right") - 1
            row[:] = (start + np.cumsum(counts) - counts)[self.of_device[level]]
        return first

    @property
    def families(self) -> tuple[slice, ...]:
        """The links of every family."""
        return tuple(slice(start, end) for start, end in pairwise(self._starts.tolist()))

    def owners(self, family: int) -> IntArray:
        """Return the parts of the links of a family."""
        return self._owners[family]

    def owner(self, links: IntArray) -> IntArray:
        """Return the part of each of ``links``."""
        found: IntArray = self._owner[links]
        return found

    def places(self, links: IntArray, devices: IntArray) -> tuple[IntArray, IntArray]:
        """Return the family of ``links``, and where each comes in it on its part, in which is one of ``devices``."""
        family = np.searchsorted(self._starts, links, side="right") - 1
        return family, links - self._first[family, devices]

    def links(self, family: IntArray, place: IntArray, devices: IntArray) -> IntArray:
        """Return the links that come there on the parts that other devices are in."""
        num_devices = self._first.shape[1]
        found: IntArray = self._first.ravel()[family * num_devices + devices]
        found += place
        return found
