"""Lowering: closed forms of the schedules, and several ways to the same answer."""

from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.engine import simulate, step_time
from simulator.program import Program, StreamKind, TaskKind
from simulator.units import to_seconds
from strategies.cost_model import SimulatedCost
from strategies.layout import Layout, complete
from strategies.lowering import Granularity, StageCosts, lower
from strategies.lowering.optimizer import optimizer_step
from strategies.lowering.stage import StageCost, idle_ticks
from strategies.plan import Plan, Recompute, Stage
from strategies.problem import Problem
from strategies.schedule import ActionKind

from .problems import problem


class Case(NamedTuple):
    """A small problem and a plan for it, on one to three nodes, with shared or own NICs."""

    data: int
    tensor: int
    pipeline: int
    schedule: str
    devices: int
    own_nics: bool
    rounds: int
    bandwidth: float
    tied: bool
    attention: str
    precision: str
    zero: int
    sequence_parallel: bool
    recompute: Recompute
    overlap: bool
    scatter: bool

    def build(self) -> tuple[Problem, Plan]:
        """Return the problem and the plan."""
        ranks = self.tensor * self.pipeline * self.data
        small = problem(
            nodes=ranks // self.devices,
            devices=self.devices,
            nics=self.devices if self.own_nics else 1,
            batch=self.pipeline * self.data * self.rounds,
            bandwidth=self.bandwidth,
            tied=self.tied,
            attention=self.attention,
            precision=self.precision,
        )
        layout = Layout(
            data=self.data,
            tensor=self.tensor,
            pipeline=self.pipeline,
            schedule=self.schedule,
            chunks=2 if self.schedule == "interleaved" else 1,
            zero=self.zero,
            sequence_parallel=self.sequence_parallel,
            recompute=self.recompute,
            overlap_gradients=self.overlap,
            scatter_gather=self.scatter,
        )
        return small, complete(small, layout)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tensor, pipeline, data = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3))
    return Case(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        schedule=draw(st.sampled_from(["gpipe", "1f1b", "interleaved"])) if pipeline > 1 else "1f1b",
        devices=draw(st.sampled_from([d for d in (1, 2, 4, 8) if tensor * pipeline * data % d == 0])),
        own_nics=draw(st.booleans()),
        rounds=draw(st.integers(1, 3)),
        bandwidth=draw(st.sampled_from([1e8, 1e10])),
        tied=draw(st.booleans()),
        attention=draw(st.sampled_from(["flash", "unfused"])),
        precision=draw(st.sampled_from(["fp32", "bf16"])),
        zero=draw(st.integers(0, 1)),
        sequence_parallel=tensor > 1 and draw(st.booleans()),
        recompute=draw(st.sampled_from(list(Recompute))),
        overlap=draw(st.booleans()),
        scatter=draw(st.booleans()),
    )


def uniform(ranks: int, microbatches: int, schedule: str, chunks: int = 1) -> tuple[Problem, Plan, StageCost]:
    """Return a pipeline of equal stages: the same one layer on each, with transfers that cost nothing."""
    small = problem(devices=ranks, layers=ranks * chunks, batch=microbatches, bandwidth=1e30)
    layout = Layout(pipeline=ranks, schedule=schedule, chunks=chunks)
    stages = tuple(Stage((f"layers.{index}",)) for index in range(ranks * chunks))
    plan = replace(complete(small, layout), stages=stages)
    return small, plan, StageCosts(small).of(plan).stages[0]


def without_optimizer(program: Program) -> int:
    """Return the ticks until the last backward ends, transfers' latency taken out."""
    tasks = [
        task._replace(duration=0) if task.kind in (TaskKind.OPTIMIZER, TaskKind.PIPELINE_COMMUNICATION) else task
        for task in program.tasks
    ]
    bare = Program(program.rank_classes, program.streams, tuple(t._replace(transfers=()) for t in tasks), (), 1.0)
    return round(step_time(bare) * 1e12)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@given(ranks=st.integers(2, 6), microbatches=st.integers(1, 9))
