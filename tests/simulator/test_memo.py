"""What is worked out once: for every object and its arguments, whatever the result is."""

import pickle

import pytest

from meshwise.simulator.memo import HashedTuple, memoise, remember_latest


class Counting:
    """Counts how often its methods work."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    @memoise
    def give(self, *values: object) -> object:
        self.calls.append(values)
        return values[0] if values else None

    @memoise
    def refuse(self, value: int) -> int:
        self.calls.append(value)
        raise ValueError(value)

    @remember_latest
    def follow(self, value: tuple[int, ...]) -> int:
        self.calls.append(value)
        return len(value)


def test_equal_arguments_are_worked_out_once_for_each_object() -> None:
    one, other = Counting(), Counting()
    assert [each.give((1, 2), 3) for each in (one, other, one) for _ in range(2)] == [(1, 2)] * 6
    assert one.calls == other.calls == [((1, 2), 3)]
    one.give((1, 2))
    assert len(one.calls) == 2


def test_no_result_is_a_result() -> None:
    counting = Counting()
    assert [counting.give() for _ in range(3)] == [None] * 3
    assert [counting.give(None) for _ in range(3)] == [None] * 3
    assert counting.calls == [(), (None,)]


def test_an_error_is_not_kept() -> None:
    counting = Counting()
    for _ in range(2):
        try:
            counting.refuse(1)
        except ValueError as error:
            assert str(error) == "1"
    assert counting.calls == [1, 1]


def test_the_latest_alone_is_remembered() -> None:
    counting, pairs = Counting(), [(1, 2), (1, 2), (3, 4), (3, 4), (1, 2)]
    for value in pairs:
        assert counting.follow(value) == 2
    assert counting.calls == [(1, 2), (3, 4), (1, 2)]
    assert Counting().follow(pairs[0]) == 2


def test_a_hashed_tuple_is_its_tuple() -> None:
    plain = (1, "a", (2.5, None))
    hashed = HashedTuple(plain)
    assert hashed == plain
    assert {plain: "found"}[hashed] == {hashed: "found"}[plain] == "found"
    assert hash(hashed) == hash(hashed) == hash(plain)
    again = pickle.loads(pickle.dumps(hashed))
    assert (type(again), again, again.__dict__) == (HashedTuple, plain, {})


def test_arguments_by_name_are_refused() -> None:
    # they would be left out of what results are kept by
    with pytest.raises(TypeError):
        Counting().refuse(value=1)
