"""Central and decentralised sums of gradients."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.collective import Collective, CollectiveCurve
from meshwise.simulator.engine import simulate, step_time
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.problem import Problem

from ...plan.test_parallelism import mixture
from ...problems import problem

RATE = 1e7


def seconds(small: Problem, layout: Layout) -> float:
    return step_time(lower(small, complete(small, layout)))


@given(st.integers(2, 8), st.sampled_from([Layout(), Layout(overlap_gradients=False)]))
@settings(max_examples=20, deadline=None)
def test_the_port_of_the_server_takes_all_gradients_in_and_gives_all_sums_out(ranks: int, layout: Layout) -> None:
    # Li et al. 2014: n - 1 workers push their gradients through one port of rate B and pull them back; the
    # network is so slow that a step is its sums: they leave bucket by bucket, but here there is one bucket
    small = problem(devices=ranks, batch=ranks, bandwidth=RATE)
    layout = replace(layout, data=ranks)
    plans = [complete(small, replace(layout, gradient_reduction=how)) for how in ("all_reduce", "parameter_server")]
    size = 4 * StageCosts(small).plan_parameters(plans[0]).elements[0]
    ring, central = (step_time(lower(small, plan)) for plan in plans)
    messages = 2 * (ranks - 1) * size / RATE
    assert central - ring == pytest.approx(messages - messages / ranks, rel=1e-3, abs=1e-4)
    links = simulate(lower(small, plans[1])).links
    assert max(link.bytes for link in links) == pytest.approx((ranks - 1) * size)


def test_experts_have_servers_of_their_own_among_those_that_hold_them() -> None:
    # two ranks hold the same half of the experts, four all else: two servers for experts, one for the rest,
    # and each has a phase of pushes and one of pulls
    small = mixture(devices=4, batch=4)
    plan = complete(small, Layout(data=4, expert=2, gradient_reduction="parameter_server", overlap_gradients=False))
    program = lower(small, plan, folded=False)
    work = [program.work[index] for index in program.work_of.tolist()]
    named = [task for task, each in enumerate(work) if each.pieces[0].operators.startswith("push_pull")]
    assert sorted(len(program.streams_of(task)) for task in named) == [2, 2, 2, 2, 4, 4]


@pytest.mark.parametrize(
    "layout",
    [Layout(data=8), Layout(data=4, tensor=2), Layout(data=4, context=2), Layout(data=8, expert=2)],
)
def test_ranks_beside_a_server_fold_as_they_are(layout: Layout) -> None:
    small = mixture(batch=8)
    plan = complete(small, replace(layout, gradient_reduction="parameter_server"))
    folded, unfolded = (step_time(lower(small, plan, folded=how)) for how in (True, False))
    assert folded == pytest.approx(unfolded, rel=1e-6)


def test_what_is_measured_of_all_reduce_says_nothing_of_a_server() -> None:
    small = problem(devices=4, batch=4, bandwidth=RATE)
    curve = CollectiveCurve(Collective.ALL_REDUCE, 4, ((1.0, 100.0), (2.0, 100.0)))
    known = replace(small, cluster=replace(small.cluster, collectives=(curve,)))
    central = Layout(data=4, gradient_reduction="parameter_server")
    assert seconds(known, central) == seconds(small, central)
    assert seconds(known, Layout(data=4)) > 100 > seconds(small, Layout(data=4))


def test_one_data_rank_has_nothing_to_reduce() -> None:
    small = problem(devices=2)
    layouts = [Layout(tensor=2, gradient_reduction=how) for how in ("all_reduce", "parameter_server")]
    assert seconds(small, layouts[0]) == seconds(small, layouts[1])


def test_of_uneven_batches_the_server_may_not_be_the_fullest() -> None:
    # the server has the states, and another rank the larger batch: no rank has both
    served = Layout(data=3, gradient_reduction="parameter_server")
    small, larger = (problem(devices=3, layers=1, batch=batch) for batch in (4, 6))
    uneven = complete(small, replace(served, microbatch=(1, 1, 2)))
    even = complete(larger, replace(served, microbatch=2))
    told = simulate(lower(small, uneven)).peak_memory
    assert SimulatedCost(small).peak_memory(uneven) == told < SimulatedCost(larger).peak_memory(even)