@settings(max_examples=25)
def test_gpipe_and_1f1b_take_their_closed_form(schedule: str, ranks: int, microbatches: int) -> None:
    # Huang et al. 2019; Narayanan et al. 2021, section 2.2.1: (m + p - 1) (t_f + t_b)
    small, plan, stage = uniform(ranks, microbatches, schedule)
    expected = (microbatches + ranks - 1) * (stage.forward_ticks + stage.backward_ticks)
    assert without_optimizer(lower(small, plan)) == expected


@given(ranks=st.integers(2, 4), rounds=st.integers(1, 3), chunks=st.integers(2, 3))
@settings(max_examples=20)
def test_interleaving_divides_the_bubble_by_the_chunks(ranks: int, rounds: int, chunks: int) -> None:
    # Narayanan et al. 2021, section 2.2.2: bubble (p - 1) (t_f + t_b) / v, with t_f and t_b of all v chunks
    small, plan, stage = uniform(ranks, ranks * rounds, "interleaved", chunks)
    each = stage.forward_ticks + stage.backward_ticks
    assert without_optimizer(lower(small, plan)) == (ranks * rounds * chunks + ranks - 1) * each


@given(cases())
@settings(max_examples=60, deadline=None)
def test_all_granularities_agree_where_nothing_contends(case: Case) -> None:
    small, plan = case.build()
    times = {step_time(lower(small, plan, granularity), "longest_path") for granularity in Granularity}
    assert len(times) == 1


@given(cases())
@settings(max_examples=60, deadline=None)
def test_the_search_evaluates_exactly_what_operators_give(case: Case) -> None:
    small, plan = case.build()
    fine = step_time(lower(small, plan, Granularity.OPERATOR))
    assert SimulatedCost(small).evaluate(plan).step_time == pytest.approx(fine, rel=1e-9)  # rates are floats


def test_whole_passes_are_not_exact_where_tensor_and_pipeline_share_a_nic() -> None:
    # tensor groups of 4 on nodes of 2 with one NIC: the case that must not be evaluated by whole passes
    small = problem(nodes=4, devices=2, nics=1, batch=8, bandwidth=1e8)
    plan = complete(small, Layout(tensor=4, pipeline=2))
    coarse, fine = (step_time(lower(small, plan, g)) for g in (Granularity.ACTION, Granularity.SEGMENT))
    assert coarse < fine
    assert SimulatedCost(small).evaluate(plan).step_time == fine


@given(cases())
@settings(max_examples=60, deadline=None)
def test_every_evaluator_bounds_the_next(case: Case) -> None:
    small, plan = case.build()
    program = lower(small, plan, Granularity.SEGMENT)
    longest = step_time(program, "longest_path")
    assert SimulatedCost(small).bound(plan) <= longest <= step_time(program)


@given(cases())
@settings(max_examples=60, deadline=None)
def test_folded_equals_unfolded(case: Case) -> None:
    small, plan = case.build()
    folded, unfolded = (lower(small, plan, Granularity.ACTION, folded=flag) for flag in (True, False))
    paths = [step_time(program, "longest_path") for program in (folded, unfolded)]
    if case.own_nics:
        assert paths[0] == paths[1]
        assert step_time(folded) == pytest.approx(step_time(unfolded), rel=1e-9)  # rates are floats
    else:
        # a shared NIC shows as contention when unfolded, which the longest path leaves out
        assert paths[1] <= paths[0]


@given(cases())
@settings(max_examples=60, deadline=None)
def test_memory_returns_to_its_level_and_peaks_as_the_search_is_told(case: Case) -> None:
    small, plan = case.build()
    told = SimulatedCost(small).peak_memory(plan)
    for granularity in Granularity:
        program = lower(small, plan, granularity)
        timeline = simulate(program)
        assert timeline.peak_memory == told
        for index, profile in enumerate(timeline.memory):
            assert profile.totals[-1] == sum(c.size for c in program.resident if c.rank_class == index)


