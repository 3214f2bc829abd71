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
        return _mix_in_place(values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))


def _mix_in_place(x: Colours) -> Colours:
    """Mix values in place."""
    with np.errstate(over="ignore"):
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x ^= x >> np.uint64(shift)
            x *= np.uint64(factor)
        x ^= x >> np.uint64(31)
        return x


def combine(colour: Colours, partner: Colours) -> Colours:
    """Return one colour for each ordered pair of colours."""
    return combine_mixed(colour, mix(partner))


def combine_mixed(colour: Colours, partner: Colours | np.uint64) -> Colours:
    """Return one colour for each ordered pair whose second colours are mixed already."""
    with np.errstate(over="ignore"):
        pair = colour * np.uint64(0x9E3779B97F4A7C15)
        pair += partner
        return _mix_in_place(pair)


def quantise(values: FloatArray) -> Colours:
    """Return colours of real numbers without their last bits, in which the order of a sum shows."""
    bits = (values + 0.0).view(np.uint64)  # without the sign of zero
    return mix((bits + np.uint64(1 << 12)) >> np.uint64(13))  # 40 of 53 significant bits, rounded


def find_first_equal(colours: Colours) -> IntArray:
    """Return, for every colour, the index of the first one that equals it.

    Colours are hashes: their first bits are the place in a table where each is looked up, so that no sort is needed.

    >>> find_first_equal(mix(np.array([7, 8, 7, 9]))).tolist()
    [0, 1, 0, 3]
    """
    bits = len(colours).bit_length() + 1
    slot = (colours >> np.uint64(64 - bits)).view(np.int64)
    table = np.empty(2**bits, dtype=np.int32)
    table[slot[::-1]] = np.arange(len(colours) - 1, -1, -1, dtype=np.int32)  # of several the first stays
    result: IntArray = table[slot].astype(np.int64)
    unresolved = np.flatnonzero(colours[result] != colours)
    while len(unresolved):
        probes = slot[unresolved]
        table[probes[::-1]] = unresolved[::-1]
        result[unresolved] = table[probes]
        unresolved = unresolved[colours[result[unresolved]] != colours[unresolved]]
    return result


def count_distinct(colours: Colours) -> int:
    """Return the number of different colours."""
    return int(np.count_nonzero(find_first_equal(colours) == np.arange(len(colours))))


def refine(
    ranks: Colours, kinds: Sequence[Groups], links: Colours, twins_of: Sequence[tuple[slice, slice]] = ()
) -> Partition:
    """Return the coarsest stable partition that refines the given colours.

    ``twins_of`` are pairs of link families that groups load in the very same way, a later one and an earlier one; the
    rows of ``kinds`` leave out the later ones.
    """
    twins = _Twins(kinds, links, twins_of)
    rounds = _Rounds(twins.kinds, twins.links)
    partition = Partition(ranks, tuple(kind.colour for kind in kinds), twins.links)
    sizes = (0, 0)
    # Counts of classes suffice to see the end: refinement only ever splits classes.
    while True:  # where ranks and links do not split, groups do not either from then on
        partition, previous_sizes = rounds.refine_once(partition), sizes
        sizes = count_distinct(partition.ranks), rounds.distinct_links(partition.links)
        if sizes == previous_sizes:
            full_partition = rounds.with_all_links(partition)
            return full_partition._replace(links=combine_mixed(full_partition.links[twins.number], links))


class _Twins:
    """Links that the same groups load in the same way, taken as one; ``number`` is the number of every link."""

    def __init__(self, kinds: Sequence[Groups], links: Colours, twins_of: Sequence[tuple[slice, slice]]) -> None:
        signatures = np.zeros(len(links), dtype=np.uint64)
        for index, kind in enumerate(kinds):
            names = mix(np.arange(len(kind.members)) * len(kinds) + index)
            _scatter_add(signatures, kind.link, combine_mixed(names[kind.group], kind.weight))
        for twin, original in twins_of:
            signatures[twin] = signatures[original]
        first_index = find_first_equal(signatures)
        is_first = first_index == np.arange(len(links))
        self.number = (np.cumsum(is_first) - 1)[first_index]
        self.links = np.zeros(np.count_nonzero(is_first), dtype=np.uint64)
        _scatter_add(self.links, self.number, mix(links))
        self.kinds = tuple(self._reduce_kind(kind, is_first) for kind in kinds)

    def _reduce_kind(self, kind: Groups, is_first: NDArray[np.bool_]) -> Groups:
        """Return groups with rows for the first link of each set of twins alone."""
        entries = np.flatnonzero(is_first[kind.link])
        return kind._replace(
            group=kind.group[entries], link=self.number[kind.link[entries]], weight=kind.weight[entries]
        )


