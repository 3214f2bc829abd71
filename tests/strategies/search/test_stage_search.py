"""Layers and recomputation of stages, by hand: no more is computed again than memory asks for."""

import numpy as np
import pytest

from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.offloading import Offloading
from meshwise.strategies.plan.recomputation import FirstLayers, PerStage, Recompute
from meshwise.strategies.search.space import Space
from meshwise.strategies.search.stage_search import (
    allows_whole_layers,
    divide_layout,
    is_dividable,
    list_recompute_choices,
    list_stage_recomputes,
    recompute_layers,
)

NONE, SELECTIVE, FULL = Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL


def test_some_layers_of_a_stage_are_its_first_and_all_are_the_stage() -> None:
    assert recompute_layers(FULL, 3, 4) == FirstLayers(FULL, 3)
    assert recompute_layers(FULL, 4, 4) == FULL
    assert recompute_layers(FULL, 0, 4) == recompute_layers(NONE, 3, 4) == NONE


def test_a_stage_that_runs_layers_again_in_two_ways_runs_all_of_them_in_the_last() -> None:
    # rows are ways, columns stages: the first stage 1 layer in one way and 2 in the other, the second none
    again = np.array([[1, 0], [2, 0]])
    assert list_stage_recomputes(np.array([4, 4]), again, (SELECTIVE, FULL)) == [FirstLayers(FULL, 3), NONE]


def test_a_plan_says_one_recomputation_where_all_stages_have_it() -> None:
    layout = Layout(pipeline=2)
    assert divide_layout(layout, [3, 5], [FULL, FULL]) == Layout(pipeline=2, stages=(3, 5), recompute=FULL)
    assert divide_layout(layout, [3, 5], [FULL, NONE]).recompute == PerStage((FULL, NONE))


@pytest.mark.parametrize(
    ("layout", "known"),
    [
        (Layout(pipeline=2, schedule="1f1b"), True),
        (Layout(pipeline=2, microbatch=(1, 2), data=2), False),
        (Layout(pipeline=2, offload=Offloading((1.0,))), False),
    ],
)
def test_what_hosts_keep_or_batches_of_several_sizes_are_not_divided(layout: Layout, known: bool) -> None:
    assert is_dividable(layout) == known


def test_a_space_limits_what_layers_do() -> None:
    assert not allows_whole_layers(Space(recompute=(FULL,))) and allows_whole_layers(Space(recompute=(NONE, FULL)))
    assert list_recompute_choices(Space(recompute=(FULL,))) == (FULL,)
    assert NONE not in list_recompute_choices(Space()) and FULL in list_recompute_choices(Space())
