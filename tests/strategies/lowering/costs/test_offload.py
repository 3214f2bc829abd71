"""Host offload in a step: bytes over PCIe, memory to the byte on both sides, time by hand, and one truth for all."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from meshwise.simulator.engine import simulate, step_time
from meshwise.simulator.engine.longest_path import finish_times
from meshwise.simulator.machine.host import Pcie
from meshwise.simulator.machine.topology import Link, PcieTree
from meshwise.simulator.memory import CATEGORIES
from meshwise.simulator.program import Category, Program, TaskKind
from meshwise.simulator.timeline import Timeline
from meshwise.simulator.units import to_seconds
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.costs.optimizer import allocates_gradients
from meshwise.strategies.lowering.cuts import Granularity
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.offloading import NO_OFFLOADING, UPDATE_CHUNKS, Offloading, StepPlace
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import Recompute

from ...problems import problem
from ..test_lower import Case, cases

STATES, GRADIENT, PARAMETER = 12, 4, 2
"""Bytes of a parameter in bf16 with AdamW: fp32 main copy and two moments, fp32 gradient, itself."""

ACTIVATIONS = Offloading(activations=(1.0,))
PARAMETERS = Offloading(optimizer=(1.0,), parameters=(1.0,))
ON_DEVICE = Offloading(optimizer=(1.0,), step=StepPlace.DEVICE)


def hosted(pcie: float = 1e9, memory: float = 1e15, latency: float = 0.0, **changes: Any) -> Problem:
    """Return a small problem in bf16 whose hosts are reached over PCIe, a slot for every device."""
    return with_host(problem(**{"precision": "bf16"} | changes), pcie, memory, latency)


def with_host(small: Problem, pcie: float, memory: float = 1e15, latency: float = 0.0, shared: int = 1) -> Problem:
    ((node, count),) = small.cluster.nodes
    host = replace(node.host, memory_bandwidth=memory, pcie=Pcie(Link(latency, pcie), shared))
    return replace(small, cluster=replace(small.cluster, nodes=((replace(node, host=host), count),)))


def run(small: Problem, layout: Layout) -> Timeline:
    return simulate(lower(small, complete(small, layout)))


def ticks(program: Program) -> int:
    return int(finish_times(program)[1].max())


def copied(timeline: Timeline, way: str) -> float:
    """Return the bytes that all devices send to their hosts, or get from them."""
    end = {"to host": " out", "from host": " in"}[way]
    return sum(link.bytes * link.count for link in timeline.links if link.name.startswith("pcie") and end in link.name)


def kept(small: Problem, layout: Layout) -> list[int]:
    """Return the bytes that every layer of every stage keeps of a microbatch, all equal in a stage."""
    plan = complete(small, replace(layout, offload=NO_OFFLOADING))
    costs, layers = StageCosts(small).plan_costs(plan), dict(small.graph.occurrences)
    result = []
    for stage, cost in zip(plan.stages, costs.stages, strict=True):
        pairs = zip(stage.blocks, cost.blocks, strict=True)
        (size,) = {block.memory.kept_bytes for name, block in pairs if layers[name].layer}
        result.append(size)
    return result


def held(timeline: Timeline, category: Category, rank_class: int = 0) -> list[float]:
    """Return what a rank class holds of a category, in order of time."""
    return [usage[CATEGORIES.index(category)] for usage in timeline.memory[rank_class].usage]


# bytes
@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.3])
@pytest.mark.parametrize("zero", [0, 1])
def test_the_host_s_step_gets_gradients_and_gives_parameters(fraction: float, zero: int) -> None:
    small = hosted(devices=4)
    plan = complete(small, Layout(data=4, zero=zero, offload=Offloading(optimizer=(fraction,))))
    (parameters,) = StageCosts(small).plan_costs(plan).parameters
    share = -(-parameters // 4) if zero else parameters
    updated = -(-share * round(fraction * 10) // 10)
    timeline = simulate(lower(small, plan))
    assert copied(timeline, "to host") == pytest.approx(4 * updated * GRADIENT, rel=1e-12)
    assert copied(timeline, "from host") == pytest.approx(4 * updated * PARAMETER, rel=1e-12)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_the_device_s_step_gets_states_and_gives_them_back(fraction: float) -> None:
    small = hosted(devices=2)
    offload = Offloading(optimizer=(fraction,), step=StepPlace.DEVICE)
    timeline = run(small, Layout(data=2, offload=offload))
    (parameters,) = StageCosts(small).plan_costs(complete(small, Layout(data=2))).parameters
    updated = -(-parameters // round(1 / fraction))
    for way in ("to host", "from host"):
        assert copied(timeline, way) == pytest.approx(2 * updated * STATES, rel=1e-12)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_parameters_come_for_every_pass_and_gradients_leave_after_every_backward(microbatches: int) -> None:
    # what the last block of a forward reads is there for the backward that follows at once
    small = hosted(devices=1, batch=microbatches)
    timeline = run(small, Layout(offload=PARAMETERS))
    cost = StageCosts(small).plan_costs(complete(small, Layout()))
    whole, last = cost.parameters[0], cost.stages[0].blocks[-1].parameters
    assert copied(timeline, "from host") == microbatches * (2 * whole - last) * PARAMETER
    assert copied(timeline, "to host") == microbatches * whole * GRADIENT


def test_a_fraction_of_parameters_is_one_of_a_stage_s_blocks() -> None:
    # an embedding, 8 layers and a head: the first 5 of 10 blocks; the update moves what is on the device
    small = hosted(devices=1, batch=2)
    timeline = run(small, Layout(offload=Offloading((1.0,), (0.5,))))
    blocks = [block.parameters for block in StageCosts(small).plan_costs(complete(small, Layout())).stages[0].blocks]
    away, here = sum(blocks[:5]), sum(blocks[5:])
    assert copied(timeline, "from host") == pytest.approx((2 * 2 * away + here) * PARAMETER, rel=1e-12)
    assert copied(timeline, "to host") == pytest.approx((2 * away + here) * GRADIENT, rel=1e-12)


def test_with_zero_3_shards_come_from_the_host_and_shards_of_gradients_go_there() -> None:
    small = hosted(devices=4, batch=8)
    timeline = run(small, Layout(data=4, zero=3, offload=PARAMETERS))
    blocks = [
        block.parameters for block in StageCosts(small).plan_costs(complete(small, Layout(data=4))).stages[0].blocks
    ]
    assert all(count % 4 == 0 for count in blocks)  # else shards are rounded up
    # 4 ranks have a quarter each
    assert copied(timeline, "from host") == 2 * (2 * sum(blocks) - blocks[-1]) * PARAMETER
    assert copied(timeline, "to host") == 2 * sum(blocks) * GRADIENT


def test_the_host_adds_gradients_of_later_microbatches() -> None:
    # memory that 4 bytes a parameter and microbatch are written to, then read twice and written once to be added,
    # and read and written by the update: gradient and parameter once, states twice
    timelines = [run(hosted(devices=1, batch=m, memory=1e12), Layout(offload=PARAMETERS)) for m in (1, 3)]
    parameters = load_parameters(hosted(devices=1))
    into = [link.bytes for t in timelines for link in t.links if "memory" in link.name and " in" in link.name]
    update = (GRADIENT + PARAMETER + 2 * STATES) * parameters
    assert into[0] == pytest.approx(GRADIENT * parameters + update, rel=1e-12)
    assert into[1] == pytest.approx((3 + 2 * 3) * GRADIENT * parameters + update, rel=1e-12)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_the_host_reads_the_gradients_it_has_for_their_norm(fraction: float) -> None:
    offload = Offloading((1.0,), (fraction,))
    small = hosted(devices=1, batch=2, memory=1e9, pcie=1e12)
    clipped = replace(small, training=replace(small.training, gradient_clipping=True))
    plain, with_norm = (run(each, Layout(offload=offload)) for each in (small, clipped))
    blocks = [block.parameters for block in StageCosts(small).plan_costs(complete(small, Layout())).stages[0].blocks]
    away = sum(blocks[: round(len(blocks) * fraction)])
    into = [link.bytes for t in (plain, with_norm) for link in t.links if link.name.startswith("memory 0.0 in")]
    assert into[1] - into[0] == pytest.approx(GRADIENT * away, rel=1e-9)
    names = [span.operators for span in with_norm.spans]
    assert {"norm of gradients", "norm of gradients on host"} <= set(names)
    # a host whose memory is slow by far: the step waits for it to read them, after the last has been added
    assert with_norm.step_time - plain.step_time == pytest.approx(GRADIENT * away / 1e9, rel=0.01)


def load_parameters(small: Problem) -> int:
    """Return the parameters of a problem on one device."""
    return StageCosts(small).plan_costs(complete(small, Layout())).parameters[0]


# memory
@pytest.mark.parametrize("name", ["activations", "optimizer", "parameters"])
def test_one_fraction_a_rank_is_that_of_the_rank(name: str) -> None:
    small = hosted(devices=4, batch=8)
    uniform = Offloading(optimizer=(1.0,)) if name == "parameters" else NO_OFFLOADING
    each, none, half = (replace(uniform, **{name: fractions}) for fractions in ((1.0, 0.5, 0.0, 1.0), (), (0.5,)))
    whole = replace(uniform, **{name: (1.0,)})
    mixed, *same = (
        [p.peak for p in run(small, Layout(pipeline=4, offload=o)).memory] for o in (each, whole, half, none)
    )
    assert mixed == [same[0][0], same[1][1], same[2][2], same[0][3]]
    assert mixed[1] != same[0][1] != same[2][1]


@pytest.mark.parametrize("layout", [Layout(pipeline=4), Layout(data=2, pipeline=2, zero=3)])
def test_a_fraction_of_0_is_no_offload(layout: Layout) -> None:
    small, zero = hosted(devices=4, batch=8), (0.0,) * layout.pipeline
    programs = [
        lower(small, complete(small, replace(layout, offload=offload)))
        for offload in (NO_OFFLOADING, Offloading(zero, zero, zero))
    ]
    one, other = programs
    assert (
        one.num_tasks == other.num_tasks
        and one.streams == other.streams
        and one.resident_memory == other.resident_memory
    )
    assert [list(w.pieces) for w in one.work] == [list(w.pieces) for w in other.work]
    for column in ("work_of", "flow_of", "stream_of", "predecessor_of", "predecessor_start"):
        assert (getattr(one, column) == getattr(other, column)).all()
    assert ticks(one) == ticks(other)


# time
def passes(small: Problem) -> tuple[list[int], list[int], int]:
    """Return the ticks of every block's forward and backward on one device, and of the optimizer."""
    program = lower(small, complete(small, Layout()))
    (optimizer,) = {work.duration for work in program.work if work.kind is TaskKind.OPTIMIZER}
    blocks = StageCosts(small).plan_costs(complete(small, Layout())).stages[0].blocks
    return [b.forward_ticks for b in blocks], [b.backward_ticks for b in blocks], optimizer


