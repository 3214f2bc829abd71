"""A descent goes from a known plan to faster ones near it, and stays among the plans that a search may choose."""

from collections.abc import Generator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest

from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.evaluation import Evaluation
from meshwise.strategies.plan.completion import complete, recover_layout
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.search.algorithms.best_first import BestFirst, BestFirstSearch
from meshwise.strategies.search.choices import find_family
from meshwise.strategies.search.descent import Incumbent, descend, propose_best_known, rank_known_plans
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import Space, find_choices, groups_near, layouts, neighbours
from meshwise.strategies.search.starts import engineer_layouts, known_groups, known_layouts

from ..problems import problem
from .scenarios import usual_scenario

SMALL = problem(nodes=2, devices=2, layers=4, batch=8)


def steps(proposals: Generator[Plan, Evaluation, None], costs: SimulatedCost) -> list[float]:
    """Return the step times of all plans that are yielded."""
    times: list[float] = []
    answer = None
    while True:
        try:
            answer = costs.evaluate(proposals.send(answer))  # type: ignore[arg-type]
        except StopIteration:
            return times
        times.append(answer.step_time)


@pytest.mark.parametrize("seed", range(8))
def test_a_descent_ends_at_a_plan_of_the_space_that_fits_and_is_never_slower_than_its_start(seed: int) -> None:
    small, space = usual_scenario(seed)
    costs = SimulatedCost(small)
    for start in known_layouts(small, space)[:4]:
        first = costs.evaluate(complete(small, start))
        if not first.fits:
            continue
        incumbent = Incumbent(first.step_time, start)
        times = steps(descend(small, space, costs, incumbent), costs)
        best, layout = incumbent.time, incumbent.layout
        assert best == min([first.step_time, *times])
        assert layout is not None
        assert costs.evaluate(complete(small, layout)).step_time == best
        assert layout == start or find_choices(small, space).contains(layout)


