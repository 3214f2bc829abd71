"""Entries of a field map say a field in a trainer's words and read it back, or say why they cannot."""

from typing import Any

import pytest

from meshwise.scenarios.interchange.entry import (
    AnyOf,
    Entry,
    Reason,
    UnsayableError,
    count_microbatches,
    find_microbatch,
    fix_field,
    map_count,
    map_word,
    require_key,
)


class Stated:
    """What a file states, in the place of one that is read."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def count(self, key: str, default: int | None) -> Any:
        return self.values.get(key, default)

    def word(self, key: str, words: tuple[Any, ...], default: Any = None) -> Any:
        met = self.values.get(key, default)
        assert met in words
        return met


def reasons(entry: Any, **facts: Any) -> tuple[Reason, ...]:
    with pytest.raises(UnsayableError) as caught:
        entry.say(facts)
    return caught.value.reasons


@pytest.mark.parametrize("value", [1, 4])
def test_a_count_is_left_out_where_it_is_the_default(value: int) -> None:
    entry = map_count("tp", "tensor", default=1)
    assert entry.say({"tensor": value}) == ({} if value == 1 else {"tp": value})
    assert entry.read(Stated(entry.say({"tensor": value}))) == {"tensor": value}
    assert str(reasons(entry, tensor=(1, 2))[0]).startswith("tensor: one number (tp), met ")


def test_a_word_of_two_values_is_read_as_either() -> None:
    entry = map_word("kind", "attention", (("ring", "p2p"), ("ulysses", "a2a"), ("all_gather", "p2p")))
    assert entry.say({"attention": "all_gather"}) == {"kind": "p2p"}
    assert entry.read(Stated({"kind": "a2a"})) == {"attention": "ulysses"}
    assert entry.read(Stated({"kind": "p2p"})) == {"attention": AnyOf(("ring", "all_gather"))}
    assert [reason.field for reason in reasons(entry, attention="none")] == ["attention"]


def test_a_word_that_is_true_is_not_the_number_one() -> None:
    entry = map_word("flag", "on", ((False, 1), (True, True)))
    assert entry.read(Stated({"flag": True})) == {"on": True}
    assert entry.read(Stated({"flag": 1})) == {"on": False}


def test_what_a_target_always_does_is_read_from_any_file_and_said_of_nothing_else() -> None:
    entry = fix_field("plan.tensor_rows", 1, "its tensor parallelism has one axis")
    assert entry.read(Stated({})) == {"plan.tensor_rows": 1} and entry.say({"plan.tensor_rows": 1}) == {}
    [reason] = reasons(entry, **{"plan.tensor_rows": 2})
    assert str(reason) == "plan.tensor_rows: 1 alone, its tensor parallelism has one axis, met 2"


def test_what_is_elsewhere_is_not_asked_and_what_is_needed_is_written() -> None:
    assert Entry((), ("model.name",)).say({}) == {} == Entry((), ("model.name",)).read(Stated({"name": 1}))
    assert require_key("backend", "nccl").say({}) == {"backend": "nccl"}
    with pytest.raises(AssertionError):
        require_key("backend", "nccl", is_fixed=True).read(Stated({"backend": "gloo"}))


def test_microbatches_of_a_step_are_the_batch_over_ranks_and_size() -> None:
    facts = {"training.global_batch": 64, "plan.data": 4, "plan.microbatch": 2}
    assert count_microbatches(facts) == 8 and find_microbatch(facts) == 2
    with pytest.raises(UnsayableError, match="the same size on all data ranks"):
        find_microbatch({"plan.microbatch": (2, 1)})
