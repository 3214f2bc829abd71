"""Local batches: data ranks with microbatches of their own sizes."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshwise.simulator.collective import Collective
from meshwise.simulator.engine import simulate, step_time
from meshwise.simulator.machine.topology import Link, Mesh
from meshwise.simulator.program import Program, TaskKind
from meshwise.strategies.bounds.memory import PlanMemory
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.cuts import Granularity
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.mesh import DATA, PIPELINE, TENSOR, list_data_ranks
from meshwise.strategies.plan.offloading import Offloading
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.plan.rules import violations

from ..plan.test_parallelism import mixture
from ..plans import Case, any_cases
from ..problems import IDEAL, problem


@given(any_cases(ranks=8), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_a_list_of_equal_sizes_takes_the_very_ticks_and_bytes_of_the_number(case: Case, size: int) -> None:
    # `complete` makes a number of such a list: here the list itself is lowered, as one of several sizes is
    small, plan = case.build()
    number = plan.with_microbatch(size * plan.tensor_rows)
    plan = replace(plan, microbatch=(number.sequences,) * plan.data)
    for granularity in Granularity:
        one, other = (simulate(lower(small, each, granularity)) for each in (plan, number))
        assert one.step_time == other.step_time
        assert one.memory == other.memory
    one_cost, other_cost = SimulatedCost(small), SimulatedCost(small)
    assert one_cost.peak_memory(plan) == other_cost.peak_memory(number)
    assert one_cost.longest_paths([plan]) == other_cost.longest_paths([number])
    assert one_cost.plan_bound(plan) == other_cost.plan_bound(number)


def peaks(program: Program) -> dict[int, float]:
    """Return the most bytes on every rank."""
    memory = simulate(program, "longest_path").memory
    return {rank: each.peak for each in memory for rank in program.rank_classes[each.rank_class].ranks}


@given(any_cases(ranks=8), st.sampled_from(Granularity), st.data())
@settings(max_examples=40, deadline=None)
def test_a_rank_holds_what_it_holds_where_all_run_its_microbatch(
    case: Case, granularity: Granularity, data: st.DataObject
) -> None:
    small, plan = case.build()
    assume(not (plan.overlaps_passes or plan.offload))  # what a rank then holds at once may hang on times
    few = st.lists(st.integers(1, 3), min_size=plan.data // plan.expert, max_size=plan.data // plan.expert)
    sizes = [size * plan.tensor_rows for size in data.draw(few) for _ in range(plan.expert)]
    plan = replace(plan, microbatch=tuple(sizes))
    found = peaks(lower(small, plan, granularity))
    even = {size: peaks(lower(small, plan.with_microbatch(size), granularity)) for size in plan.sizes}
    of_rank = list_data_ranks(plan.mesh).tolist()
    assert found == {rank: even[sizes[of_rank[rank]]][rank] for rank in found}
    assert SimulatedCost(small).peak_memory(plan) == max(found.values())


AWAY = Offloading(optimizer=(1.0,), activations=(0.5,))
OTHERS = {
    "context ring": Layout(data=2, context=2, pipeline=2, microbatch=(3, 1)),
    "context ulysses": Layout(data=2, context=2, tensor=2, microbatch=(3, 1), attention=Attention.ULYSSES),
    "experts": Layout(data=4, expert=2, pipeline=2, microbatch=(3, 3, 1, 1)),
    "experts and zero": Layout(data=4, expert=2, tensor=2, microbatch=(1, 1, 3, 3), zero=2),
    "groups of shards": Layout(data=4, pipeline=2, microbatch=(3, 2, 2, 1), zero=3, zero_shards=2),
    "offload": Layout(
        data=4, pipeline=2, microbatch=(3, 2, 2, 1), offload=Offloading(optimizer=(1.0,), activations=(0.5,))
    ),
    "sliced boundaries": Layout(data=2, tensor=2, pipeline=2, microbatch=(3, 1), scatter_gather=True),
    "zb1p": Layout(data=4, pipeline=2, microbatch=(3, 2, 2, 1), schedule="zb1p"),
    "zbv": Layout(data=2, tensor=2, pipeline=2, microbatch=(3, 1), schedule="zbv", chunks=2),
    "dualpipev": Layout(data=4, expert=2, pipeline=2, microbatch=(3, 3, 1, 1), schedule="dualpipev", chunks=2),
    "dualpipev in tensor groups": Layout(
        data=2, tensor=2, pipeline=2, microbatch=(1, 3), schedule="dualpipev", chunks=2, recompute=Recompute.FULL
    ),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("nics", [1, 4])
def test_a_step_lies_between_those_of_its_smallest_and_its_largest_microbatch(name: str, nics: int) -> None:
    small = mixture(batch=32, nodes=2, devices=4, nics=nics, bandwidth=1e7)
    plan = complete(small, OTHERS[name])
    least, most = (step_time(lower(small, plan.with_microbatch(size))) for size in (min(plan.sizes), max(plan.sizes)))
    assert least < step_time(lower(small, plan)) <= most * (1 + 1e-9)


def test_two_speeds_with_work_to_match_finish_together() -> None:
    # no time but that of products: a FLOP takes a tick of 1e-12 s at speed 1, two at 0.5. So 2 sequences take as
    # long here as 1 there, and the step is that of two devices of speed 1 with microbatches of 2
    quick = replace(IDEAL, memory_bandwidth=1e30)
    fast = problem(devices=2, batch=12, accelerator=quick)
    mixed = replace(fast, cluster=replace(fast.cluster, speeds=((1, 0.5),)))
    layout = Layout(data=2, microbatch=(2, 1), overlap_gradients=False)
    plan = complete(mixed, layout)
    assert plan.num_microbatches == 4
    timeline = simulate(lower(mixed, plan))
    alone = problem(devices=1, accelerator=quick)
    stage = StageCosts(alone).plan_costs(complete(alone, Layout(microbatch=2))).stages[0]
    work = 4 * (stage.forward_ticks + stage.backward_ticks) / 1e12
    ends = [max(s.end for s in timeline.spans if s.rank_class == c and s.kind is TaskKind.BACKWARD) for c in (0, 1)]
    assert ends == [work, work]
    # all-reduce of gradients of 4 bytes over two: half goes each way, twice, at 1e9 byte/s, each after 1 us
    reduction = 2 * (1e-6 + fast.graph.num_parameters * 4 / 2 / 1e9)
    assert timeline.step_time == pytest.approx(work + reduction, rel=1e-9)
    same = complete(replace(fast, training=replace(fast.training, global_batch=16)), replace(layout, microbatch=2))
    assert timeline.step_time == step_time(lower(fast, same))
    # the other way round the slow device has 8 of 12 sequences
    against = step_time(lower(mixed, complete(mixed, replace(layout, microbatch=(1, 2)))))
    assert against - timeline.step_time == pytest.approx(work)


def test_a_boundary_has_the_sequences_of_its_data_rank() -> None:
    small = problem(devices=4, batch=8)
    program = lower(small, complete(small, Layout(data=2, pipeline=2, microbatch=(3, 1))))
    sent = [
        max(size for _, size in program.flows[flow].usage)
        for task, flow in enumerate(program.flow_of.tolist())
        if program.work[program.work_of[task]].kind is TaskKind.PIPELINE_COMMUNICATION
    ]
    # two microbatches there and back of two data ranks: 32 tokens of 64 fp32 numbers a sequence
    assert sorted(sent) == [1 * 32 * 64 * 4] * 4 + [3 * 32 * 64 * 4] * 4


Inside = Counter[tuple[TaskKind, int, int, float, float]]


def inside_passes(program: Program) -> dict[int, Inside]:
    """Return how many tasks of every kind, stage, ticks, bytes and memory run inside the passes of every rank."""
    ranks = [each.ranks for each in program.rank_classes]
    found: dict[int, Inside] = {rank: Counter() for row in ranks for rank in row}
    for task, (number, flow) in enumerate(zip(program.work_of.tolist(), program.flow_of.tolist(), strict=True)):
        work = program.work[number]
        if work.kind not in (TaskKind.PIPELINE_COMMUNICATION, TaskKind.DATA_COMMUNICATION, TaskKind.OPTIMIZER):
            moved = max(size for _, size in program.flows[flow].usage) if flow >= 0 else 0.0
            taken = sum(change.size for piece in work.pieces for change in (*piece.acquisitions, *piece.releases))
            for stream in program.streams_of(task):
                for rank in ranks[program.streams[stream].rank_class]:
                    found[rank][work.kind, work.stage, work.duration, moved, taken] += 1
    return found


@pytest.mark.parametrize("name", ["sliced boundaries", "context ulysses", "groups of shards", "offload", "zb1p"])
def test_the_passes_of_a_rank_take_what_they_take_where_all_run_its_microbatch(name: str) -> None:
    small = mixture(batch=32)
    plan = complete(small, OTHERS[name])
    found = inside_passes(lower(small, plan))
    even = {size: inside_passes(lower(small, plan.with_microbatch(size))) for size in plan.sizes}
    sizes = StageCosts(small).machine(plan).table.placed.sequences.tolist()
    assert found == {rank: even[sizes[rank]][rank] for rank in found}


def for_the_step(program: Program) -> dict[int, list[tuple[str, float, bool]]]:
    """Return what every rank holds for the whole step."""
    return {
        rank: [(str(c.category), c.size, c.host) for c in program.resident_memory if c.rank_class == index]
        for index, each in enumerate(program.rank_classes)
        for rank in each.ranks
    }


@pytest.mark.parametrize("framework", ["megatron", "torch"])
@pytest.mark.parametrize("name", ["offload", "groups of shards"])
def test_a_rank_keeps_the_buffers_of_its_microbatch(name: str, framework: str) -> None:
    small = mixture(batch=32)
    small = replace(small, training=replace(small.training, framework=framework))
    plan = complete(small, OTHERS[name])
    found = for_the_step(lower(small, plan))
    even = {size: for_the_step(lower(small, plan.with_microbatch(size))) for size in plan.sizes}
    sizes = StageCosts(small).machine(plan).table.placed.sequences.tolist()
    assert found == {rank: even[sizes[rank]][rank] for rank in found}
    assert found[4] != found[7]  # of the last stage, with microbatches of 3 and of 1


def test_larger_microbatches_may_have_collectives_of_more_phases() -> None:
    # between meshes a small gather is one ring, which is launched once: 10 us, 7/8 * (6 * 1 + 2 * 2) us of steps, and
    # 7/8 / 4 of the size over each NIC of 0.25 GB/s; a larger one goes through 2 levels, 25 us and 1/2 / 4 of the size:
    # from 6.25 us / 0.35 ns = 18 kB on, and a sequence is one of 8 kB
    small = problem(nodes=4, devices=4, nics=4, batch=16, bandwidth=1e9)
    ((node, count),) = small.cluster.nodes
    mesh, nic = Mesh(Link(1e-6, 1e10, launch=1e-5)), Link(2e-6, 2.5e8, launch=1e-5)
    meshes = ((replace(node, network=mesh, nic=nic), count),)
    small = replace(small, cluster=replace(small.cluster, nodes=meshes))
    layout = Layout(data=2, tensor=8, order=(TENSOR, DATA, PIPELINE), sequence_parallel=True)
    for sizes in ((1, 7), (7, 1)):
        plan = complete(small, replace(layout, microbatch=sizes))
        machine = StageCosts(small).machine(plan)
        phases = {}
        for group in range(len(machine.table.tables[TENSOR])):
            size = machine.batch(TENSOR, group)
            moved = size * 32 * 64 * 4.0  # an fp32 number for each of 64 features of 32 tokens
            phases[size] = len(machine.communicator(TENSOR, group).list_phases(Collective.ALL_GATHER, moved))
        assert phases == {1: 1, 7: 2}
        fine, chained = (step_time(lower(small, plan, granularity)) for granularity in Granularity)
        assert fine == pytest.approx(chained, rel=1e-9)


def test_the_bound_takes_no_send_for_longer_than_it_is() -> None:
    # the slow data rank, of microbatches of 1, has the most work and sends an eighth of what the other one sends
    small = problem(devices=4, batch=72, bandwidth=1e8)
    small = replace(small, cluster=replace(small.cluster, speeds=((1, 0.05), (3, 0.05))))
    plan = complete(small, Layout(data=2, pipeline=2, microbatch=(8, 1), stages=(1, 7)))
    cost = SimulatedCost(small)
    (path,) = cost.longest_paths([plan])
    assert 0.9 * path < cost.plan_bound(plan) <= path <= cost.evaluate(plan).step_time


def test_each_size_must_fit_the_devices_that_run_it() -> None:
    # the small device holds microbatches of 1 and the large one those of 3, not the other way round
    small = problem(nodes=2, devices=1, batch=8)
    ((node, _),) = small.cluster.nodes
    need = PlanMemory(StageCosts(small)).peak(complete(small, Layout(data=2)))
    tight = replace(node, accelerator=replace(node.accelerator, memory=need))
    small = replace(small, cluster=replace(small.cluster, nodes=((node, 1), (tight, 1))))
    cost = SimulatedCost(small)
    assert [cost.fits(complete(small, Layout(data=2, microbatch=sizes))) for sizes in ((3, 1), (1, 3))] == [True, False]
    simulated = simulate(lower(small, complete(small, Layout(data=2, microbatch=(3, 1)))))
    assert all(profile.peak <= profile.capacity for profile in simulated.memory)


def test_ranks_of_other_sizes_are_not_alike() -> None:
    small = problem(batch=32)
    for sizes, classes in (((2, 2, 2, 2), 2), ((3, 3, 1, 1), 4), ((1, 2, 2, 3), 6)):
        plan = complete(small, Layout(data=4, pipeline=2, microbatch=sizes))
        assert len(lower(small, plan).rank_classes) == classes


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(data=4, microbatch=(4, 3, 2, 1), tensor=2), [4, 4, 3, 3, 2, 2, 1, 1]),
        (Layout(data=4, microbatch=(4, 3, 2, 1), pipeline=2), [4, 3, 2, 1, 4, 3, 2, 1]),
        (Layout(data=4, microbatch=(4, 3, 2, 1), pipeline=2, zero=1, zero_shards=2), [4, 3, 2, 1, 4, 3, 2, 1]),
        (Layout(data=2, microbatch=(3, 1), pipeline=4, order=(DATA, PIPELINE, TENSOR)), [3, 3, 3, 3, 1, 1, 1, 1]),
    ],
)
def test_the_size_of_a_rank_is_that_of_its_data_rank(layout: Layout, expected: list[int]) -> None:
    small = problem(batch=sum(layout.microbatch) * 8)  # type: ignore[arg-type]
    plan = complete(small, layout)
    assert StageCosts(small).machine(plan).table.placed.sequences.tolist() == expected


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(data=4, microbatch=(2, 1, 1)), "one size a data rank: data(4) sizes, met 3; nearest: [2, 1, 1, 1]"),
        (Layout(data=2, microbatch=(2, 1, 1)), "one size a data rank: data(2) sizes, met 3; nearest: [2, 1]"),
        (Layout(data=2, microbatch=()), "one size a data rank: data(2) sizes, met 0; nearest: [1, 1]"),
        (Layout(data=400_000, microbatch=(2,)), "data(400000) sizes, met 1; nearest: [2, 2, 2, 2, 2, 2, 2, 2, ..., 2]"),
        (Layout(data=20, microbatch=(0,) * 20), "every data rank, met [0, 0, 0, 0, 0, 0, 0, 0, ..., 0]; nearest: [1, "),
        (Layout(data=2, microbatch=(3, 0)), "at least 1 on every data rank, met [3, 0]; nearest: [3, 1]"),
        (
            Layout(data=2, microbatch=(4, 1)),
            "microbatches * sum(microbatch) = global_batch: sum([4, 1]) = 5 divides global_batch(16); "
            "nearest sum: 4 or 8",
        ),
        (Layout(data=2, microbatch=(14, 4)), "sum([14, 4]) = 18 divides global_batch(16); nearest sum: 16"),
        (Layout(data=2, tensor_rows=2, microbatch=(3, 1)), "tensor_rows(2) divides microbatch, met 3; nearest: 4"),
        (
            Layout(data=4, expert=2, microbatch=(2, 2, 3, 1)),
            "the expert(2) data ranks 2 to 3 have equal sizes, met [3, 1]; nearest: [2, 2]",
        ),
    ],
)
def test_what_does_not_divide_is_refused(layout: Layout, message: str) -> None:
    small = mixture(batch=16, devices=layout.data * layout.tensor_rows)
    (broken,) = [each for each in violations(small, layout) if each.field == "microbatch"]
    assert message in broken.message
    with pytest.raises(ValueError, match="microbatch"):
        complete(small, layout)


def test_a_document_keeps_the_sizes_and_knows_equal_ones_as_a_number() -> None:
    small = problem(batch=32)
    plan = complete(small, Layout(data=4, pipeline=2, microbatch=(3, 3, 1, 1)))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert "4 microbatches of 3 on 2 data ranks and 1 on 2" in plan.describe()
    number = complete(small, Layout(data=4, pipeline=2, microbatch=2))
    assert complete(small, Layout(data=4, pipeline=2, microbatch=(2, 2, 2, 2))) == number
    assert Plan.from_json(number.to_json() | {"microbatch": [2, 2, 2, 2]}) == number
