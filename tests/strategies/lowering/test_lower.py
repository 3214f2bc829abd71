"""Lowering: closed forms of the schedules, and several ways to the same answer."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshwise.simulator.engine import simulate, step_time
from meshwise.simulator.machine.topology import Crossbar, Fabric, LeafSpine
from meshwise.simulator.program import Program, StreamKind, TaskKind
from meshwise.simulator.units import to_seconds
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.lowering.stage_costs import StageCost, StageCosts
from meshwise.strategies.lowering.timing import optimizer_ticks
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.framework import FRAMEWORKS
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.mesh import DATA, PIPELINE, TENSOR
from meshwise.strategies.plan.partition import Stage
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import FirstLayers, Recomputation, Recompute, SomeOperators
from meshwise.strategies.schedules.schedule import SCHEDULES, ActionKind

from ..problems import IDEAL, problem

EXAMPLES = 60


RECOMPUTATIONS: tuple[Recomputation, ...] = (
    *Recompute,
    FirstLayers(Recompute.FULL, 1),
    FirstLayers(Recompute.SELECTIVE, 1),
    SomeOperators(("input_norm", "activation")),
    SomeOperators(("qkv", "projection", "attention_residual", "down")),
)


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
    recompute: Recomputation
    overlap: bool
    scatter: bool
    order: tuple[str, ...]
    fabric: Fabric
    speeds: tuple[tuple[int, float], ...]
    slow_link: float
    launch: float
    slowdown: float
    shards: int = 0
    reshard: bool = True
    central: bool = False
    clipping: bool = False
    framework: str = "megatron"

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
            fabric=self.fabric,
            launch=self.launch,
        )
        cluster = replace(
            small.cluster,
            speeds=tuple((device % ranks, factor) for device, factor in self.speeds),
            link_speeds=(("nic 0 out", self.slow_link),) if self.slow_link != 1 else (),
            overlap_slowdown=self.slowdown,
        )
        training = replace(small.training, gradient_clipping=self.clipping, framework=self.framework)
        small = replace(small, cluster=cluster, training=training)
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
            order=self.order,
            zero_shards=self.shards,
            reshard_after_forward=self.reshard,
            gradient_reduction="parameter_server" if self.central and not self.zero else "all_reduce",
        )
        return small, complete(small, layout)


@st.composite
def cases(draw: st.DrawFn, zeros: tuple[int, ...] = (0, 1), data_ranks: tuple[int, ...] = (1, 2, 3)) -> Case:
    tensor, pipeline = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    data, zero = draw(st.sampled_from(data_ranks)), draw(st.sampled_from(zeros))
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
        zero=zero,
        sequence_parallel=tensor > 1 and draw(st.booleans()),
        recompute=draw(st.sampled_from(RECOMPUTATIONS)),
        overlap=draw(st.booleans()),
        scatter=draw(st.booleans()),
        order=draw(st.sampled_from([(PIPELINE, DATA, TENSOR), (DATA, PIPELINE, TENSOR), (TENSOR, DATA, PIPELINE)])),
        fabric=draw(st.sampled_from([Crossbar(), LeafSpine(1, 4.0), LeafSpine(2, 2.0, rail_optimized=True)])),
        speeds=tuple(draw(st.dictionaries(st.integers(0, 47), st.sampled_from([0.5, 0.9]), max_size=2)).items()),
        slow_link=draw(st.sampled_from([1.0, 1.0, 0.5])),
        launch=draw(st.sampled_from([0.0, 0.0, 1e-6])),
        slowdown=draw(st.sampled_from([1.0, 1.0, 1.2])),
        shards=2 if zero and data == 4 and draw(st.booleans()) else 0,
        reshard=zero < 3 or draw(st.booleans()),
        central=draw(st.booleans()),
        clipping=draw(st.booleans()),
        framework=draw(st.sampled_from(sorted(FRAMEWORKS))),
    )


def uniform(ranks: int, microbatches: int, schedule: str, chunks: int = 1) -> tuple[Problem, Plan, StageCost]:
    """Return a pipeline of equal stages: the same one layer on each, with transfers that cost nothing."""
    small = problem(devices=ranks, layers=ranks * chunks, batch=microbatches, bandwidth=1e30)
    layout = Layout(pipeline=ranks, schedule=schedule, chunks=chunks)
    stages = tuple(Stage((f"layers.{index}",)) for index in range(ranks * chunks))
    plan = replace(complete(small, layout), stages=stages)
    return small, plan, StageCosts(small).plan_costs(plan).stages[0]


def without_optimizer(program: Program) -> int:
    """Return the ticks until the last backward ends, transfers' latency taken out."""
    free = (TaskKind.OPTIMIZER, TaskKind.PIPELINE_COMMUNICATION)
    work = tuple(replace(w, duration=0) if w.kind in free else w for w in program.work)
    bare = replace(program, work=work, flow_of=np.full(program.num_tasks, -1))
    return round(step_time(bare) * 1e12)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@given(ranks=st.integers(2, 6), microbatches=st.integers(1, 9))
