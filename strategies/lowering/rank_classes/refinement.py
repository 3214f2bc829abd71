"""Colour refinement of ranks, groups and links, on arrays.

Every rank, group and link starts with a colour that says what it is. In each round a group takes in the colours of
its members and of the links it loads, and ranks and links those of their groups, as multisets, until no class splits
any more: an equitable partition. Ranks of one class then see the same groups, and links of one class carry the same
flows, so that one of each stands for all, with shared links too.

Colours are 64-bit hashes, and a multiset is the sum of its mixed members: the chance that two different multisets
get the same colour is about 2**-64 a pair.

References
----------
Weisfeiler and Leman 1968 (1-dimensional colour refinement); Berkholz, Bonsma and Grohe, "Tight
lower and upper bounds for the complexity of canonical colour refinement", 2017.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.program import IntArray

Colours = NDArray[np.uint64]
FloatArray = NDArray[np.float64]


class Groups(NamedTuple):
    """Groups of one kind: ``members[g]`` in order of rank, ``ordered`` where places differ (sender, receiver).

    ``group``, ``link`` and ``weight`` are sparse rows: the loads of a group on links, as colours. ``colour`` is the
    first colour of every group.
    """

    members: IntArray
    ordered: bool
    group: IntArray
    link: IntArray
    weight: Colours
    colour: Colours


class Partition(NamedTuple):
    """A colour of every rank, of every group of every kind, and of every link."""

    ranks: Colours
    groups: tuple[Colours, ...]
    links: Colours


def mix(values: Colours | IntArray) -> Colours:
    """Return well-spread hashes of 64-bit values by one step of splitmix64; none is 0, which a sum would not show."""
    with np.errstate(over="ignore"):
        return _mixed(values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))


def _mixed(x: Colours) -> Colours:
    """Mix values in place."""
    with np.errstate(over="ignore"):
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x ^= x >> np.uint64(shift)
            x *= np.uint64(factor)
        x ^= x >> np.uint64(31)
        return x


def combine(first: Colours, second: Colours) -> Colours:
    """Return one colour for each ordered pair of colours."""
    return joined(first, mix(second))


def joined(first: Colours, second: Colours | np.uint64) -> Colours:
    """Return one colour for each ordered pair whose second colours are mixed already."""
    with np.errstate(over="ignore"):
        pair = first * np.uint64(0x9E3779B97F4A7C15)
        pair += second
        return _mixed(pair)


def quantised(values: FloatArray) -> Colours:
    """Return colours of real numbers without their last bits, in which the order of a sum shows."""
    bits = (values + 0.0).view(np.uint64)  # without the sign of zero
    return mix((bits + np.uint64(1 << 12)) >> np.uint64(13))  # 40 of 53 significant bits, rounded


def first_equal(colours: Colours) -> IntArray:
    """Return, for every colour, the index of the first one that equals it.

    Colours are hashes: their first bits are the place in a table where each is looked up, so that no sort is needed.

    >>> first_equal(mix(np.array([7, 8, 7, 9]))).tolist()
    [0, 1, 0, 3]
    """
    bits = len(colours).bit_length() + 1
    slot = (colours >> np.uint64(64 - bits)).view(np.int64)
    table = np.empty(2**bits, dtype=np.int32)
    table[slot[::-1]] = np.arange(len(colours) - 1, -1, -1, dtype=np.int32)  # of several the first stays
    result: IntArray = table[slot].astype(np.int64)
    left = np.flatnonzero(colours[result] != colours)
    while len(left):
        at = slot[left]
        table[at[::-1]] = left[::-1]
        result[left] = table[at]
        left = left[colours[result[left]] != colours[left]]
    return result


def distinct(colours: Colours) -> int:
    """Return the number of different colours."""
    return int(np.count_nonzero(first_equal(colours) == np.arange(len(colours))))


def refine(
    ranks: Colours, kinds: Sequence[Groups], links: Colours, twins_of: Sequence[tuple[slice, slice]] = ()
) -> Partition:
    """Return the coarsest stable partition that refines the given colours.

    ``twins_of`` are pairs of link families that groups load in the very same way, a later one and an earlier one; the
    rows of ``kinds`` leave out the later ones.
    """
    twins = _Twins(kinds, links, twins_of)
    rounds = _Rounds(twins.kinds, twins.links)
    current = Partition(ranks, tuple(kind.colour for kind in kinds), twins.links)
    sizes = (0, 0)
    # Counts of classes suffice to see the end: refinement only ever splits classes.
    while True:  # where ranks and links do not split, groups do not either from then on
        current, before = rounds.next(current), sizes
        sizes = distinct(current.ranks), rounds.distinct_links(current.links)
        if sizes == before:
            found = rounds.with_all_links(current)
            return found._replace(links=joined(found.links[twins.number], links))


class _Twins:
    """Links that the same groups load in the same way, taken as one; ``number`` is the number of every link."""

    def __init__(self, kinds: Sequence[Groups], links: Colours, twins_of: Sequence[tuple[slice, slice]]) -> None:
        seen = np.zeros(len(links), dtype=np.uint64)
        for index, kind in enumerate(kinds):
            names = mix(np.arange(len(kind.members)) * len(kinds) + index)
            _scatter(seen, kind.link, joined(names[kind.group], kind.weight))
        for twin, other in twins_of:
            seen[twin] = seen[other]
        first = first_equal(seen)
        alone = first == np.arange(len(links))
        self.number = (np.cumsum(alone) - 1)[first]
        self.links = np.zeros(np.count_nonzero(alone), dtype=np.uint64)
        _scatter(self.links, self.number, mix(links))
        self.kinds = tuple(self._reduced(kind, alone) for kind in kinds)

    def _reduced(self, kind: Groups, alone: NDArray[np.bool_]) -> Groups:
        """Return groups with rows for the first link of each set of twins alone."""
        chosen = np.flatnonzero(alone[kind.link])
        return kind._replace(group=kind.group[chosen], link=self.number[kind.link[chosen]], weight=kind.weight[chosen])


class _Rounds:
    """Rounds of refinement, with everything that does not change from round to round computed once."""

    def __init__(self, kinds: tuple[Groups, ...], links: Colours) -> None:
        shared = _shared(kinds, len(links))
        self.shared = np.flatnonzero(shared)
        self.rows = [_Rows(kind, shared, links) for kind in kinds]

    def next(self, now: Partition) -> Partition:
        """Return the partition after one more round."""
        ranks, links = now.ranks.copy(), now.links.copy()
        groups = []
        for rows, colour in zip(self.rows, now.groups, strict=True):
            fresh = rows.groups(colour, now.ranks, now.links)
            groups.append(fresh)
            rows.add_to_ranks(ranks, fresh)
            rows.add_to_links(links, fresh)
        return Partition(mix(ranks), tuple(groups), mix(links))

    def distinct_links(self, links: Colours) -> int:
        """Return the number of different colours of links that several groups load."""
        return distinct(links[self.shared])

    def with_all_links(self, now: Partition) -> Partition:
        """Return the partition with up-to-date colours of the links that one group uses alone."""
        links = now.links.copy()
        for rows, colour in zip(self.rows, now.groups, strict=True):
            rows.add_to_links(links, colour, alone=True)
        return Partition(now.ranks, now.groups, links)


def _shared(kinds: Sequence[Groups], num_links: int) -> NDArray[np.bool_]:
    """Return, for every link, whether more than one group loads it."""
    result = np.zeros(num_links, dtype=bool)
    before = result.copy()
    for kind in kinds:
        least, most = np.full(num_links, len(kind.members)), np.full(num_links, -1)
        np.minimum.at(least, kind.link, kind.group)
        np.maximum.at(most, kind.link, kind.group)
        used = most >= 0
        result |= (used & (most > least)) | (used & before)
        before |= used
    return result


class _Rows:
    """The members and loads of one kind of group."""

    def __init__(self, kind: Groups, shared: NDArray[np.bool_], links: Colours) -> None:
        count, size = kind.members.shape
        self.size, self.members = size, kind.members.ravel()
        places = np.arange(size) if kind.ordered else np.zeros(size, dtype=np.int64)
        self.place = np.tile(mix(mix(places + 1)), count)
        self.group_of_member = np.repeat(np.arange(count), size)
        many = shared[kind.link]
        self.together = _Loads(kind, many, count)
        self.alone = _Loads(kind, ~many, count)
        # Colours of links that one group uses alone add nothing new in later rounds: their first ones are summed once.
        self.fixed = self.alone.by_group(links)

    def groups(self, colour: Colours, ranks: Colours, links: Colours) -> Colours:
        """Return the next colours of groups, from those of their members and of the links they load."""
        with np.errstate(over="ignore"):
            members = joined(ranks[self.members], self.place).reshape(len(colour), self.size).sum(axis=1)
            return combine(colour, members + self.fixed + self.together.by_group(links))

    def add_to_ranks(self, ranks: Colours, groups: Colours) -> None:
        """Add the colours of groups to those of their members."""
        each = joined(groups[self.group_of_member], self.place)
        _scatter(ranks, self.members, each)

    def add_to_links(self, links: Colours, groups: Colours, *, alone: bool = False) -> None:
        """Add the colours of groups to those of shared links, or of links that one group uses alone if ``private``."""
        rows = self.alone if alone else self.together
        _scatter(links, rows.link, joined(groups[rows.group], rows.weight))


class _Loads:
    """Rows of groups on links."""

    def __init__(self, kind: Groups, chosen: NDArray[np.bool_], count: int) -> None:
        self.count = count
        self.group, self.link = kind.group[chosen], kind.link[chosen]
        self.weight = kind.weight[chosen]

    def by_group(self, links: Colours) -> Colours:
        """Return, for every group, the multiset of the links it loads."""
        result = np.zeros(self.count, dtype=np.uint64)
        _scatter(result, self.group, joined(links[self.link], self.weight))
        return result


def _scatter(target: Colours, index: IntArray, values: Colours) -> None:
    """Add ``values`` to ``target`` at ``index``, modulo 2**64; an index may occur several times."""
    if len(index):
        with np.errstate(over="ignore"):
            np.add.at(target, index, values)
