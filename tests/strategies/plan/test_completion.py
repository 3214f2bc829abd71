"""From a layout to its plan and back: the layout of a plan is completed to the very same plan."""

import pytest
from hypothesis import given, settings

from meshwise.strategies.plan.completion import build_mesh, complete, layout_without_stages, recover_layout
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.mesh import DATA, PIPELINE, REPLICA, TENSOR
from meshwise.strategies.plan.rules import violations

from ..plans import Case, any_cases
from ..problems import problem


@settings(max_examples=60, deadline=None)
@given(any_cases(8))
def test_the_layout_of_a_plan_is_completed_to_it(case: Case) -> None:
    small, plan = case.build()
    again = recover_layout(small, plan)
    assert complete(small, again) == plan


def test_groups_that_share_states_are_an_axis_of_the_mesh() -> None:
    # 8 data ranks in groups of 2: 4 replicas, which lie just outside the ranks that share
    axes = [(axis.name, axis.size) for axis in build_mesh(Layout(data=8, zero=1, zero_shards=2)).axes]
    assert [each for each in axes if each[1] > 1] == [(REPLICA, 4), (DATA, 2)]
    names = [name for name, _ in axes]
    assert names.index(REPLICA) + 1 == names.index(DATA)
    assert {PIPELINE, DATA, TENSOR} <= {axis.name for axis in build_mesh(Layout()).axes}


def test_a_broken_rule_is_the_first_that_is_found() -> None:
    small, layout = problem(), Layout(data=3, zero=7)
    first = next(violations(small, layout))
    with pytest.raises(ValueError) as caught:
        complete(small, layout)
    assert str(caught.value) == f"{first.field}: {first.message}"


def test_stages_are_counted_in_layers() -> None:
    small = problem(layers=8)
    plan = complete(small, Layout(data=4, pipeline=2, stages=(3, 5)))
    assert recover_layout(small, plan).stages == (3, 5)
    assert layout_without_stages(plan).stages == "even"
    with pytest.raises(
        ValueError, match=r"hold every block of the model once, met layers\.6, which this model does not"
    ):
        recover_layout(problem(layers=6), plan)