def four_layers(pcie: float) -> tuple[Problem, int]:
    """Return a network of an embedding, four layers and a head on one device, and the ticks of a layer's copy."""
    small = hosted(devices=1, batch=1, layers=4, pcie=pcie)
    (size,) = kept(small, Layout())
    return small, round(size / pcie * 1e12)


def test_copies_beneath_computing_take_no_time() -> None:
    small, copy = four_layers(1e12)
    (_, f, *_), (*_, b, _), _ = passes(small)
    assert copy < min(f, b)
    found = [ticks(lower(small, complete(small, Layout(offload=each)))) for each in (NO_OFFLOADING, ACTIVATIONS)]
    assert found[0] == found[1]


def test_slow_copies_of_parameters_are_what_a_step_waits_for() -> None:
    # an embedding, two layers and a head on one device
    pcie, memory = 1e6, 1e15
    small = hosted(devices=1, batch=1, layers=2, pcie=pcie, memory=memory)
    forward, backward, _ = passes(small)
    blocks = StageCosts(small).plan_costs(complete(small, Layout())).stages[0].blocks
    counts, head = [block.parameters for block in blocks], blocks[-1]
    loss = sum(taken for _, taken in head.passes.backward.segments[: head.work.segments.num_loss_segments])
    come, leave = ([round(count * each / pcie * 1e12) for count in counts] for each in (PARAMETER, GRADIENT))
    assert min(come) > max(forward) + max(backward)
    assert counts[1] == counts[2] > 2 * max(counts[0], counts[3])
    # everything comes for forward, and after the loss the second layer again, while the head's gradients leave; those
    # of the second layer, of the first one and of the embedding leave then, beneath which the others come and compute
    down = sum(come) + forward[3] + loss + come[2] + backward[2]
    up = leave[2] + leave[1] + leave[0]
    update = (GRADIENT + PARAMETER + 2 * STATES) * sum(counts) / memory * 1e12
    program = lower(small, complete(small, Layout(offload=PARAMETERS)))
    assert ticks(program) == pytest.approx(down + up + update, abs=program.num_tasks)


