"""What people set today is in the space that a search has when nothing limits it, and is told of in words."""

import pytest

from meshwise.strategies.plan.partition import partition_layers
from meshwise.strategies.plan.recomputation import Recompute, find_stage_recompute
from meshwise.strategies.search.algorithms import ALGORITHMS
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import CORE, Space, count_layouts, layouts, limit_space, scope_of

from ..problems import problem

SEVEN = problem(nodes=2, devices=2, layers=7, batch=8)
"""Seven layers on two nodes of two devices."""


def test_a_scope_says_what_was_tried_and_what_not() -> None:
    scope = scope_of(SEVEN, Space(zero=(0, 1)))
    assert scope.plans == count_layouts(SEVEN, Space(zero=(0, 1))) == len(list(layouts(SEVEN, Space(zero=(0, 1)))))
    assert scope.tried[0] == "data x tensor x pipeline" and "ZeRO 0 and 1 over all or a node" in scope.tried
    assert scope.left_out[0] == "what the limits of zero forbid" and "offload" in scope.left_out
    assert str(scope).startswith(f"{scope.plans:,} plans: data x tensor x pipeline; ")
    assert any("3-D" in words for words in scope_of(SEVEN, CORE).left_out)


def test_an_algorithm_that_lists_all_plans_is_given_the_core_of_a_large_space() -> None:
    number = count_layouts(SEVEN, Space())
    assert limit_space(SEVEN, Space(), number) == Space()
    assert limit_space(SEVEN, Space(tensor=(1, 2)), 1) == Space(core=True, tensor=(1, 2))


@pytest.mark.parametrize("algorithm", ["auto", "best_first", "inter_stage_milp", "layer_dp", "pipeline_dp"])
def test_limits_of_recomputation_and_stages_hold_whatever_divides_stages(algorithm: str) -> None:
    small = problem(devices=4, layers=6)
    space = Space(recompute=(Recompute.FULL,), stages=("balanced",), pipeline=(4,))
    best = search(ALGORITHMS[algorithm](), small, space, budget=40).best
    assert best is not None
    plan = best.plan
    assert {find_stage_recompute(plan.recompute, stage) for stage in range(len(plan.stages))} == {Recompute.FULL}
    assert plan.stages == partition_layers(small.graph, len(plan.stages), "balanced")


def test_a_scope_tells_of_every_kind_of_family() -> None:
    # states are over all ranks in some families, and over those of a node in others, which have no ZeRO 0
    tried = scope_of(SEVEN, Space(tensor=(1,), pipeline=(1,))).tried
    assert "ZeRO 0 to 3 over all or a node" in tried
    # 7 layers on 4 stages: no stage has more than 2, of which a part are; on one stage a part of 7
    assert any("some layers" in words for words in scope_of(SEVEN, Space(data=(1,), tensor=(1,))).tried)
