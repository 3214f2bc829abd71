"""Laws of every plan: how it is lowered, folded, contracted and simulated must not show in what comes out."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial

import numpy as np
import pytest
from hypothesis import given, settings

from simulator.engine import discrete_event, longest_path, simulate, step_time
from simulator.program import Program
from simulator.timeline import Timeline
from strategies.cost_model import SimulatedCost
from strategies.layout import complete, violations
from strategies.lowering import Granularity, StageCosts, lower

from .plans import Case, any_cases

near = partial(pytest.approx, rel=1e-6, abs=1e-10)
"""The end of a transfer is rounded to a tick, of one or of several together; who then waits for whom can hang on it."""


class Lowered:
    """A case with the programs that laws compare, each made once."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.small, self.plan = case.build()
        self.cost = SimulatedCost(self.small)

    def program(self, granularity: str = Granularity.CHAIN, *, folded: bool = True) -> Program:
        return lower(self.small, self.plan, granularity, costs=self.cost.costs, folded=folded)

    @cached_property
    def chains(self) -> Program:
        return self.program()

    @cached_property
    def operators(self) -> Program:
        return self.program(Granularity.OPERATOR)

    @cached_property
    def unfolded(self) -> Program:
        return self.program(folded=False)

    @cached_property
    def chained(self) -> Timeline:
        return simulate(self.chains)

    @cached_property
    def fine(self) -> Timeline:
        return simulate(self.operators)

    @cached_property
    def apart(self) -> Timeline:
        return simulate(self.unfolded)


def path(program: Program) -> int:
    return int(longest_path.finish_times(program)[1].max())


def bound_below_longest_path_below_discrete_event(it: Lowered) -> None:
    longest = step_time(it.chains, "longest_path")
    assert it.cost.bound(it.plan) <= longest <= it.chained.step_time
    assert it.cost.longest_paths([it.plan]) == [longest]


def discrete_event_is_the_longest_path_where_no_link_is_shared(it: Lowered) -> None:
    flows, links = [], []
    for flow in it.chains.flow_of:
        pass


def folded_is_unfolded(it: Lowered) -> None:
    assert it.chained.step_time == near(it.apart.step_time)
    assert path(it.unfolded) <= path(it.chains)
    assert it.chained.peak_memory == it.apart.peak_memory == it.cost.peak_memory(it.plan)


def contracted_is_original(it: Lowered) -> None:
    assert it.chained.step_time == near(it.fine.step_time)
    assert path(it.chains) == path(it.operators)
    assert it.chained.peak_memory == it.fine.peak_memory
    assert it.chains.num_tasks <= it.operators.num_tasks
    
def shortcuts(it):
    for ours, theirs in zip(discrete_event.finish_times(it.operators), discrete_event.finish_times(it.operators, every_event=True), strict=True):
        assert ours.tolist() == theirs.tolist()


def every_byte_is_on_its_link(it: Lowered) -> None:
    apart = {link.name: link.bytes for link in it.apart.links}
    for timeline in (it.chained, it.fine):
        for link in timeline.links:
            assert link.bytes == pytest.approx(apart[link.name], rel=1e-9), link.name
        assert sum(link.count * link.bytes for link in timeline.links) == pytest.approx(sum(apart.values()), rel=1e-9)


def no_link_carries_more_than_it_can(it: Lowered) -> None:
    for timeline in (it.chained, it.fine, it.apart):
        for link in timeline.links:
            assert link.utilisation <= 1 + 1e-9, link


LAWS = (
    bound_below_longest_path_below_discrete_event,
    folded_is_unfolded,
    contracted_is_original,shortcuts,
    every_byte_is_on_its_link,
    no_link_carries_more_than_it_can,
)


@given(any_cases())
@settings(max_examples=1000, deadline=None)
def test_laws(case: Case) -> None:
    lowered = Lowered(case)
    for law in LAWS:
        law(lowered)
