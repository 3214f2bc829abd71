"""Numbers for values: equal ones have one, whether they are known by identity or not."""

from hypothesis import given
from hypothesis import strategies as st

from meshwise.strategies.lowering.rank_classes import numbers
from meshwise.strategies.lowering.rank_classes.numbers import Numbers


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30))
def test_numbers_are_places_in_the_order_of_first_appearance(values: list[tuple[int, bool]]) -> None:
    found = Numbers[tuple[int, ...]]()
    order: list[tuple[int, ...]] = []
    for value, same in values:
        made = (value, value)  # equal to others, and a new object
        if made not in order:
            order.append(made)
        assert (found.number_identical if same else found.number)(made) == order.index(made)


def test_objects_that_are_forgotten_keep_their_numbers(monkeypatch) -> None:
    monkeypatch.setattr(numbers, "_MAX_KNOWN", 2)
    found, objects = Numbers[tuple[int, ...]](), [(n, n) for n in range(5)]
    assert [found.number_identical(each) for each in objects * 2] == [0, 1, 2, 3, 4] * 2
    assert len(found._by_identity) <= 2
