"""The bound is never above a step, and is the step itself where one path says all."""

from dataclasses import replace

import pytest

from meshwise.simulator.engine import step_time
from meshwise.simulator.operator_graph import Block, Operator, OperatorGraph, OperatorKind, Tensor
from meshwise.strategies.bounds.durations import PassTicks, TickTables
from meshwise.strategies.bounds.step_time import StepBounds, least_step_time
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.lowering.rank_classes.machine import Machine, RankProfile
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.offloading import WHOLE_FRACTION, Offloading
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.space import layouts

from ..problems import problem
from ..search.scenarios import usual_scenario

FAST, SLOW = 1e12, 1e7


def bound_and_step(layout: Layout, bandwidth: float = 1e9, *, clipped: bool = False) -> tuple[float, float]:
    devices = layout.data * layout.tensor * layout.pipeline
    small = problem(devices=devices, bandwidth=bandwidth)
    small = replace(small, training=replace(small.training, gradient_clipping=clipped))
    plan = complete(small, layout)
    return SimulatedCost(small).plan_bound(plan), step_time(lower(small, plan))


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(microbatch=2),
        Layout(tensor=4),
        Layout(data=4),
        Layout(data=2, tensor=2),
        Layout(data=4, overlap_gradients=False),
        Layout(data=4, zero=1),
        Layout(data=4, zero=2),
        Layout(data=4, zero=2, overlap_gradients=False),
        Layout(data=4, gradient_reduction="parameter_server"),
    ],
    ids=lambda layout: repr(layout),
)
def test_ranks_that_wait_for_no_other_stage_are_bounded_by_what_they_do(layout: Layout, clipped: bool) -> None:
    bound, step = bound_and_step(layout, clipped=clipped)
    assert bound == step


@pytest.mark.parametrize("pipeline", [2, 4])
@pytest.mark.parametrize("bandwidth", [1e9, FAST])
def test_microbatches_that_follow_one_another_take_the_way_there_and_back_each(pipeline: int, bandwidth: float) -> None:
    bound, step = bound_and_step(Layout(pipeline=pipeline, schedule="naive"), bandwidth)
    assert bound == step


@pytest.mark.parametrize(
    "layout",
    [
        # the last stage takes longest, so that it never waits once it began; its last gradient goes back to the first
        Layout(pipeline=4, schedule="gpipe"),
        Layout(pipeline=2, data=4, schedule="gpipe", zero=1),
        Layout(pipeline=2, data=4, schedule="gpipe", zero=2),
        Layout(pipeline=2, stages=(3, 5), schedule="gpipe"),
        Layout(pipeline=2, stages=(3, 5)),
        Layout(pipeline=2, stages=(1, 7)),
        # the first stage takes longest, and the last one's gradient is there before it has done its work
        Layout(pipeline=2, stages=(7, 1)),
        # nothing fills or drains: the busiest rank works all the time
        Layout(pipeline=4, schedule="pipedream"),
        Layout(pipeline=2, data=2, schedule="pipedream"),
        Layout(pipeline=2, data=2, schedule="pipedream_2bw", stages=(3, 5)),
        Layout(pipeline=2, data=2, schedule="pipedream_2bw", stages=(3, 5), overlap_gradients=False),
    ],
    ids=lambda layout: repr(layout),
)
def test_a_busiest_stage_that_never_waits_says_what_a_step_takes(layout: Layout) -> None:
    bound, step = bound_and_step(layout, FAST)
    assert bound == step


@pytest.mark.parametrize("offload", [Offloading(optimizer=WHOLE_FRACTION), Offloading(optimizer=(0.5,))])
@pytest.mark.parametrize("layout", [Layout(data=2), Layout(pipeline=2, schedule="naive")], ids=repr)
def test_the_update_on_hosts_is_bounded_to_the_copies_of_its_first_chunks(layout: Layout, offload: Offloading) -> None:
    bound, step = bound_and_step(replace(layout, offload=offload))
    assert step * (1 - 1e-6) <= bound <= step