@given(cases())
@settings(max_examples=60, deadline=None)
def test_operations_run_in_the_order_of_the_schedule(case: Case) -> None:
    small, plan = case.build()
    timeline = simulate(lower(small, plan, Granularity.SEGMENT))
    kinds = {ActionKind.FORWARD: TaskKind.FORWARD, ActionKind.BACKWARD: TaskKind.BACKWARD}
    for index, rank_class in enumerate(timeline.rank_classes):
        position = plan.schedule.rank_of(rank_class.stages[0])
        expected = [(kinds[a.kind], a.stage, a.microbatch) for a in plan.schedule.orders[position]]
        assert list(timeline.order(index)) == expected


@given(cases(), st.floats(1.1, 10))
@settings(max_examples=60, deadline=None)
def test_more_bandwidth_is_never_slower(case: Case, factor: float) -> None:
    small, plan = case.build()
    links = {
        name: type(link)(link.latency, link.bandwidth * factor)
        for name, link in (("intra_node", small.cluster.intra_node), ("inter_node", small.cluster.inter_node))
    }
    faster = replace(small, cluster=replace(small.cluster, **links))
    assert (
        step_time(lower(faster, plan, Granularity.ACTION)) <= step_time(lower(small, plan, Granularity.ACTION)) + 1e-9
    )


def test_one_rank_does_all_its_work_one_after_another() -> None:
    small = problem(devices=1, batch=3)
    plan = complete(small, Layout())
    costs = StageCosts(small)
    stage = costs.of(plan).stages[0]
    step = optimizer_step(small.cluster, small.training, plan, stage.parameters, stage.parameter_tensors)
    work = 3 * (stage.forward_ticks + stage.backward_ticks) + idle_ticks(small.cluster, step)
    assert step_time(lower(small, plan)) == to_seconds(work)


def test_full_recompute_adds_exactly_one_forward_of_the_layers() -> None:
    small = problem(devices=1, batch=1)
    layers = sum(
        cost.forward_ticks
        for name, cost in StageCosts(small).of(complete(small, Layout())).stages[0].blocks
        if name.startswith("layers")
    )
    plain, full = (
        step_time(lower(small, complete(small, Layout(recompute=how)))) for how in (Recompute.NONE, Recompute.FULL)
    )
    assert full - plain == pytest.approx(to_seconds(layers), rel=1e-9)


def test_zero_shares_the_optimizer_state_and_gathers_parameters() -> None:
    small = problem(batch=8, precision="bf16")
    plans = [complete(small, Layout(data=8, zero=zero)) for zero in (0, 1)]
    count = StageCosts(small).of(plans[0]).parameters[0]
    peaks = [SimulatedCost(small).peak_memory(plan) for plan in plans]
    # AdamW in mixed precision keeps 12 bytes a parameter; sharing them 8 ways saves 7/8
    assert peaks[0] - peaks[1] == 12 * count - 12 * -(-count // 8)
    collectives = [
        [
            task.origin.operators.split()[0]
            for task in lower(small, plan).tasks
            if task.kind is TaskKind.DATA_COMMUNICATION
        ]
        for plan in plans
    ]
    assert set(collectives[0]) == {"all_reduce"}
    assert set(collectives[1]) == {"reduce_scatter", "all_gather"}


def test_tied_embeddings_are_summed_between_the_first_and_the_last_stage() -> None:
    small = problem(devices=2, tied=True)
    program = lower(small, complete(small, Layout(pipeline=2)))
    tied = [task for task in program.tasks if "tied" in task.origin.operators]
    assert len(tied) == 1
    classes = {program.streams[stream].rank_class for stream in tied[0].streams}
    assert classes == {0, 1} and {program.streams[s].kind for s in tied[0].streams} == {StreamKind.DATA}
    single = problem(devices=1, tied=True)
    assert not any("tied" in task.origin.operators for task in lower(single, complete(single, Layout())).tasks)


def test_overlap_hides_gradients_under_backward() -> None:
    small = problem(batch=8, layers=16, hidden=512, ffn=2048, bandwidth=3e10)
    times = [
        step_time(lower(small, complete(small, Layout(data=8, overlap_gradients=overlap)))) for overlap in (True, False)
    ]
    assert times[0] < times[1]