@pytest.mark.parametrize("overlap", [True, False])
def test_shards_come_before_the_gather_and_leave_after_the_reduction(overlap: bool) -> None:
    small = hosted(devices=2, batch=4, layers=3, pcie=1e7, bandwidth=1e8)
    timeline = run(small, Layout(data=2, zero=3, overlap_gradients=overlap, offload=PARAMETERS))
    found: dict[str, list[tuple[float, float]]] = {}
    for span in timeline.spans:
        found.setdefault(span.operators, []).append((span.start, span.end))
    for name in complete(small, Layout(data=2)).stages[0].blocks:
        pairs = (
            (f"parameters of {name} from host", f"all_gather parameters of {name}"),
            (f"reduce_scatter gradients of {name} .. {name}", f"gradients of {name} to host"),
        )
        for first, then in pairs:
            assert len(found[first]) == len(found[then]) > 1
            assert all(one[1] <= other[0] for one, other in zip(found[first], found[then], strict=True))


@pytest.mark.parametrize("bandwidth", [1e6, 1e7, 1e8])
@pytest.mark.parametrize("offload", [ACTIVATIONS, PARAMETERS, ON_DEVICE])
def test_a_step_is_bound_by_what_pcie_carries(offload: Offloading, bandwidth: float) -> None:
    small = hosted(devices=2, batch=4, pcie=bandwidth)
    timeline = run(small, Layout(pipeline=2, offload=offload))
    ways = [link.bytes / bandwidth for link in timeline.links if link.name.startswith("pcie")]
    assert len(ways) == 4 and max(ways) <= timeline.step_time <= sum(ways) + run(small, Layout(pipeline=2)).step_time