@settings(max_examples=25, deadline=None)
def test_gpipe_and_1f1b_take_their_closed_form(schedule: str, ranks: int, microbatches: int) -> None:
    # Huang et al. 2019; Narayanan et al. 2021, section 2.2.1: (m + p - 1) (t_f + t_b)
    assume(SCHEDULES[schedule].find_violation(ranks, microbatches, 1) is None)
    small, plan, stage = uniform(ranks, microbatches, schedule)
    expected = (microbatches + ranks - 1) * (stage.forward_ticks + stage.backward_ticks)
    assert without_optimizer(lower(small, plan)) == expected


@given(ranks=st.integers(2, 4), rounds=st.integers(1, 3), chunks=st.integers(2, 3))
@settings(max_examples=20, deadline=None)
def test_interleaving_divides_the_bubble_by_the_chunks(ranks: int, rounds: int, chunks: int) -> None:
    # Narayanan et al. 2021, section 2.2.2: bubble (p - 1) (t_f + t_b) / v, with t_f and t_b of all v chunks
    small, plan, stage = uniform(ranks, ranks * rounds, "interleaved", chunks)
    each = stage.forward_ticks + stage.backward_ticks
    assert without_optimizer(lower(small, plan)) == (ranks * rounds * chunks + ranks - 1) * each


@given(cases())
@settings(max_examples=EXAMPLES, deadline=None)
def test_operations_run_in_the_order_of_the_schedule(case: Case) -> None:
    small, plan = case.build()
    timeline = simulate(lower(small, plan))
    kinds = {ActionKind.FORWARD: TaskKind.FORWARD, ActionKind.BACKWARD: TaskKind.BACKWARD}
    for index, rank_class in enumerate(timeline.rank_classes):
        position = plan.actions.find_rank(rank_class.stages[0])
        expected = [(kinds[a.kind], a.stage, a.microbatch) for a in plan.actions.orders[position]]
        assert list(timeline.order(index)) == expected


@given(cases())
@settings(max_examples=30, deadline=None)
def test_a_straggler_is_never_faster_and_never_worse_than_all_being_slow(case: Case) -> None:
    small, plan = case._replace(speeds=()).build()
    slow = tuple((device, 0.5) for device in range(small.cluster.num_devices))
    times = [
        step_time(
            lower(replace(small, cluster=replace(small.cluster, speeds=speeds)), plan, folded=False), "longest_path"
        )
        for speeds in ((), slow[:1], slow)
    ]
    assert times == sorted(times)


def test_one_rank_does_all_its_work_one_after_another() -> None:
    small = problem(devices=1, batch=3)
    plan = complete(small, Layout())
    costs = StageCosts(small)
    stage = costs.plan_costs(plan).stages[0]
    step = optimizer_ticks(IDEAL, small.training, plan, costs.plan_parameters(plan).positions[0])
    work = 3 * (stage.forward_ticks + stage.backward_ticks) + step
    assert step_time(lower(small, plan)) == to_seconds(work)


def test_full_recompute_adds_exactly_one_forward_of_the_layers() -> None:
    small = problem(devices=1, batch=1)
    layers = sum(
        cost.forward_ticks
        for name, cost in zip(
            complete(small, Layout()).stages[0].blocks,
            StageCosts(small).plan_costs(complete(small, Layout())).stages[0].blocks,
            strict=True,
        )
        if name.startswith("layers")
    )
    plain, full = (
        step_time(lower(small, complete(small, Layout(recompute=how)))) for how in (Recompute.NONE, Recompute.FULL)
    )
    assert full - plain == pytest.approx(to_seconds(layers), rel=1e-9)


def test_zero_shares_the_optimizer_state_and_gathers_parameters() -> None:
    small = problem(batch=8, precision="bf16")
    plans = [complete(small, Layout(data=8, zero=zero)) for zero in (0, 1)]
    count = StageCosts(small).plan_costs(plans[0]).parameters[0]
    peaks = [SimulatedCost(small).peak_memory(plan) for plan in plans]
    # AdamW in mixed precision keeps 12 bytes a parameter; sharing them 8 ways saves 7/8
    assert peaks[0] - peaks[1] == 12 * count - 12 * -(-count // 8)
    collectives = [
        [
            work.pieces[0].operators.split()[0]
            for work in lower(small, plan).work
            if work.kind is TaskKind.DATA_COMMUNICATION
        ]
        for plan in plans
    ]
    assert set(collectives[0]) == {"all_reduce"}
    assert set(collectives[1]) == {"reduce_scatter", "all_gather"}


def test_tied_embeddings_are_summed_between_the_first_and_the_last_stage() -> None:
    small = problem(devices=2, tied=True)
    program = lower(small, complete(small, Layout(pipeline=2)))
    tied = [t for t, w in enumerate(program.work_of) if "tied" in program.work[w].pieces[0].operators]
    assert len(tied) == 1
    streams = [program.streams[stream] for stream in program.streams_of(tied[0])]
    assert {s.rank_class for s in streams} == {0, 1} and {s.kind for s in streams} == {StreamKind.DATA}
    single = problem(devices=1, tied=True)
    names = [piece.operators for w in lower(single, complete(single, Layout())).work for piece in w.pieces]
    assert not any("tied" in name for name in names)


def test_overlap_hides_gradients_under_backward() -> None:
    small = problem(batch=8, layers=16, hidden=512, ffn=2048, bandwidth=3e10)
    times = [
        step_time(lower(small, complete(small, Layout(data=8, overlap_gradients=overlap)))) for overlap in (True, False)
    ]
    assert times[0] < times[1]