@pytest.mark.parametrize("soon", [0, 4096])
@pytest.mark.parametrize("seed", range(6))
def test_a_search_begins_no_slower_than_a_known_plan_whatever_takes_long(
    soon: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, space = usual_scenario(seed)
    costs = SimulatedCost(small)
    monkeypatch.setattr("meshwise.strategies.search.descent.SOON", soon)
    run = BestFirstSearch(small, costs)
    answer = None
    proposals = run.begin_with_known(space)
    with suppress(StopIteration):
        while True:
            proposal = proposals.send(answer)  # type: ignore[arg-type]
            answer = costs.evaluate(proposal) if isinstance(proposal, Plan) else None
    known = [costs.evaluate(complete(small, layout)) for layout in known_layouts(small, space)]
    assert run.incumbent.time <= min((evaluation.step_time for evaluation in known if evaluation.fits), default=inf)
    assert (
        run.incumbent.layout is None
        or costs.evaluate(complete(small, run.incumbent.layout)).step_time == run.incumbent.time
    )


@pytest.mark.parametrize("seed", range(6))
def test_a_way_that_takes_long_has_an_answer_after_a_few_paths_and_few_answers(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a plan that is not evaluated: the first answer after 4 more paths, the next after 8 more, then 16."""
    small, space = usual_scenario(seed)
    costs = SimulatedCost(small)
    monkeypatch.setattr("meshwise.strategies.search.descent.SOON", 0)
    asked = list[int]()
    monkeypatch.setattr(
        costs, "longest_paths", lambda plans: asked.append(0) or SimulatedCost.longest_paths(costs, plans)
    )
    start = max(
        (layout for layout in known_layouts(small, space) if costs.fits(complete(small, layout))),
        key=lambda layout: costs.plan_bound(complete(small, layout)),
        default=None,
    )
    if start is None:
        return
    way, answer, at = descend(small, space, costs, Incumbent(), start), None, list[int]()
    with suppress(StopIteration):
        while True:
            answer = costs.evaluate(way.send(answer))  # type: ignore[arg-type]
            at.append(len(asked) - 1)  # the first path is that of the start
    assert at[0] <= 4 and len(at) <= 2 + len([count for count in (4, 12, 28, 60, 124, 252) if count < len(asked)])
    assert all(later - sooner >= 8 for sooner, later in pairwise(at[:-1]))


def test_near_a_plan_are_its_group_its_family_and_families_one_decision_away() -> None:
    layout = Layout(data=2, tensor=2, zero=1, sequence_parallel=True)
    circles = [(far, {family: list(groups) for family, groups in found.items()}) for far, found in near(layout)]
    assert [far for far, _ in circles] == [False, False, True]
    own, family, others = (found for _, found in circles)
    assert list(own) == list(family) == [find_family(layout)]
    assert layout in list(own[find_family(layout)][0])
    assert find_family(layout) not in others
    for families in (own, family, others):
        for groups in families.values():
            assert all(find_choices(SMALL, Space()).contains(member) for group in groups for member in group)


def test_what_differs_in_one_decision_is_near() -> None:
    # a neighbour with another schedule in another family takes two decisions
    layout = Layout(data=2, pipeline=2, schedule="1f1b", stages="even")
    members = {member for _, found in near(layout) for groups in found.values() for group in groups for member in group}
    assert set(neighbours(SMALL, Space(), layout)) <= members


def near(layout: Layout) -> list[tuple[bool, dict[Layout, list[object]]]]:
    return [
        (far, {family: list(groups) for family, groups in found.items()})
        for far, found in groups_near(SMALL, Space(), layout)
    ]  # type: ignore[return-value]


def test_a_stated_plan_is_known_in_the_words_of_the_space() -> None:
    # what a plan file says: stages by their counts, devices one by one, axes that it has
    own = replace(Layout(data=2, pipeline=2, zero=1), stages=(2, 2), placement=(0, 1, 2, 3))
    plan = complete(SMALL, own)
    assert recover_layout(SMALL, plan).order == Layout().order
    (first, *_) = known_layouts(SMALL, Space(starts=(recover_layout(SMALL, plan),)))
    assert first == Layout(data=2, pipeline=2, zero=1, stages="even")
    assert complete(SMALL, first) == complete(SMALL, replace(own, placement=()))
    assert find_choices(SMALL, Space()).contains(first)


def test_a_plan_in_another_order_keeps_it() -> None:
    turned = ("tensor", "pipeline", "data")
    order = (*turned, *(name for name in Layout().order if name not in turned))
    plan = complete(SMALL, Layout(data=2, tensor=2, order=order))
    assert recover_layout(SMALL, plan).order != Layout().order
    assert complete(SMALL, recover_layout(SMALL, plan)) == plan


def test_plans_of_other_devices_or_without_a_flush_or_in_an_order_of_their_own_are_no_trouble() -> None:
    written = "0F0 0B0\n1F0 1B0"
    stated = (
        Layout(data=2, pipeline=2, schedule="pipedream"),
        Layout(data=2, pipeline=2, schedule=written, microbatch=4),
    )
    known = known_layouts(SMALL, Space(starts=stated))
    assert "pipedream" not in {layout.schedule for layout in known}
    few = Space(devices=(2,), starts=(Layout(data=2, placement=(0, 1)), Layout(data=4)))
    assert [layout.data for layout in known_layouts(SMALL, few)] == [2]
    assert {layout.data * layout.pipeline * layout.tensor * layout.context for layout in layouts(SMALL, few)} == {2}


SEVEN = problem(nodes=2, devices=2, layers=7, batch=8)
"""Seven layers on two nodes of two devices."""


@pytest.mark.parametrize("seed", range(6))
def test_no_search_is_slower_than_the_plans_that_people_know(seed: int) -> None:
    small, space = usual_scenario(seed)
    costs = SimulatedCost(small)
    known = [costs.evaluate(complete(small, layout)).step_time for layout in known_layouts(small, space)]
    for seconds in (None, 1e-9):  # with all the time there is, and with none
        result = search(BestFirst(), small, space, seconds=seconds)
        if min(known, default=inf) < inf:
            assert result.best is not None
            if seconds is None:
                assert result.best.evaluation.step_time <= min(known)


def test_known_plans_keep_the_limits_and_are_legal() -> None:
    names = dict(engineer_layouts(SEVEN))
    assert any(layout.zero == 3 and layout.data == 4 for layout in names.values())
    assert {layout.zero for layout in known_layouts(SEVEN, Space(zero=(1,)))} == {1}
    costs = SimulatedCost(SEVEN)
    plans = []
    incumbent = Incumbent()
    proposals = propose_best_known(SEVEN, rank_known_plans(SEVEN, Space(), costs), incumbent)
    answer = None
    try:
        while True:
            plans.append(proposals.send(answer))  # type: ignore[arg-type]
            answer = costs.evaluate(plans[-1])
    except StopIteration:
        best = incumbent.time
    # known plans, and of their groups the members with the least bounds: never slower than the plans themselves
    assert best <= min(costs.evaluate(complete(SEVEN, layout)).step_time for layout in known_layouts(SEVEN, Space()))


@pytest.mark.parametrize("seed", range(6))
def test_a_known_plan_stands_for_those_that_differ_in_recomputation_and_states(seed: int) -> None:
    small, space = usual_scenario(seed)
    costs = SimulatedCost(small)
    paths = {layout: bound for bound, layout in rank_known_plans(small, space, costs) if layout is not None}
    known = known_layouts(small, space)
    fitting = [layout for layout in known if costs.fits(complete(small, layout))]
    assert set(fitting) <= paths.keys() and list(paths.values()) == sorted(paths.values())
    for group in known_groups(small, space):
        members = [layout for layout in group if costs.fits(complete(small, layout))]
        # none of them, or one whose bound is the least: no other member that fits has a lower one
        bounds = [costs.plan_bound(complete(small, layout)) for layout in members]
        found = [costs.plan_bound(complete(small, layout)) for layout in paths if layout in members]
        assert bool(found) is bool(members)
        if found:
            assert min(found) <= min(bounds) * (1 + 1e-9)


def test_a_known_plan_that_a_limit_forbids_stands_with_other_states() -> None:
    # a recipe with ZeRO-1 where only ZeRO-3 may be: the same degrees and schedule stand, with ZeRO-3
    recipe = Layout(data=2, pipeline=2, zero=1, schedule="gpipe", stages="balanced")
    space = Space(zero=(3,), starts=(recipe,))
    assert not any(layout.schedule == "gpipe" for layout in known_layouts(SEVEN, space))
    (group,) = (group for group in known_groups(SEVEN, space) if group.layout.schedule == "gpipe")
    assert group.layout.data == group.layout.pipeline == 2
    assert {layout.zero for layout in group} == {3} and len({layout.recompute for layout in group}) > 1
