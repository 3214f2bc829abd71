"""Context parallelism: what attention moves, and every way to the step time."""

from dataclasses import replace

import pytest

from meshwise.simulator.collective import Collective
from meshwise.simulator.engine import simulate, step_time
from meshwise.simulator.program import TaskKind
from meshwise.strategies.lowering.costs.segments import Segment
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.rules import violations

from ...problems import find_block_cost, problem

SEQUENCE, HIDDEN, FP32 = 32, 64, 4  # of tests/strategies/problems.py


def moves(small: Problem, layout: Layout, direction: str) -> list[tuple[str, Collective, float]]:
    """Return (axis, collective, bytes) of every collective of one layer."""
    plan, costs = complete(small, layout), StageCosts(small)
    steps: tuple[Segment, ...] = getattr(find_block_cost(costs, plan, "layers").work.segments, direction)
    return [(step.axis, step.collective, step.size) for step in steps if step.collective is not None]


@pytest.mark.parametrize("context", [2, 4])
@pytest.mark.parametrize("tensor", [1, 2])
def test_ring_attention_passes_keys_and_values_on(context: int, tensor: int) -> None:
    # Liu et al. 2023, section 3: a rank hands its keys and values, 2 * s/c * h/t elements, on c - 1 times; in
    # backward they go round again, and their gradients go c times: all the way home
    layout = Layout(data=8 // context // tensor, tensor=tensor, context=context, attention=Attention.RING)
    share = 2 * SEQUENCE // context * HIDDEN // tensor * FP32
    for direction, total in (("forward", context - 1), ("backward", 2 * context - 1)):
        found = [(kind, size) for axis, kind, size in moves(problem(), layout, direction) if axis == "context"]
        assert {kind for kind, _ in found} == {Collective.SHIFT}
        assert sum(size for _, size in found) == total * share


@pytest.mark.parametrize("context", [2, 4])
def test_gathered_keys_come_back_as_scattered_gradients(context: int) -> None:
    # The Llama 3 herd of models, section 3.3.2: keys and values are gathered before attention
    layout = Layout(data=8 // context, context=context, attention=Attention.ALL_GATHER)
    whole = float(SEQUENCE * HIDDEN * FP32)
    assert moves(problem(), layout, "forward") == [("context", Collective.ALL_GATHER, whole)] * 2
    assert moves(problem(), layout, "backward") == [("context", Collective.REDUCE_SCATTER, whole)] * 2


@pytest.mark.parametrize("context", [2, 4])
def test_ulysses_exchanges_queries_keys_values_and_the_output(context: int) -> None:
    # Jacobs et al. 2023, section 3.2: an all-to-all for each of q, k, v and one for the output, of s * h / c a rank
    layout = Layout(data=8 // context, context=context, attention=Attention.ULYSSES)
    share = float(SEQUENCE * HIDDEN * FP32 / context)
    assert moves(problem(), layout, "forward") == [("context", Collective.ALL_TO_ALL, share)] * 4
    assert moves(problem(), layout, "backward") == [("context", Collective.ALL_TO_ALL, share)] * 4


def test_gradients_are_summed_over_all_ranks_that_share_the_batch_or_a_sequence() -> None:
    small = problem()
    program = lower(small, complete(small, Layout(data=2, context=2, tensor=2)))
    reductions = [w for w in program.work if w.kind is TaskKind.DATA_COMMUNICATION]
    table = StageCosts(small).machine(complete(small, Layout(data=2, context=2, tensor=2))).table
    assert reductions
    assert table.tables["data"].devices.shape == (2, 4)


def test_a_fast_ring_is_hidden_and_a_slow_one_is_not() -> None:
    # all but the first launch of it is hidden behind attention where links are fast enough
    layout = Layout(data=4, context=2, attention=Attention.RING)
    slow, fast = (problem(bandwidth=bandwidth) for bandwidth in (1e8, 1e30))
    fast = replace(fast, cluster=replace(fast.cluster, overlap_slowdown=1.0))
    exposed = [
        simulate(lower(small, complete(small, layout))).exposed_communication()[TaskKind.CONTEXT_COMMUNICATION]
        for small in (slow, fast)
    ]
    alone = Layout(data=4, context=2, attention=Attention.ALL_GATHER)
    assert exposed[1] < exposed[0]
    assert step_time(lower(slow, complete(slow, layout))) != step_time(lower(slow, complete(slow, alone)))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(context=3, data=1, tensor=1), "context divides sequence(32), met 3; nearest: 2"),
        (
            Layout(context=4, tensor=4, attention=Attention.ULYSSES),
            "ulysses: tensor(4) * context(4) divides the heads of keys(8); nearest context: 2",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_equation(layout: Layout, message: str) -> None:
    assert message in [violation.message for violation in violations(problem(), layout)]


def test_scores_that_are_kept_do_not_go_round() -> None:
    found = violations(problem(attention="unfused"), Layout(data=4, context=2, attention=Attention.RING))
    assert [violation.field for violation in found] == ["attention"]
