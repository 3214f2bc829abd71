"""Gradient clipping: one read of the gradients, and one sum that all ranks of a model wait for."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.engine import simulate, step_time
from meshwise.simulator.program import TaskKind
from meshwise.simulator.units import to_ticks
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.mesh import AXES
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.space import layouts

from ...plan.test_parallelism import mixture
from ...problems import problem


def clipped(small: Problem) -> Problem:
    return replace(small, training=replace(small.training, gradient_clipping=True))


def ticks(small: Problem, layout: Layout, *, folded: bool = True) -> int:
    return round(step_time(lower(small, complete(small, layout), folded=folded)) * 1e12)


@pytest.mark.parametrize(("precision", "size"), [("fp32", 4), ("fp16", 2), ("bf16", 4)])
def test_on_one_device_clipping_reads_the_gradients_once(precision: str, size: int) -> None:
    accelerator = replace(problem().cluster.accelerator, peak_flops=(("fp32", 1e12), ("fp16", 1e12), ("bf16", 1e12)))
    small = problem(devices=1, precision=precision, accelerator=accelerator)
    count = StageCosts(small).plan_parameters(complete(small, Layout())).elements[0]
    assert ticks(clipped(small), Layout()) - ticks(small, Layout()) == to_ticks(size * count / 1e12)


@pytest.mark.parametrize(
    ("layout", "groups", "ranks"),
    [
        (Layout(data=4), 0, 1),  # each rank has all gradients already
        (Layout(tensor=4), 1, 4),
        (Layout(data=2, tensor=2), 2, 2),
        (Layout(data=2, pipeline=2), 2, 2),
        (Layout(tensor=2, pipeline=2), 1, 4),
        (Layout(data=4, zero=1), 1, 4),  # each rank has a share of the gradients
        (Layout(data=2, pipeline=2, zero=1), 1, 4),
        (Layout(data=2, context=2), 0, 1),  # gradients are summed along the context axis too
        (Layout(tensor=2, context=2), 2, 2),
        (Layout(data=2, context=2, zero=1), 1, 4),
    ],
)
@pytest.mark.parametrize("order", [AXES, AXES[::-1]])
def test_the_ranks_that_share_a_model_sum_one_scalar(
    layout: Layout, groups: int, ranks: int, order: tuple[str, ...]
) -> None:
    small = clipped(problem(devices=4, bandwidth=1e8))
    plan = complete(small, replace(layout, order=order))
    shares = StageCosts(small).plan_parameters(plan).elements
    assert_summed(small, plan, groups, ranks, [-(-n // plan.replicas) if plan.zero else n for n in shares])


@pytest.mark.parametrize(("zero", "groups", "ranks"), [(0, 2, 2), (1, 1, 4)])
def test_what_experts_add_to_the_norm_is_summed_over_those_that_share_them(zero: int, groups: int, ranks: int) -> None:
    small = clipped(mixture(devices=4))
    plan = complete(small, Layout(data=4, expert=2, zero=zero))
    (held,) = StageCosts(small).plan_parameters(plan).positions
    dense = held.elements - held.expert_elements
    share = -(-dense // 4) - (-held.expert_elements // 2) if zero else held.elements
    assert_summed(small, plan, groups, ranks, [share])


def assert_summed(small: Problem, plan: Plan, groups: int, ranks: int, sizes: list[int]) -> None:
    """Check that four ranks read so many gradients each, and sum a scalar in groups of so many ranks."""
    program = lower(small, plan, folded=False)
    named = [(task, program.work[work]) for task, work in enumerate(program.work_of.tolist())]
    named = [(task, work) for task, work in named if work.pieces[0].operators.endswith("norm of gradients")]
    reads = [task for task, work in named if work.kind is TaskKind.OPTIMIZER]
    sums = [task for task, work in named if work.kind is TaskKind.DATA_COMMUNICATION]
    assert len(reads) == 4
    assert [len(program.streams_of(task)) for task in sums] == [ranks] * groups
    assert {program.work[program.work_of[task]].duration for task in reads} == {to_ticks(4 * n / 1e12) for n in sizes}


def test_all_stages_step_together() -> None:
    small = clipped(problem(devices=4, layers=8))
    timeline = simulate(lower(small, complete(small, Layout(pipeline=4, stages=(4, 2, 1, 1)))))
    starts = [
        span.start for span in timeline.spans if span.kind is TaskKind.OPTIMIZER and span.operators == "optimizer"
    ]
    assert len(starts) == 4 and len(set(starts)) == 1


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_the_longest_paths_of_clipped_steps_are_those_of_their_programs(data: st.DataObject) -> None:
    small = clipped(problem(devices=4, batch=8, tied=data.draw(st.booleans()), precision="bf16"))
    plan = complete(small, data.draw(st.sampled_from(list(layouts(small)))))
    expected = round(step_time(lower(small, plan), "longest_path") * 1e12)
    assert SimulatedCost(small).list_path_ticks([plan]) == [expected]