class _Rounds:
    """Rounds of refinement, with everything that does not change from round to round computed once."""

    def __init__(self, kinds: tuple[Groups, ...], links: Colours) -> None:
        shared = _find_shared_links(kinds, len(links))
        self.shared = np.flatnonzero(shared)
        self.rows = [_Rows(kind, shared, links) for kind in kinds]

    def refine_once(self, partition: Partition) -> Partition:
        """Return the partition after one more round."""
        ranks, links = partition.ranks.copy(), partition.links.copy()
        groups = []
        for rows, colour in zip(self.rows, partition.groups, strict=True):
            group_colours = rows.colour_groups(colour, partition.ranks, partition.links)
            groups.append(group_colours)
            rows.add_to_ranks(ranks, group_colours)
            rows.add_to_links(links, group_colours)
        return Partition(mix(ranks), tuple(groups), mix(links))

    def distinct_links(self, links: Colours) -> int:
        """Return the number of different colours of links that several groups load."""
        return count_distinct(links[self.shared])

    def with_all_links(self, partition: Partition) -> Partition:
        """Return the partition with up-to-date colours of the links that one group uses alone."""
        links = partition.links.copy()
        for rows, colour in zip(self.rows, partition.groups, strict=True):
            rows.add_to_links(links, colour, private=True)
        return Partition(partition.ranks, partition.groups, links)


def _find_shared_links(kinds: Sequence[Groups], num_links: int) -> NDArray[np.bool_]:
    """Return, for every link, whether more than one group loads it."""
    result = np.zeros(num_links, dtype=bool)
    was_loaded = result.copy()
    for kind in kinds:
        first_group, last_group = np.full(num_links, len(kind.members)), np.full(num_links, -1)
        np.minimum.at(first_group, kind.link, kind.group)
        np.maximum.at(last_group, kind.link, kind.group)
        is_loaded = last_group >= 0
        result |= (is_loaded & (last_group > first_group)) | (is_loaded & was_loaded)
        was_loaded |= is_loaded
    return result


class _Rows:
    """The members and loads of one kind of group."""

    def __init__(self, kind: Groups, shared: NDArray[np.bool_], links: Colours) -> None:
        count, size = kind.members.shape
        self.size, self.members = size, kind.members.ravel()
        places = np.arange(size) if kind.ordered else np.zeros(size, dtype=np.int64)
        self.place = np.tile(mix(mix(places + 1)), count)
        self.group_of_member = np.repeat(np.arange(count), size)
        is_shared = shared[kind.link]
        self.shared_loads = _LinkLoads(kind, is_shared, count)
        self.private_loads = _LinkLoads(kind, ~is_shared, count)
        # Colours of links that one group uses alone add nothing new in later rounds: their first ones are summed once.
        self.private_colours = self.private_loads.sum_by_group(links)

    def colour_groups(self, colour: Colours, ranks: Colours, links: Colours) -> Colours:
        """Return the next colours of groups, from those of their members and of the links they load."""
        with np.errstate(over="ignore"):
            members = combine_mixed(ranks[self.members], self.place).reshape(len(colour), self.size).sum(axis=1)
            return combine(colour, members + self.private_colours + self.shared_loads.sum_by_group(links))

    def add_to_ranks(self, ranks: Colours, groups: Colours) -> None:
        """Add the colours of groups to those of their members."""
        contributions = combine_mixed(groups[self.group_of_member], self.place)
        _scatter_add(ranks, self.members, contributions)

    def add_to_links(self, links: Colours, groups: Colours, *, private: bool = False) -> None:
        """Add the colours of groups to those of shared links, or of links that one group uses alone if ``private``."""
        rows = self.private_loads if private else self.shared_loads
        _scatter_add(links, rows.link, combine_mixed(groups[rows.group], rows.weight))


class _LinkLoads:
    """Rows of groups on links."""

    def __init__(self, kind: Groups, is_chosen: NDArray[np.bool_], count: int) -> None:
        self.count = count
        self.group, self.link = kind.group[is_chosen], kind.link[is_chosen]
        self.weight = kind.weight[is_chosen]

    def sum_by_group(self, links: Colours) -> Colours:
        """Return, for every group, the multiset of the links it loads."""
        result = np.zeros(self.count, dtype=np.uint64)
        _scatter_add(result, self.group, combine_mixed(links[self.link], self.weight))
        return result


def _scatter_add(target: Colours, index: IntArray, values: Colours) -> None:
    """Add ``values`` to ``target`` at ``index``, modulo 2**64; an index may occur several times."""
    if len(index):
        with np.errstate(over="ignore"):
            np.add.at(target, index, values)