def test_chunks_of_states_go_round_two_buffers() -> None:
    pcie = 1e7
    small = hosted(devices=1, batch=1, pcie=pcie)
    forward, backward, _ = passes(small)
    program = lower(small, complete(small, Layout(offload=ON_DEVICE)))
    (update,) = {work.duration for work in program.work if work.kind is TaskKind.OPTIMIZER}
    copy = round(STATES * load_parameters(small) / UPDATE_CHUNKS / pcie * 1e12)
    assert copy > update
    # in, update and out of a chunk, and the next one's in meanwhile, its update beneath the first one's out: two
    # chunks in 3 copies and an update, and two more in 2 copies and an update, for the way in waits for the way out
    assert UPDATE_CHUNKS == 8
    expected = 3 * copy + update + 3 * (2 * copy + update)
    assert ticks(program) == sum(forward) + sum(backward) + expected


def test_the_device_steps_its_share_while_the_host_steps_the_other() -> None:
    # the host's half takes longer by far: the device's is beneath it
    small = hosted(devices=1, batch=1, pcie=1e12, memory=1e9)
    half, whole = (lower(small, complete(small, Layout(offload=Offloading((part,))))) for part in (0.5, 1.0))
    forward, backward, optimizer = passes(small)
    before = sum(forward) + sum(backward)
    assert ticks(half) - before < 0.51 * (ticks(whole) - before)
    (device,) = {work.duration for work in half.work if work.kind is TaskKind.OPTIMIZER}
    assert device == pytest.approx(optimizer / 2, rel=0.01)


