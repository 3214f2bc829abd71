"""Schedules that split backward, place stages in a V or run passes in pairs: the laws of all others hold for them."""

from dataclasses import replace

import numpy as np
import pytest

from meshwise.simulator.engine import step_time
from meshwise.simulator.program import TaskKind
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.partition import Stage
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.schedules.schedule import SCHEDULES, ActionKind

from ...problems import list_stage_memories, problem

SIMULATED = [name for name, rule in SCHEDULES.items() if not rule.is_asynchronous]


def equal_stages(name: str, ranks: int, microbatches: int) -> tuple[Problem, Plan]:
    """Return a pipeline of one equal layer a stage, with transfers that cost nothing."""
    chunks = SCHEDULES[name].chunks[0]
    small = problem(devices=ranks, layers=ranks * chunks, batch=microbatches, bandwidth=1e30)
    plan = complete(small, Layout(pipeline=ranks, schedule=name, chunks=chunks))
    return small, replace(plan, stages=tuple(Stage((f"layers.{index}",)) for index in range(ranks * chunks)))


@pytest.mark.parametrize("name", SIMULATED)
def test_a_backward_in_two_takes_the_ticks_of_a_whole_one(name: str) -> None:
    small, plan = equal_stages(name, 4, 8)
    stage = StageCosts(small).plan_costs(plan).stages[0]
    if plan.splits_backward:
        parts = (
            sum(block.passes.select(kind).ticks for block in stage.blocks)
            for kind in (ActionKind.INPUT, ActionKind.WEIGHT)
        )
        assert sum(parts) == stage.backward_ticks
    program = lower(small, plan)
    work = sum(program.work[index].duration for index in program.work_of if program.work[index].stage == 0)
    moved = sum(
        program.work[index].duration
        for index in program.work_of
        if program.work[index].stage == 0 and program.work[index].kind is TaskKind.PIPELINE_COMMUNICATION
    )
    assert work - moved == 8 * (stage.forward_ticks + stage.backward_ticks)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 12), (8, 16)])
def test_zero_bubble_schedules_order_the_step_as_their_papers_say(ranks: int, microbatches: int) -> None:
    # Qi et al. 2024, table 2: the bubble of 1F1B is (p - 1) (F + B + W), of ZB-H1 (p - 1) (F + B - W), so that
    # ZB-H1 ends 2 (p - 1) W earlier; ZB-H2 is no slower
    def taken(name: str) -> float:
        program = lower(*equal_stages(name, ranks, microbatches))
        free = (TaskKind.OPTIMIZER, TaskKind.PIPELINE_COMMUNICATION)
        work = tuple(replace(w, duration=0) if w.kind in free else w for w in program.work)
        return step_time(replace(program, work=work, flow_of=np.full(program.num_tasks, -1)))

    small, plan = equal_stages("zb1p", ranks, microbatches)
    block = StageCosts(small).plan_costs(plan).stages[0].blocks[0]
    weight = block.passes.select(ActionKind.WEIGHT).ticks / 1e12
    assert block.passes.select(ActionKind.INPUT).ticks >= block.passes.select(ActionKind.WEIGHT).ticks
    assert taken("1f1b") - taken("zb1p") == pytest.approx(2 * (ranks - 1) * weight, rel=1e-9)
    assert taken("zb2p") <= taken("zb1p") * (1 + 1e-9)
    assert taken("naive") > taken("gpipe")


def test_gradients_of_weights_keep_what_they_need_and_no_more() -> None:
    # a whole backward gives everything back; in two, inputs of the products and the gradients of what they put out
    # stay until the gradients of the weights are made
    small, plan = equal_stages("zb1p", 4, 8)
    memory = list_stage_memories(StageCosts(small), plan)[1]
    assert memory.deferred_bytes > 0
    assert memory.changes[0] == memory.kept_bytes
    assert sum(memory.changes[2:]) == memory.changes[1] == -memory.kept_bytes