@pytest.mark.parametrize("data", [2, 4])
@pytest.mark.parametrize("bandwidth", [SLOW, 1e9, FAST])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(zero=3),
        Layout(zero=3, reshard_after_forward=False),
        Layout(zero=2, pipeline=2),
        Layout(zero=3, pipeline=2, schedule="gpipe"),
        Layout(zero=1, pipeline=2, schedule="naive"),
        Layout(zero=1, pipeline=2, schedule="pipedream_2bw"),
        Layout(zero=2, pipeline=2, schedule="zb1p"),
        *(Layout(pipeline=2, schedule=each, chunks=2, zero=2) for each in ("interleaved", "zbv", "dualpipev")),
        Layout(zero=3, pipeline=2, offload=Offloading(parameters=WHOLE_FRACTION, optimizer=WHOLE_FRACTION)),
    ],
    ids=lambda layout: repr(layout),
)
def test_no_step_takes_less_than_its_bound(layout: Layout, bandwidth: float, data: int) -> None:
    bound, step = bound_and_step(replace(layout, data=data), bandwidth)
    assert 0 < bound <= step


def list_pass_ticks(durations: TickTables, plan: Plan, rank: RankProfile) -> PassTicks:
    """Return the ticks of all passes of a plan on a rank."""
    keys = durations.costs.find_keys(plan)
    return durations.count_pass_ticks(keys.passes, keys.stages, rank)


def machine_of(small: Problem, layout: Layout) -> tuple[StepBounds, Plan, Machine]:
    """Return the bounds of a problem, a plan of it and the machine of that."""
    costs, plan = StageCosts(small), complete(small, layout)
    return StepBounds(costs), plan, costs.machine(plan)


def sharded(bandwidth: float, speeds: tuple[tuple[int, float], ...] = ()) -> Problem:
    """Return a problem on two devices that are to share all states."""
    small = problem(devices=2, bandwidth=bandwidth)
    return replace(small, cluster=replace(small.cluster, speeds=speeds))


@pytest.mark.parametrize("speeds", [(), ((1, 0.5),)])
def test_on_fast_links_a_pass_waits_for_its_first_unit_or_for_the_last_bucket(
    speeds: tuple[tuple[int, float], ...],
) -> None:
    # every microbatch but the first gathers parameters before forward, and every one but the last waits for gradients,
    # which in fp32 are as large
    bounds, plan, machine = machine_of(sharded(FAST, speeds), Layout(data=2, zero=3))
    durations, count = bounds.durations, plan.num_microbatches
    work = max(sum(each) for each in (sum(list_pass_ticks(durations, plan, rank), ()) for rank in machine.ranks[0]))
    ((*_, first),), ending = durations.gather_ticks(plan, machine), durations.ending_ticks(plan, machine)
    ((*_, last),) = ending.bucket_reductions
    assert first == last > 0
    assert bounds.lower_bound(plan) == count * work + (count - 1) * first + last + ending.optimizer[0]
    kept = replace(plan, reshard_after_forward=False)
    assert bounds.lower_bound(kept) == count * work + (count - 1) * last + last + ending.optimizer[0]


def test_gradients_that_are_reduced_beneath_nothing_are_waited_for_one_and_all() -> None:
    layout = Layout(data=2, zero=3, overlap_gradients=False, reshard_after_forward=False)
    bounds, plan, machine = machine_of(sharded(FAST), layout)
    (forward,), (backward,) = list_pass_ticks(bounds.durations, plan, machine.ranks[0][0])
    ending, count = bounds.durations.ending_ticks(plan, machine), plan.num_microbatches
    (leaving,) = ending.bucket_reductions
    passes = count * (forward + backward)
    assert bounds.lower_bound(plan) == passes + (count - 1) * sum(leaving) + leaving[-1] + ending.optimizer[0]