def test_states_come_when_the_host_has_added_all_gradients() -> None:
    small = hosted(devices=1, batch=3, pcie=1e9, memory=2e7)
    timeline = run(small, Layout(offload=replace(PARAMETERS, step=StepPlace.DEVICE)))
    added = max(span.end for span in timeline.spans if span.operators.endswith("added on host"))
    reduced = max(span.end for span in timeline.spans if span.kind is TaskKind.BACKWARD)
    came = min(span.start for span in timeline.spans if span.operators == "optimizer states from host")
    assert reduced < added <= came


def test_copies_and_collectives_share_the_slots_of_a_pcie_tree() -> None:
    # copies run beneath the collectives of tensor ranks that cross the same slots: neither has them alone
    small = hosted(1e8, devices=2, batch=4, layers=4)
    ((node, count),) = small.cluster.nodes
    tree = replace(node, network=PcieTree(Link(1e-6, 1e8), 1, 2, Link(1e-6, 1e8)))
    small = replace(small, cluster=replace(small.cluster, nodes=((tree, count),)))
    plan = complete(small, Layout(tensor=2, offload=ACTIVATIONS))
    shared = [step_time(lower(small, plan, granularity)) for granularity in Granularity]
    assert shared[0] == pytest.approx(shared[1], rel=1e-9)
    assert shared[0] > 1.1 * ticks(lower(small, plan)) * 1e-12  # each with all links to itself


