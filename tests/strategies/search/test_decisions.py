"""Plans as decisions taken one after another, and what is known of a plan whose decisions are not all taken."""

from collections import Counter
from math import inf

import pytest
from hypothesis import given, settings

from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.decisions import DecisionTree, Outlooks, PartialPlan
from meshwise.strategies.search.space import Space, layouts

from .small_problems import PROBLEMS, SPACES, FakeCost, small_problem

PROBLEM = small_problem()
SPACE = Space(recompute=("none",), zero=(0,))  # type: ignore[arg-type]


def leaves(tree: DecisionTree, partial: PartialPlan) -> list[Layout]:
    """Return every layout that a way from a partial plan ends at, once for each way."""
    if partial.layout is not None:
        return [partial.layout]
    return [leaf for branch in tree.list_branches(partial) for leaf in leaves(tree, branch.child)]


def after(tree: DecisionTree, *decided: tuple[str, object]) -> PartialPlan:
    """Return the partial plan after decisions of single fields."""
    partial = tree.root
    for field, value in decided:
        agreed = [
            each.child
            for each in tree.list_branches(partial)
            if {getattr(x, field) for x in each.child.layouts} == {value}
        ]
        partial = max(agreed, key=lambda each: len(each.layouts))
    return partial


@settings(max_examples=25, deadline=None)
@given(problem=PROBLEMS, space=SPACES)
def test_the_leaves_are_the_layouts_of_the_space(problem: Problem, space: Space) -> None:
    tree, every = DecisionTree(problem, space), list(layouts(problem, space))
    assert set(leaves(tree, tree.root) if every else ()) == set(every)
    assert tree.is_closed(tree.root) == (not every)
    assert Counter(tree.list_by_habit()) == Counter(every)


def test_no_decision_has_one_outcome_and_degrees_come_first() -> None:
    tree = DecisionTree(PROBLEM, Space())
    waiting, met = [tree.root], 0
    while waiting:
        partial = waiting.pop()
        branches, met = tree.list_branches(partial), met + 1
        waiting += [branch.child for branch in branches]
        assert len(branches) == len({branch.child for branch in branches}) > 1 or partial.layout
        undecided = len({(each.tensor, each.pipeline, each.data) for each in partial.layouts}) > 1
        decided = {branch.fields for branch in branches}
        assert decided <= {("tensor",), ("pipeline",), ("data",)} if undecided else len(decided) <= 1
    assert met > len(list(layouts(PROBLEM)))


def test_the_order_of_decisions_makes_no_difference() -> None:
    tree = DecisionTree(PROBLEM, Space())
    one, other = after(tree, ("tensor", 2), ("pipeline", 2)), after(tree, ("pipeline", 2), ("tensor", 2))
    # 8 devices: data is 8 / (2 * 2) = 2, whether it was decided or followed
    assert one is other is after(tree, ("data", 2), ("tensor", 2))
    assert {(each.data, each.tensor, each.pipeline) for each in one.layouts} == {(2, 2, 2)}


def test_what_is_closed_is_left_out_on_every_way_to_it() -> None:
    tree = DecisionTree(PROBLEM, SPACE)
    every = set(layouts(PROBLEM, SPACE))
    gone = {each for each in every if (each.tensor, each.pipeline) == (2, 2)}
    partial = after(tree, ("tensor", 2), ("pipeline", 2))
    assert not tree.is_closed(partial)
    for layout in gone:
        tree.close_layout(layout)
    assert tree.is_closed(partial)
    assert set(leaves(tree, tree.root)) == every - gone
    for layout in every:
        tree.close_layout(layout)
    assert tree.is_closed(tree.root)
    assert tree.list_branches(tree.root) == ()


class Asked(FakeCost):
    """Memory of four times what the device has, and how often it was asked for."""

    times = 0

    def peak_memory(self, plan: object) -> float:
        self.times += 1
        return 4e9

    def fits(self, plan: object) -> bool:
        return False


def test_a_shortfall_by_hand() -> None:
    outlooks, layout = Outlooks(PROBLEM, costs := Asked()), next(layouts(PROBLEM))
    assert outlooks[layout].shortfall == pytest.approx(0.75)  # 1e9 of 4e9 bytes are there: 3/4 are missing
    assert not outlooks[layout].fits
    assert costs.times == 1


def test_what_fits_lacks_nothing_and_has_its_bound() -> None:
    costs = FakeCost(capacity=0.5)
    outlooks = Outlooks(PROBLEM, costs)
    for layout in layouts(PROBLEM):
        plan = complete(PROBLEM, layout)
        assert outlooks[layout].fits == costs.fits(plan)
        assert outlooks[layout] == (
            (costs.plan_bound(plan), 0) if costs.fits(plan) else (inf, 0)
        )  # 1e9 bytes are there
