"""Sequences and groups of a layout, by hand."""

import pytest

from meshwise.strategies.plan.layout import DECISIONS, STEP_DECISIONS, Decision, Layout, format_numbers
from meshwise.strategies.plan.rules import need_violations


def test_ranks_of_several_sizes_have_the_sequences_of_all() -> None:
    assert Layout(data=4, microbatch=3).sequences == 12
    assert Layout(data=2, microbatch=(6, 2)).sequences == 8
    assert Layout(data=2, microbatch=(6, 2)).sequences_text == "sum(microbatch[6, 2])"
    assert Layout(data=4, microbatch=3).sequences_text == "(data(4) * microbatch(3))"


def test_states_of_all_data_ranks_are_one_group() -> None:
    assert Layout(data=8, zero=1).replica == 1
    assert Layout(data=8, zero=1, zero_shards=2).replica == 4


def test_sixteen_numbers_are_told_and_of_more_the_first_and_the_last() -> None:
    assert format_numbers(range(16)).count(",") == 15
    assert format_numbers(range(17)) == "[0, 1, 2, 3, 4, 5, 6, 7, ..., 16]"


@pytest.mark.parametrize("item", [item for item in STEP_DECISIONS if item.needs], ids=lambda item: item.name)
def test_without_what_it_needs_a_decision_has_its_default_alone(item: Decision) -> None:
    assert item.needs is not None
    name, values = item.needs
    for other in DECISIONS[name].values:
        for value in item.values:
            layout = Layout(**{name: other, item.name: value})
            violations = [violation.field for violation in need_violations(layout)]
            assert violations == ([item.name] if value != item.default and other not in values else [])


def test_ranks_that_share_sequences_sum_gradients_with_data_ranks() -> None:
    # 8 data ranks with 2 parts of each sequence: 16 ranks sum a gradient; states are shared by 4 * 2 of them
    layout = Layout(data=8, context=2, zero=1, zero_shards=4)
    assert (layout.sequence_ranks, layout.replicas, layout.shards, layout.replica) == (2, 16, 8, 2)