@pytest.mark.parametrize("speeds", [(), ((1, 0.5),)])
def test_on_slow_links_passes_take_as_long_as_their_gathers(speeds: tuple[tuple[int, float], ...]) -> None:
    # a forward gathers all units and a backward all but the one that is kept; the first forward, on the rank that
    # runs it quickest, may have found all of them there
    bounds, plan, machine = machine_of(sharded(SLOW, speeds), Layout(data=2, zero=3))
    (units,), ending = bounds.durations.gather_ticks(plan, machine), bounds.durations.ending_ticks(plan, machine)
    (forward,) = min(list_pass_ticks(bounds.durations, plan, rank).forward for rank in machine.ranks[0])
    gathers = plan.num_microbatches * (sum(units) + sum(units[1:]))
    expected = gathers - (sum(units) - forward) + ending.bucket_reductions[0][-1] + ending.optimizer[0]
    assert bounds.lower_bound(plan) == expected


def test_on_slow_links_a_step_takes_as_long_as_the_reductions_of_its_busiest_position() -> None:
    small = problem(devices=4, bandwidth=SLOW)
    layout = Layout(data=2, pipeline=2, zero=3, reshard_after_forward=False)
    for stages in ((2, 6), (6, 2)):
        bounds, plan, machine = machine_of(small, replace(layout, stages=stages))
        leaving = bounds.durations.ending_ticks(plan, machine).bucket_reductions
        assert bounds.lower_bound(plan) == plan.num_microbatches * max(map(sum, leaving))


def test_what_follows_reductions_follows_them_however_slow_they_are() -> None:
    # a layer of 1024 fills a bucket of 25 MiB, so that a stage has several, which follow one another all step long
    small = problem(devices=4, bandwidth=SLOW, hidden=1024, ffn=4096, layers=4)
    layout = Layout(data=2, tensor=2, sequence_parallel=True, zero=2)
    bounds, plan, machine = machine_of(small, layout)
    ending = bounds.durations.ending_ticks(plan, machine)
    ((*most, last),) = ending.bucket_reductions
    assert most and ending.gather[0] > 0 and ending.replicated_sums[0] > 0
    reduced = plan.num_microbatches * (sum(most) + last)
    assert bounds.lower_bound(plan) == reduced + ending.replicated_sums[0] + ending.gather[0]


def test_of_passes_in_pairs_only_what_is_computed_counts_of_a_microbatch() -> None:
    # the first rank has both ends of the V, so the most blocks: half of the layers, and of the rest all
    layout, alone = Layout(tensor=2, pipeline=2, schedule="dualpipev", chunks=2), Layout(tensor=2)
    floor = SimulatedCost(problem(devices=2, batch=512, layers=4)).family_bound(alone)
    for bandwidth in (1e9, FAST):
        found = []
        for batch in (512, 1024):
            small = problem(devices=4, bandwidth=bandwidth, batch=batch)
            found.append(SimulatedCost(small).plan_bound(complete(small, layout)))
        assert found[1] - found[0] == pytest.approx(floor, rel=1e-9)


@pytest.mark.parametrize("stages", [(3, 5), (6, 2)])
def test_where_hosts_step_beneath_the_next_passes_only_passes_count(stages: tuple[int, ...]) -> None:
    layout = Layout(pipeline=2, schedule="pipedream_2bw", stages=stages, offload=Offloading(optimizer=WHOLE_FRACTION))
    bounds, plan, machine = machine_of(problem(devices=2), layout)
    forward, backward = list_pass_ticks(bounds.durations, plan, machine.ranks[0][0])
    assert bounds.lower_bound(plan) == plan.num_microbatches * max(
        sum(each) for each in zip(forward, backward, strict=True)
    )


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("parameters", [WHOLE_FRACTION, (0.5, 0.0)])
def test_a_host_that_has_parameters_reads_gradients_and_steps_as_they_come(
    parameters: tuple[float, ...], clipped: bool
) -> None:
    small = problem(devices=2)
    small = replace(small, training=replace(small.training, gradient_clipping=clipped))
    bounds, plan, machine = machine_of(small, Layout(pipeline=2, offload=Offloading(WHOLE_FRACTION, parameters)))
    assert bounds.tails(plan, machine) == (sum(bounds.durations.ending_ticks(plan, machine).norm),) * 2


