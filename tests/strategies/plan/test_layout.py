"""Sequences and groups of a layout, by hand."""

from meshwise.strategies.plan.layout import Layout, format_numbers


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