LAYOUTS = (
    Layout(data=4),
    Layout(pipeline=4),
    Layout(pipeline=4, schedule="gpipe", recompute=Recompute.FULL),
    Layout(pipeline=4, schedule="interleaved", chunks=2),
    Layout(data=2, tensor=2, zero=3),
    Layout(data=2, pipeline=2, zero=3, reshard_after_forward=False),
    Layout(data=2, pipeline=2, zero=3, overlap_gradients=False),
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_endless_pcie_takes_no_time_and_a_real_one_saves_none(layout: Layout) -> None:
    endless, real = hosted(1e30, 1e30, devices=4, batch=8), hosted(2e8, devices=4, batch=8)
    everything = [ACTIVATIONS, Offloading((0.5,), activations=(0.5,), step=StepPlace.DEVICE)]
    everything += [replace(PARAMETERS, activations=(1.0,))] if layout.data == 1 or layout.zero == 3 else []
    for offload in everything:
        same = Offloading(optimizer=offload.optimizer, step=offload.step)  # the optimizer is where it is
        base = same if offload.step is StepPlace.HOST else NO_OFFLOADING
        plans = [complete(endless, replace(layout, offload=each)) for each in (base, offload)]
        without, program = (lower(endless, plan) for plan in plans)
        # a transfer of any bytes takes a tick at least; the host's step alone moves its memory
        assert ticks(program) <= ticks(without) + program.num_tasks
        slow = [ticks(lower(real, plan)) for plan in plans]
        assert slow[1] >= slow[0] or offload.parameters  # whose update moves no gradients and parameters


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_of_devices_behind_one_switch_share_it(layout: Layout) -> None:
    small = problem(devices=4, batch=8, precision="bf16")
    apart, shared = (with_host(small, 1e7, shared=each) for each in (1, 4))
    plan = complete(small, replace(layout, offload=ACTIVATIONS))
    alone, together = (simulate(lower(each, plan)) for each in (apart, shared))
    uplinks = [link for link in together.links if link.name.startswith("pcie switch") and "out" in link.name]
    switch = sum(link.bytes * link.count for link in uplinks)
    assert switch == copied(alone, "to host") and switch / 1e7 <= together.step_time
    assert together.step_time > alone.step_time
    assert together.peak_memory == alone.peak_memory


# one truth
def offloadings(pipeline: int) -> st.SearchStrategy[Offloading]:
    """Return the ways in which a pipeline of so many ranks may offload."""
    fractions = st.sampled_from([0.0, 0.3, 1.0])
    each = st.lists(fractions, min_size=pipeline, max_size=pipeline).map(tuple)
    step = st.sampled_from(list(StepPlace))
    usual = st.builds(_offloading, each, st.just((0.0,) * pipeline), each, step)
    whole = st.just((1.0,) * pipeline)
    return usual | st.builds(_offloading, whole, each, each, step)


def _offloading(
    optimizer: Sequence[float], parameters: Sequence[float], activations: Sequence[float], step: StepPlace
) -> Offloading:
    every = [tuple(each) if any(each) else () for each in (optimizer, parameters, activations)]
    return Offloading(every[0], every[1], every[2], step if every[0] else StepPlace.HOST)


@given(cases(zeros=(0, 1, 3), data_ranks=(1, 2)), st.data(), st.sampled_from([1e6, 1e9]))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_way_to_time_and_memory_agrees(case: Case, data: st.DataObject, pcie: float) -> None:
    small, plan = case.build()
    offload = data.draw(offloadings(case.pipeline))
    assume(not offload.parameters or _may_leave(small, plan, offload))
    small, plan = with_host(small, pcie, 1e10, 1e-6, 2), replace(plan, offload=offload)
    programs = *(lower(small, plan, granularity) for granularity in Granularity), lower(small, plan, folded=False)
    operators, chains, unfolded = (simulate(program) for program in programs)
    for other, rounding in ((operators, 1e-9), (unfolded, 1e-4)):  # rates of shared links
        assert chains.step_time == pytest.approx(other.step_time, rel=rounding, abs=1e-10)
        assert chains.peak_memory == other.peak_memory
    paths = [ticks(program) for program in programs]
    assert paths[2] <= paths[1] == paths[0]
    costs = SimulatedCost(small)
    assert costs.list_path_ticks([plan]) == paths[:1]
    assert costs.plan_bound(plan) <= to_seconds(paths[0]) <= chains.step_time
    assert chains.peak_memory == costs.peak_memory(plan) == simulate(programs[0], "longest_path").peak_memory
    begins = allocates_gradients(small.training, plan)
    for index, profile in enumerate(chains.memory):
        held = sum(c.size for c in programs[1].resident_memory if c.rank_class == index and not c.host)
        left = profile.usage[-1][CATEGORIES.index(Category.GRADIENTS)] if begins else 0
        assert profile.totals[-1] == held + left
        assert left > 0 or not begins or case.central
    for profile in chains.host_memory:
        assert profile.totals[-1] == profile.totals[0]


def _may_leave(small: Problem, plan: Plan, offload: Offloading) -> bool:
    tied = small.graph.tied and (plan.pipeline > 1 or any(0 < each < 1 for each in offload.parameters))
    return not tied and (plan.data == 1 or plan.zero == 3)


@pytest.mark.parametrize("layout", LAYOUTS[:4])
def test_events_take_the_longest_path_where_nothing_is_shared(layout: Layout) -> None:
    small = hosted(1e8, devices=4, batch=8, latency=1e-6)
    program = lower(small, complete(small, replace(layout, offload=ACTIVATIONS)))
    found = ticks(program)
    apart = [link for link in program.links if "pcie" in link.name]
    assert apart and found <= round(step_time(program) * 1e12)