def test_a_rank_without_states_on_its_host_is_not_waited_for() -> None:
    offloads = [Offloading(optimizer=each) for each in (WHOLE_FRACTION, (1.0, 0.0), (0.0, 1.0))]
    tails = []
    for offload in offloads:
        bounds, plan, machine = machine_of(problem(devices=2), Layout(pipeline=2, stages=(3, 5), offload=offload))
        tails.append(bounds.tails(plan, machine))
    whole, first, second = tails
    assert whole[1] > whole[0] > 0
    assert (first, second) == ((whole[0], 0), (0, whole[1]))


V = "0F0 3F0 3B0 0B0 0F1 3F1 3B1 0B1 \n 1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1"
SPLIT_V = "0F0 3F0 3I0 0I0 3W0 0W0 0F1 3F1 3I1 0I1 0W1 3W1 \n 1F0 2F0 2I0 1I0 1W0 2W0 1F1 2F1 2I1 1I1 1W1 2W1"


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("stages", [(4, 1, 2, 1), (1, 1, 2, 4), (3, 2, 1, 2)])
def test_of_written_orders_the_first_stage_reduces_last_and_of_split_ones_any(
    stages: tuple[int, ...], zero: int
) -> None:
    small = problem(devices=4, batch=4)
    for schedule in (V, SPLIT_V):
        layout = Layout(data=2, pipeline=2, schedule=schedule, stages=stages, zero=zero)
        bounds, plan, machine = machine_of(small, layout)
        ending = bounds.durations.ending_ticks(plan, machine)
        last = [row[-1] for row in ending.bucket_reductions]
        least = [min(last[0], last[3]), min(last[1], last[2])] if schedule == SPLIT_V else last[:2]
        after = zip(least, ending.optimizer, ending.gather, strict=True)
        assert bounds.tails(plan, machine) == tuple(map(sum, after))


def test_where_stages_are_anywhere_only_what_a_rank_does_counts() -> None:
    # the first stage is on the second rank
    layout = Layout(pipeline=2, schedule="1F0 1B0 1F1 1B1 \n 0F0 0F1 0B0 0B1", stages=(5, 3))
    bounds, plan, machine = machine_of(problem(devices=2, batch=2), layout)
    forward, backward = list_pass_ticks(bounds.durations, plan, machine.ranks[0][0])
    tails, work = bounds.tails(plan, machine), [2 * sum(each) for each in zip(forward, backward, strict=True)]
    assert work[0] > work[1]
    assert bounds.lower_bound(plan) == max(work[0] + tails[1], work[1] + tails[0])


@pytest.mark.parametrize("stages", [(1, 3, 1, 3), (2, 1, 3, 2), (2, 4, 1, 1)])
def test_of_several_stages_a_rank_the_first_fills_and_drains_and_all_are_work(stages: tuple[int, ...]) -> None:
    layout = Layout(pipeline=2, schedule="interleaved", chunks=2, stages=stages)
    bounds, plan, machine = machine_of(problem(devices=2), layout)
    passes, sends = (
        list_pass_ticks(bounds.durations, plan, machine.ranks[0][0]),
        bounds.durations.send_ticks(plan, machine),
    )
    kinds = bounds.costs.find_keys(plan).stages.kinds.kind_of
    forward, backward = ([ticks[kind] for kind in kinds] for ticks in passes)
    work = [plan.num_microbatches * sum(forward[at::2] + backward[at::2]) for at in range(2)]
    first, second = bounds.tails(plan, machine)
    fill, drain = forward[0] + sends.forward[0], backward[0] + sends.backward[1]
    assert bounds.lower_bound(plan) == max(work[0] + first, fill + work[1] + max(second, drain + first))


