"""What the machine does to a step: stragglers, mixed devices, placement, tenants, launching, host offload."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import product

import pytest

from meshwise.simulator.collective import Algorithm, Collective, CollectiveCurve
from meshwise.simulator.engine import simulate, step_ticks, step_time
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Tenant
from meshwise.simulator.machine.host import Pcie
from meshwise.simulator.machine.topology import LeafSpine, Link, Switch
from meshwise.simulator.program import StreamKind, TaskKind
from meshwise.simulator.spans import Span
from meshwise.simulator.timeline import Timeline
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.cuts import Cuts, Granularity
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.lowering.tasks.variants import BACKWARD_PASS
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.offloading import NO_OFFLOADING, Offloading
from meshwise.strategies.plan.problem import Problem

from ...problems import problem

LAYOUT = Layout(data=2, tensor=2, pipeline=2)


def on_cluster(one: Problem, **changes: object) -> Problem:
    """Return the problem on its cluster with some fields changed."""
    return replace(one, cluster=replace(one.cluster, **changes))  # type: ignore[arg-type]


def seconds(one: Problem, layout: Layout = LAYOUT, engine: str = "discrete_event") -> float:
    return step_time(lower(one, complete(one, layout)), engine)


def test_a_slow_replica_holds_up_the_other_one() -> None:
    small = problem(devices=8)
    slow = on_cluster(small, speeds=tuple((device, 0.5) for device in range(4)))
    all_slow = on_cluster(small, speeds=tuple((device, 0.5) for device in range(8)))
    layout = Layout(data=2, tensor=4)
    assert seconds(small, layout) < seconds(slow, layout) == seconds(all_slow, layout)


def test_mixed_devices_run_at_the_pace_of_the_slower_and_fit_where_each_position_fits() -> None:
    small = problem(nodes=2, devices=4, nics=4)
    ((node, _),) = small.cluster.nodes
    weak = Accelerator("weak", (("fp32", 5e11),), memory=5e11, memory_bandwidth=5e11)
    mixed = on_cluster(small, nodes=((node, 1), (replace(node, accelerator=weak), 1)))
    all_weak = on_cluster(small, nodes=((replace(node, accelerator=weak), 2),))
    layout = Layout(data=2, tensor=4)
    assert seconds(small, layout) < seconds(mixed, layout) == seconds(all_weak, layout)
    timeline = simulate(lower(mixed, complete(mixed, layout)))
    assert sorted(profile.capacity for profile in timeline.memory) == [5e11, 1e12]
    need = SimulatedCost(small).peak_memory(complete(small, layout))
    tight = replace(weak, memory=need - 1)
    cramped = on_cluster(small, nodes=((node, 1), (replace(node, accelerator=tight), 1)))
    assert not SimulatedCost(cramped).fits(complete(cramped, layout))


def test_a_bad_placement_costs_what_it_should() -> None:
    # 8 nodes of one device, 2 on a leaf, uplinks 2 times narrower than a leaf's two NICs: one NIC wide.
    # In order, a ring over 4 ranks crosses each leaf's uplink once; with every second rank elsewhere twice.
    small = problem(nodes=8, devices=1, nics=1, bandwidth=4e7, batch=8, fabric=LeafSpine(2, 2.0))
    good, bad = (0, 1, 2, 3, 4, 5, 6, 7), (0, 2, 4, 6, 1, 3, 5, 7)
    plan = complete(small, Layout(data=8))
    size = SimulatedCost(small).costs.plan_costs(plan).parameters[0] * 4
    crossing = 2 * 7 / 8 * size / 1e7
    ring = on_cluster(small, algorithms=((Collective.ALL_REDUCE, Algorithm.RING),))
    times = [seconds(ring, Layout(data=8, overlap_gradients=False, placement=order)) for order in (good, bad)]
    assert times[1] - times[0] == pytest.approx(crossing, rel=1e-6)


@pytest.mark.parametrize("order", [("pipeline", "data", "tensor"), ("tensor", "pipeline", "data")])
def test_the_order_of_axes_says_who_are_neighbours(order: tuple[str, ...]) -> None:
    small = problem(nodes=2, devices=4, nics=4, bandwidth=1e8)
    inside = seconds(small, replace(LAYOUT, order=order))
    assert (inside == seconds(small)) == (order[-1] == "tensor")


def test_a_tenant_takes_its_share_of_the_network() -> None:
    small = problem(nodes=6, devices=1, nics=1, bandwidth=4e7, batch=8, fabric=LeafSpine(3, 3.0))
    alone = Layout(data=4, placement=(0, 1, 3, 4), overlap_gradients=False)
    busy = Tenant("neighbour", (2, 5), Collective.SEND, 1e6, 1e-3)
    idle = Tenant("neighbour", (2, 5), Collective.SEND, 1.0, 1e6)
    times = [seconds(on_cluster(small, tenants=(tenant,)), alone) for tenant in (idle, busy)]
    assert times[0] < times[1]
    assert seconds(on_cluster(small, tenants=(busy,)), alone, "longest_path") < times[1]


def test_small_kernels_wait_for_the_host() -> None:
    # with launches of 1 s the host is never ahead: the step is all launches and the last kernel
    small = problem(devices=1, batch=1, layers=1, launch=1.0)
    program = lower(small, complete(small, Layout()))
    launches = sum(
        work.duration for index in program.work_of.tolist() if (work := program.work[index]).kind is TaskKind.LAUNCH
    )
    kernels = seconds(problem(devices=1, batch=1, layers=1), Layout())
    assert launches / 1e12 <= seconds(small, Layout()) <= launches / 1e12 + kernels
    quick = seconds(problem(devices=1, batch=1, layers=1, launch=1e-12), Layout())
    assert kernels <= quick <= kernels + 1e-9


def test_hosts_of_megatron_launch_nothing_before_what_they_receive_is_there() -> None:
    one = problem()
    node = replace(one.cluster.first_node, host=replace(one.cluster.first_node.host, launch=20e-6))
    slow = on_cluster(one, nodes=((node, one.cluster.nodes[0][1]),))
    first: dict[str, float] = {}
    taken: dict[str, float] = {}
    for name in ("megatron", "torch"):
        own = replace(slow, training=replace(slow.training, framework=name))
        timeline = simulate(lower(own, complete(own, LAYOUT)))
        of_last = [span for span in timeline.spans if span.rank_class == len(timeline.rank_classes) - 1]
        arrived = min(span.end for span in of_last if span.stream is StreamKind.RECEIVE_FORWARD)
        first[name] = min(span.start for span in of_last if span.stream is StreamKind.LAUNCH) - arrived
        taken[name] = timeline.step_time
    assert first["megatron"] == 0.0  # torch's host has launched the pass before its input came
    assert first["torch"] < 0.0
    assert taken["megatron"] > taken["torch"]


def launched(framework: str, layout: Layout) -> Timeline:
    """Return one step whose host launches an operator in 20 us, operator by operator."""
    small = problem(layers=2, launch=20e-6)
    own = replace(small, training=replace(small.training, framework=framework))
    return simulate(lower(own, complete(own, layout), Granularity.OPERATOR))


def meet(first: Iterable[Span], second: Iterable[Span]) -> bool:
    """Return whether some span of the first overlaps one of the second on its rank."""
    pairs = product(first, second)
    return any(a.rank_class == b.rank_class and max(a.start, b.start) < min(a.end, b.end) for a, b in pairs)


@pytest.mark.parametrize(("framework", "wait"), [("megatron", False), ("megatron_deepspeed", True)])
def test_hosts_of_megatron_deepspeed_wait_for_collectives_and_passes(framework: str, wait: bool) -> None:
    spans = launched(framework, Layout(tensor=8, microbatch=2)).spans
    launches = [span for span in spans if span.kind is TaskKind.LAUNCH]
    collectives = [span for span in spans if span.kind is TaskKind.TENSOR_COMMUNICATION]
    assert collectives
    assert meet(launches, collectives) is not wait
    spans = launched(framework, Layout(data=8, microbatch=2)).spans
    forward = [span for span in spans if span.kind is TaskKind.FORWARD]
    backward = [span for span in spans if span.kind is TaskKind.LAUNCH and is_backward(span, spans)]
    assert backward
    assert meet(forward, backward) is not wait


def is_backward(launch: Span, spans: Iterable[Span]) -> bool:
    """Return whether the first kernel of its operator that runs after a launch is of its backward."""
    same = [span for span in spans if span.operators == launch.operators and span.microbatch == launch.microbatch]
    runs = [span for span in same if span.kind in (TaskKind.FORWARD, TaskKind.BACKWARD) and span.end > launch.end]
    return min(runs, key=lambda span: span.start).kind is TaskKind.BACKWARD if runs else False


@pytest.mark.parametrize(("microbatch", "launches"), [(4, 1), (2, 5)])
def test_softmax_is_one_kernel_for_multiples_of_four_heads(microbatch: int, launches: int) -> None:
    # one head of 8 on every tensor rank: 4 sequences have 4 squares of scores, 2 have 2
    small = problem(attention="unfused")
    costs = StageCosts(small)
    plan = complete(small, Layout(tensor=8, microbatch=microbatch))
    steps = costs.plan_costs(plan).stages[0].blocks[1].work.segments
    assert {step.num_launches for step in (*steps.forward, *steps.backward) if step.label == "softmax"} == {launches}


@pytest.mark.parametrize("zero", [2, 3])
def test_communication_slows_computing_by_no_more_than_its_factor(zero: int) -> None:
    small = problem(batch=8, layers=16, hidden=512, ffn=2048, bandwidth=3e11)
    slowed = on_cluster(small, overlap_slowdown=1.13)
    layout = Layout(data=8, zero=zero)
    assert seconds(small, layout) < seconds(slowed, layout) <= 1.13 * seconds(small, layout)
    assert seconds(slowed, layout, "longest_path") <= seconds(slowed, layout)
    apart = replace(layout, overlap_gradients=False)
    assert seconds(small, apart) == seconds(slowed, apart)  # nothing runs beneath what data ranks move


def test_a_unit_is_slowed_by_the_gather_of_the_next_one_and_the_reduction_of_the_last_one() -> None:
    # ZeRO 3 of 4 alike layers between embedding and head: of a backward all but the first unit compute beneath a
    # reduction, and all but the last beneath a gather
    small = on_cluster(problem(batch=8, layers=4, bandwidth=3e11), overlap_slowdown=1.5)
    plan = complete(small, Layout(data=8, zero=3))
    costs = StageCosts(small)
    machine = costs.machine(plan)
    cuts = Cuts(costs, plan, machine, Granularity.CHAIN)
    rank, stage = machine.rank(0), costs.plan_costs(plan).stages[0]
    slowed_ticks = cuts._list_slowed_ticks(0, BACKWARD_PASS, stage, costs.clock(rank))
    layer = stage.blocks[2]
    group, count = machine.communicator("data", 0), layer.parameters
    gather = group.ticks(Collective.ALL_GATHER, float(count * small.training.parameter_bytes))
    reduction = group.ticks(Collective.REDUCE_SCATTER, float(count * small.training.gradient_bytes))
    expected_ticks = costs.clock(rank).count_slowed_ticks(layer.backward_ticks, gather + reduction)
    assert len(slowed_ticks) == len(stage.blocks)
    assert slowed_ticks[2] == slowed_ticks[3] == expected_ticks > 0


@pytest.fixture
def hosted() -> Problem:
    """A node of four devices on two PCIe switches of one host."""
    small = problem(devices=4, batch=4, precision="bf16")
    ((node, count),) = small.cluster.nodes
    host = replace(node.host, memory_bandwidth=4e9, pcie=Pcie(Link(1e-6, 1e9), 2))
    return on_cluster(small, nodes=((replace(node, host=host), count),))


def test_offloaded_states_move_to_the_host(hosted: Problem) -> None:
    layout = Layout(data=4)
    plans = [complete(hosted, replace(layout, offload=offload)) for offload in (NO_OFFLOADING, Offloading((1.0,)))]
    kept, offloaded = (simulate(lower(hosted, plan)) for plan in plans)
    count = SimulatedCost(hosted).costs.plan_costs(plans[0]).parameters[0]
    # AdamW in mixed precision keeps 12 bytes a parameter, on each of four ranks
    assert kept.peak_memory - offloaded.peak_memory == 12 * count
    (profile,) = offloaded.host_memory
    assert profile.peak == 4 * 12 * count
    assert kept.step_time < offloaded.step_time
    assert SimulatedCost(hosted).peak_memory(plans[1]) == offloaded.peak_memory


def test_copies_run_on_their_own_streams_and_share_pcie(hosted: Problem) -> None:
    program = lower(hosted, complete(hosted, Layout(data=4, offload=Offloading(optimizer=(1.0,)))))
    kinds = {stream.kind for stream in program.streams}
    assert {StreamKind.TO_HOST, StreamKind.FROM_HOST, StreamKind.HOST} <= kinds
    timeline = simulate(program)
    use = {link.name.split()[0] + " " + link.name.split()[-1]: link for link in timeline.links if "pcie" in link.name}
    slots = [link for link in timeline.links if link.name.startswith("pcie switch")]
    assert slots and use
    count = SimulatedCost(hosted).costs.plan_costs(complete(hosted, Layout(data=4))).parameters[0]
    # two devices behind a switch: gradients of 4 bytes a parameter go up, parameters of 2 bytes come down
    assert {round(link.bytes / count) for link in slots} == {8, 4}


def test_in_switch_reduction_and_a_parameter_server_cost_what_they_should() -> None:
    one = problem(devices=8, bandwidth=1e7, batch=8)
    ((node, count),) = one.cluster.nodes
    assert isinstance(node.network, Switch)
    reducing = on_cluster(one, nodes=((replace(node, network=replace(node.network, reduces=True)), count),))
    server = on_cluster(one, algorithms=((Collective.ALL_REDUCE, Algorithm.PARAMETER_SERVER),))
    layout = Layout(data=8, overlap_gradients=False)
    ring, switch, central = (seconds(each, layout) for each in (one, reducing, server))
    size = SimulatedCost(one).costs.plan_costs(complete(one, layout)).parameters[0] * 4
    # a ring moves 2 * 7/8, the switch 1 + 1/8, the server's port 7 sizes in and as much out again
    assert (ring - switch) * 1e7 == pytest.approx((14 / 8 - 9 / 8) * size, rel=1e-2)
    assert (central - ring) * 1e7 == pytest.approx((14 - 14 / 8) * size, rel=1e-2)


def test_the_bottleneck_is_the_link_with_the_most_to_carry() -> None:
    small = problem(nodes=4, devices=2, nics=1, bandwidth=1e8)
    timeline = simulate(lower(small, complete(small, Layout(data=8))))
    assert timeline.bottleneck is not None and timeline.bottleneck.name.startswith("nic")
    assert timeline.bottleneck.utilisation == max(link.utilisation for link in timeline.links) <= 1
    inside = simulate(lower(problem(), complete(problem(), Layout(tensor=8)))).bottleneck
    assert inside is not None and inside.name.startswith("device")


def test_measured_groups_of_other_sizes_are_no_profile_of_one_another() -> None:
    # 2 ranks take 1 ms for every collective, 4 ranks 2 ms: the second plan takes as long as without the first one
    small = problem(devices=4)
    curves = tuple(
        CollectiveCurve(collective, ranks, ((1.0, ranks / 2 * 1e-3),))
        for collective in (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
        for ranks in (2, 4)
    )
    small = replace(small, cluster=replace(small.cluster, collectives=curves))
    plans = [complete(small, Layout(tensor=tensor, data=4 // tensor)) for tensor in (2, 4)]
    shared = StageCosts(small)
    ticks = [[step_ticks(lower(small, plan, costs=costs)) for plan in plans] for costs in (shared, None)]
    assert ticks[0] == ticks[1]
    assert shared.machine(plans[0]).rank(0) is not shared.machine(plans[1]).rank(0)
