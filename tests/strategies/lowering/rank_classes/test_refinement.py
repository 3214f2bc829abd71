"""Colour refinement on arrays finds the same partition as refinement by the book."""

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.strategies.lowering.rank_classes.refinement import Groups, find_first_equal, mix, quantise, refine


@st.composite
def kinds_of_groups(draw: st.DrawFn) -> tuple[int, int, list[Groups]]:
    """Return ranks, links and kinds of groups: each kind cuts the ranks into groups of one size."""
    size = draw(st.sampled_from([1, 2, 3]))
    num_ranks, num_links = size * draw(st.integers(1, 4)), draw(st.integers(1, 5))
    kinds = []
    for number in range(draw(st.integers(1, 3))):
        each = size if draw(st.booleans()) else 1
        members = np.array(draw(st.permutations(range(num_ranks)))).reshape(-1, each)
        pairs = draw(st.sets(st.tuples(st.integers(0, len(members) - 1), st.integers(0, num_links - 1)), max_size=6))
        rows = np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)
        weights = np.array(draw(st.lists(st.integers(1, 2), min_size=len(rows), max_size=len(rows))), dtype=np.int64)
        colour = np.full(len(members), number, dtype=np.uint64)
        kinds.append(Groups(members, draw(st.booleans()), rows[:, 0], rows[:, 1], mix(weights), colour))
    return num_ranks, num_links, kinds


def by_the_book(ranks: list[Hashable], links: list[Hashable], kinds: Sequence[Groups]) -> list[list[Hashable]]:
    """Return stable colours of ranks, links and the groups of every kind, by multisets of colours."""
    colours = [ranks, links, *([kind.colour[0].item()] * len(kind.members) for kind in kinds)]
    while True:
        fresh = [
            list(map(numbered(refined(colours, kinds)[part]).__getitem__, range(len(colours[part]))))
            for part in range(len(colours))
        ]
        if [len(set(part)) for part in fresh] == [len(set(part)) for part in colours]:
            return colours
        colours = fresh


def refined(colours: list[list[Hashable]], kinds: Sequence[Groups]) -> list[list[Hashable]]:
    """Return every colour together with the multiset of its neighbours' colours."""
    around: list[list[Counter[Hashable]]] = [[Counter() for _ in part] for part in colours]
    for number, kind in enumerate(kinds, start=2):
        for group, row in enumerate(kind.members.tolist()):
            for place, rank in enumerate(row):
                where = place if kind.ordered else 0
                around[number][group]["rank", where, colours[0][rank]] += 1
                around[0][rank]["group", number, where, colours[number][group]] += 1
        for group, link, weight in zip(kind.group.tolist(), kind.link.tolist(), kind.weight.tolist(), strict=True):
            around[number][group]["link", weight, colours[1][link]] += 1
            around[1][link]["group", number, weight, colours[number][group]] += 1
    return [
        [(colour, frozenset(found.items())) for colour, found in zip(part, places, strict=True)]
        for part, places in zip(colours, around, strict=True)
    ]


def numbered(values: Sequence[Hashable]) -> list[int]:
    """Return equal values as equal numbers, in order of appearance."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]


@given(kinds_of_groups(), st.data())
@settings(max_examples=1000, deadline=None)
def test_refinement_is_that_of_the_book(case: tuple[int, int, list[Groups]], data: st.DataObject) -> None:
    num_ranks, num_links, kinds = case
    ranks = data.draw(st.lists(st.integers(0, 1), min_size=num_ranks, max_size=num_ranks))
    links = data.draw(st.lists(st.integers(0, 1), min_size=num_links, max_size=num_links))
    found = refine(mix(np.array(ranks)), kinds, mix(np.array(links)))
    expected = by_the_book(list(ranks), list(links), kinds)
    parts = (found.ranks, found.links, *found.groups)
    for part, wanted in zip(parts, expected, strict=True):
        assert numbered(part.tolist()) == numbered(wanted)


def test_a_straggler_splits_exactly_those_who_wait_for_it() -> None:
    # 2 pipelines of 2 stages; ranks 0 1 are stage 0, ranks 2 3 stage 1; data groups (0, 1) and (2, 3)
    none = np.empty(0, dtype=np.int64)
    data = Groups(np.array([[0, 1], [2, 3]]), False, none, none, none.astype(np.uint64), np.zeros(2, dtype=np.uint64))
    sends = Groups(np.array([[0, 2], [1, 3]]), True, none, none, none.astype(np.uint64), np.ones(2, dtype=np.uint64))
    alike = refine(mix(np.array([0, 0, 1, 1])), [data, sends], np.empty(0, dtype=np.uint64))
    assert numbered(alike.ranks.tolist()) == [0, 0, 1, 1]
    slow = refine(mix(np.array([2, 0, 1, 1])), [data, sends], np.empty(0, dtype=np.uint64))
    assert numbered(slow.ranks.tolist()) == [0, 1, 2, 3]


@given(st.lists(st.integers(0, 20), max_size=60), st.sampled_from([0, 1, 60]))
def test_first_equal_is_the_first_index_of_a_value(values: list[int], shift: int) -> None:
    colours = np.array(values, dtype=np.uint64) << np.uint64(shift)  # shifted by 0 all look in one place of the table
    expected = [values.index(value) for value in values] if shift < 60 else None
    found = find_first_equal(colours).tolist()
    assert found == (expected or [colours.tolist().index(value) for value in colours.tolist()])


def test_quantised_tells_what_differs_beyond_the_last_bits() -> None:
    values = np.array([1.0, 1.0 + 2.0**-50, 1.0 + 2.0**-36, 0.0, -0.0, 2.0])
    assert numbered(quantise(values).tolist()) == [0, 0, 1, 2, 2, 3]


def test_how_many_links_a_group_loads_tells_it_from_others() -> None:
    # two groups of one rank; the first loads two links, the second one: nothing but the number differs
    weight = mix(np.zeros(3, dtype=np.int64))
    group, link = np.array([0, 0, 1]), np.array([0, 1, 2])
    kind = Groups(np.array([[0], [1]]), False, group, link, weight, np.zeros(2, dtype=np.uint64))
    found = refine(mix(np.zeros(2, dtype=np.int64)), [kind], mix(np.zeros(3, dtype=np.int64)))
    assert numbered(found.ranks.tolist()) == [0, 1]
    assert numbered(found.links.tolist()) == [0, 0, 1]
