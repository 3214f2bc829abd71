"""A space of plans that something else accepts is the accepted part of the space, for every algorithm."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.search.acceptance import Answers, Rule
from meshwise.strategies.search.algorithms import ALGORITHMS, list_installed
from meshwise.strategies.search.algorithms.best_first import BestFirst
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import Space, count_layouts, layouts, neighbours

from .scenarios import small_scenario, wide_scenario
from .small_problems import small_problem


def no_recompute_with_tensor(layout: Layout) -> Sequence[str]:
    if layout.tensor > 1 and layout.recompute is not Recompute.NONE:
        return ("tensor ranks recompute nothing",)
    return ()


def shared_states_with_microbatches(layout: Layout) -> Sequence[str]:
    """Refuse one of replicas and few microbatches, and the other one without overlap."""
    if layout.zero == 0:
        return () if layout.pipeline > 1 else ("zero of one stage",)
    return ("replicas", "states") if layout.microbatch == 2 and layout.replica == 1 else ()


def no_sequences(layout: Layout) -> Sequence[str]:
    return ("sequence_parallel",) if layout.sequence_parallel else ()


RULES: tuple[Rule, ...] = (no_recompute_with_tensor, shared_states_with_microbatches, no_sequences)


@dataclass(frozen=True)
class Some:
    """Accepts what no rule is against."""

    numbers: tuple[int, ...]
    cuts_operators: bool = False

    def list_rules(self, problem: Problem) -> Sequence[Rule]:
        return [RULES[number] for number in self.numbers]

    def list_refusals(self, problem: Problem, plan: Plan) -> tuple[str, ...]:
        """Say of a plan what the rules say of a layout with its fields; stages and their recompute are its own."""
        layout = Layout(
            data=plan.data,
            tensor=plan.tensor,
            pipeline=plan.pipeline,
            microbatch=plan.microbatch,
            zero=plan.zero,
            sequence_parallel=plan.sequence_parallel,
            recompute=plan.recompute,
        )
        return tuple(reason for number in self.numbers for reason in RULES[number](layout))


EVERY = Some((0, 1, 2))
CHOSEN = st.lists(st.integers(0, 2), unique=True).map(lambda numbers: Some(tuple(numbers)))


def accepted(accepts: Some, problem: Problem, space: Space) -> list[Layout]:
    """Return the layouts of a space that no rule is against, one by one."""
    rules = accepts.list_rules(problem)
    return [layout for layout in layouts(problem, space) if not any(rule(layout) for rule in rules)]


def scenario(seed: int) -> tuple[Problem, Space]:
    return small_scenario(seed) if seed % 2 else wide_scenario(seed)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 60), accepts=CHOSEN)
def test_the_space_is_its_accepted_part_in_the_same_order(seed: int, accepts: Some) -> None:
    problem, space = scenario(seed)
    expected, limited = accepted(accepts, problem, space), replace(space, accepts=accepts)
    assert list(layouts(problem, limited)) == expected
    assert count_layouts(problem, limited) == len(expected)


@pytest.mark.parametrize("seed", range(6))
def test_neighbours_are_those_that_are_accepted(seed: int) -> None:
    problem, space = scenario(seed)
    expected = accepted(EVERY, problem, space)
    limited, known = replace(space, accepts=EVERY), set(expected)
    for layout in Random(seed).sample(expected, min(5, len(expected))):
        near = [each for each in neighbours(problem, space, layout) if each in known]
        assert list(neighbours(problem, limited, layout)) == near


@pytest.mark.parametrize("seed", range(12))
def test_a_proof_is_that_of_brute_force_over_what_is_accepted(seed: int) -> None:
    problem, space = scenario(seed)
    costs = SimulatedCost(problem)
    every = [costs.evaluate(complete(problem, layout)) for layout in accepted(EVERY, problem, space)]
    result = search(BestFirst(starts=False), problem, replace(space, accepts=EVERY))
    if result.best is None:
        assert not any(each.fits for each in every)
    else:
        assert result.best.evaluation.step_time == result.lower_bound == min(each.step_time for each in every)


@pytest.mark.parametrize("name", list_installed())
def test_every_algorithm_finds_what_is_accepted_alone(name: str) -> None:
    problem = small_problem(nodes=1, devices_per_node=4)
    space = Space(accepts=EVERY)
    result = search(ALGORITHMS[name](), problem, space, budget=12)
    fitting = [trial for trial in result.trials if trial.evaluation.fits]
    assert not any(EVERY.list_refusals(problem, trial.plan) for trial in fitting)
    least = min(SimulatedCost(problem).evaluate(complete(problem, each)).step_time for each in layouts(problem, space))
    if name in ("auto", "best_first", "exhaustive", "breadth_first"):
        assert result.best is not None
        assert result.best.evaluation.step_time <= least


def asked(rule: Callable[[Layout], Sequence[str]]) -> tuple[Answers, list[Layout]]:
    """Return answers of one rule, and a list to which every layout is added that it is really asked of."""
    calls: list[Layout] = []

    def counted(layout: Layout) -> Sequence[str]:
        calls.append(layout)
        return rule(layout)

    return Answers([counted]), calls


def test_a_rule_is_asked_once_of_layouts_that_agree_in_what_it_reads() -> None:
    answers, calls = asked(no_recompute_with_tensor)
    for layout in (Layout(), Layout(data=4), Layout(zero=1, recompute=Recompute.FULL)):  # tensor 1: no more is read
        assert answers.list_refusals(layout) == ()
    assert len(calls) == 1
    for data in (1, 2, 4):
        full = Layout(data=data, tensor=2, recompute=Recompute.FULL)
        assert answers.list_refusals(full) == ("tensor ranks recompute nothing",)
        assert answers.list_refusals(replace(full, recompute=Recompute.NONE)) == ()
    assert len(calls) == 3


def test_what_hangs_on_an_undecided_field_refuses_nothing() -> None:
    answers, _ = asked(shared_states_with_microbatches)
    refused = Layout(zero=1, microbatch=2)  # whatever else it is
    assert answers.refuses(refused, {"recompute", "stages"})
    assert not answers.refuses(refused, {"microbatch"})
    assert not answers.refuses(refused, {"zero_shards"})  # what `replica` is made of
    assert answers.list_refusals(refused) == ("replicas", "states")
    assert not answers.refuses(Layout(data=4, zero_shards=2, zero=1, microbatch=2))