def test_passes_in_pairs_wait_for_no_reduction() -> None:
    layout = Layout(data=2, pipeline=2, schedule="dualpipev", chunks=2, zero=3)
    bounds, plan, machine = machine_of(problem(devices=4), layout)
    assert bounds.reduction_waits(plan, machine) == (0, 0)
    assert bounds.reduction_waits(replace(plan, zero=0), machine) == (0, 0)


def test_of_passes_in_pairs_the_slowest_rank_says_what_a_microbatch_takes() -> None:
    found = []
    for slow in ((0,), range(8)):
        steps = []
        for batch in (512, 1024):
            small = problem(devices=8, batch=batch, bandwidth=FAST)
            speeds = tuple((device, 0.5) for device in slow)
            small = replace(small, cluster=replace(small.cluster, speeds=speeds))
            layout = Layout(data=2, tensor=2, pipeline=2, schedule="dualpipev", chunks=2)
            steps.append(SimulatedCost(small).plan_bound(complete(small, layout)))
        found.append(steps[1] - steps[0])
    assert found[0] == pytest.approx(found[1], rel=1e-9)


@pytest.mark.parametrize("speeds", [((0, 0.5),), ((1, 0.25), (0, 0.5))])
@pytest.mark.parametrize("layout", [Layout(data=2), Layout(data=2, zero=1), Layout(data=2, zero=2)], ids=repr)
def test_the_slowest_rank_of_a_stage_says_what_a_step_takes(
    layout: Layout, speeds: tuple[tuple[int, float], ...]
) -> None:
    # but for the optimizer, of which the quickest rank's step is taken
    small = sharded(1e9, speeds)
    plan = complete(small, layout)
    bound, step = SimulatedCost(small).plan_bound(plan), step_time(lower(small, plan))
    assert 0.99 * step < bound < step


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b"])
def test_a_microbatch_reaches_a_stage_along_the_quickest_ranks(schedule: str) -> None:
    # rank 0 is the first stage of one column, rank 3 the second of the other: a microbatch meets one of them
    small = problem(devices=4, batch=4)
    small = replace(small, cluster=replace(small.cluster, speeds=((0, 0.5), (3, 0.5))))
    plan = complete(small, Layout(data=2, pipeline=2, schedule=schedule))
    costs = SimulatedCost(small)
    (path,) = costs.longest_paths([plan])
    assert costs.plan_bound(plan) <= path


SMALL = problem(nodes=2, devices=2, layers=7, batch=8)
"""Seven layers on two nodes of two devices."""


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_takes_less_than_computing_at_the_peak(seed: int) -> None:
    small, space = usual_scenario(seed)
    costs = SimulatedCost(small)
    steps = [costs.evaluate(complete(small, layout)).step_time for layout in layouts(small, space)]
    assert 0 < least_step_time(small) <= min(steps)


def test_what_reads_no_samples_need_not_run_for_every_sample() -> None:
    # a product of parameters alone, of 8,192^3 * 2 = 1.1e12 FLOP: a microbatch computes it once for all its samples
    dims = (("m", 8192), ("k", 8192), ("n", 8192))
    merge = Operator("merge", OperatorKind.MATMUL, dims, ("weights",), ("merged",), flops_per_point=2.0)
    tensors = [Tensor(name, ("m", "k"), (8192, 8192), "fp32") for name in ("weights", "merged")]
    alone = OperatorGraph(
        "alone", (Block("merge", (merge,), tuple(tensors), ("weights",), ("merged",), repeat=3),), sequence=1
    )
    peak = dict(SMALL.cluster.accelerator.peak_flops)[SMALL.training.dtype]
    # forward and one of two gradients, in each of three blocks, by 4 devices at their peak, whatever the batch is
    assert least_step_time(replace(SMALL, graph=alone)) == pytest.approx(2 * 3 * 2 * 8192**3 / (4 * peak))
