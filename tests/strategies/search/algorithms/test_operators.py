"""What is proven of sums of operators' costs reaches whoever asked, also when the user ends the search."""

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from meshwise.strategies.evaluation import CostModel, Evaluation
from meshwise.strategies.operators.cost_graph import Shortfall, Solution
from meshwise.strategies.operators.costs import OperatorCosts
from meshwise.strategies.operators.integer_programming import integer_programming
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.algorithms import OPERATOR_ALGORITHMS
from meshwise.strategies.search.algorithms.operators import Frontier, IntegerProgramming, ShardingPropagation
from meshwise.strategies.search.operator_search import search_operators
from meshwise.strategies.search.proposals import Certificate, Proposals
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import Space, layouts

from ...problems import problem
from ..small_problems import FakeCost, small_problem

FOUR = Space(tensor=(4,), microbatch=(64,), zero=(0,))


def tight(share: float, *, tied: bool = False) -> Problem:
    """Return a problem of 4 devices that have so much of what the fastest plan needs."""
    sizes = {"layers": 4, "batch": 256, "bandwidth": 1e11, "hidden": 512, "ffn": 2048, "tied": tied}
    free = problem(devices=4, **sizes)  # type: ignore[arg-type]
    best = search(Frontier(), free, FOUR).best
    assert best is not None
    small = replace(free.cluster.accelerator, memory=share * best.evaluation.peak_memory)
    return problem(devices=4, accelerator=small, **sizes)  # type: ignore[arg-type]


def test_the_certificate_is_of_the_best_plan() -> None:
    of, first, second = small_problem(), Certificate(0.0, 0.0), Certificate(0.5, None)
    a, b, c, d = (complete(of, layout) for layout in list(layouts(of))[:4])

    @dataclass(frozen=True)
    class Scripted:
        name: ClassVar[str] = "scripted"

        def propose(
            self, problem: Problem, space: Space, costs: object
        ) -> Generator[Plan | Certificate, Evaluation, None]:
            yield first
            yield a
            yield b
            yield second
            yield c
            yield d

    costs = FakeCost()
    times = [costs.step_time(plan) for plan in (a, b, c, d)]
    result = search(Scripted(), of, costs=costs)  # type: ignore[arg-type]
    assert result.certificate == (first if min(times[:2]) <= min(times[2:]) else second)
    uncertain = search(OPERATOR_ALGORITHMS["recursive_programming"](), problem(devices=4), Space(tensor=(4,)))
    assert uncertain.best is not None and uncertain.certificate is None


def test_memory_has_a_price_where_it_binds_only() -> None:
    free, bound = (search(Frontier(gap=0.0), tight(share), FOUR) for share in (2.0, 0.9))
    assert free.certificate == Certificate(0.0, 0.0)
    assert bound.certificate is not None and bound.certificate.gap == 0.0
    assert bound.certificate.memory_price is not None and bound.certificate.memory_price > 0
    # what the limit costs in all is no less than its last hundredth
    assert free.best is not None and bound.best is not None
    saved = bound.certificate.memory_price * bound.best.evaluation.peak_memory / 100
    assert saved <= bound.best.evaluation.step_time - free.best.evaluation.step_time


def test_what_is_known_differs_by_algorithm() -> None:
    of = tight(0.9)
    alike = search(IntegerProgramming(), of, FOUR).certificate
    assert alike is not None and alike.among == "layers cut alike" and alike.memory_price is None
    assert alike.gap is not None and alike.gap <= 0.01
    apart = search(IntegerProgramming(tie=False), of, FOUR).certificate
    assert apart is not None and apart.among == ""
    spread = search(ShardingPropagation(faithful=True), problem(devices=4), Space(tensor=(4,)))
    assert spread.certificate == Certificate(None, None)


@pytest.mark.parametrize("tied", [False, True])
def test_an_interrupted_solver_gives_its_incumbent_and_ends_the_search(tied: bool) -> None:
    calls: list[OperatorCosts] = []

    def stopped(table: OperatorCosts, limit: int) -> Solution | Shortfall:
        found = integer_programming(table.graph, limit)
        if isinstance(found, Shortfall):
            return found
        calls.append(table)
        return replace(found, was_interrupted=len(calls) == 1)

    class Stopped(IntegerProgramming):
        def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
            return search_operators(problem, space, costs, stopped)

    result = search(Stopped(), tight(0.9, tied=tied), Space(microbatch=(64,)))
    assert result.interrupted
    assert result.best is not None and result.best.evaluation.fits
    assert result.certificate is not None and result.certificate.gap is not None
    assert all(table.degrees == calls[0].degrees for table in calls)  # no other arrangement is begun
