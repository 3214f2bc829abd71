"""What people set today is in the space; layers of stages on devices of different speed, by hand and in a search."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import pytest

from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster, Node
from meshwise.simulator.machine.host import Host
from meshwise.simulator.machine.topology import Link, Switch
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import DECISIONS, Layout, Violation
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.plan.recomputation import FirstLayers, Recompute, SomeOperators
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.search import choices as choices_module
from meshwise.strategies.search.algorithms.best_first import BestFirst
from meshwise.strategies.search.choices import list_offloadings
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import Space, layouts
from meshwise.strategies.search.speed_division import divide_by_speed, find_position_times

from ..problems import problem


def mixed(layers: int) -> Problem:
    """Return a problem on a node of two fast devices and one of two that take twice as long for everything."""
    small = problem(nodes=2, devices=2, layers=layers)
    ((node, _),) = small.cluster.nodes
    fast = node.accelerator
    slow = replace(
        fast,
        name="slow",
        peak_flops=tuple((dtype, rate / 2) for dtype, rate in fast.peak_flops),
        memory_bandwidth=fast.memory_bandwidth / 2,
    )
    nodes = ((node, 1), (replace(node, accelerator=slow), 1))
    return replace(small, cluster=replace(small.cluster, nodes=nodes))


def test_a_device_that_takes_twice_as_long_gets_half_as_many_layers() -> None:
    # fast takes 1 a layer and slow 2: with 6 and 3 layers both end at 6. The order of ranks puts a stage on each node
    layout = Layout(data=2, pipeline=2)
    fast, slow = find_position_times(mixed(9), layout).layers
    assert slow == pytest.approx(2 * fast, rel=1e-6)
    counts = divide_by_speed(mixed(9), layout, (0, 1))
    assert sum(counts) == 9
    assert counts in ((6, 3), (7, 2))  # what is no layer runs on the last stage too


def test_of_microbatches_of_several_sizes_the_largest_counts() -> None:
    uneven, even = Layout(data=2, pipeline=2, microbatch=(1, 4)), Layout(data=2, pipeline=2, microbatch=4)
    assert find_position_times(mixed(9), uneven) == find_position_times(mixed(9), even)


def test_layouts_on_the_same_devices_have_the_same_paces_whatever_their_schedule() -> None:
    plain = Layout(data=2, pipeline=2)
    assert find_position_times(mixed(4), plain) == find_position_times(
        mixed(4), replace(plain, zero=1, schedule="gpipe")
    )


def mixed_problem() -> Problem:
    """Return 8 layers on a fast node of two devices and a slow one, whose compute and links are a third as fast."""
    fast = Accelerator("fast", (("bf16", 3e12),), memory=1e9, memory_bandwidth=3e11)
    slow = replace(fast, name="slow", peak_flops=(("bf16", 1e12),), memory_bandwidth=1e11)
    outside, host = Link(5e-6, 1e9), Host("host", 1e10)
    nodes = ((Node(fast, host, 2, Switch(Link(1e-6, 3e10)), 1, outside), 1),)
    nodes += ((Node(slow, host, 2, Switch(Link(1e-6, 1e10)), 1, replace(outside, bandwidth=3e8)), 1),)
    spec = Transformer(8, 256, 4, 4, 1024, vocab=512)
    return Problem(build(spec, 64, "bf16"), Cluster("mixed", nodes), Training(8, 64))


def test_stages_by_speed_beat_the_best_plan_of_those_that_take_all_devices_to_be_equal() -> None:
    problem = mixed_problem()
    costs = SimulatedCost(problem)
    knowing = search(BestFirst(), problem, costs=costs)
    equal = search(BestFirst(), problem, Space(stages=("even", "balanced")), costs=costs)
    assert knowing.best is not None and equal.best is not None
    assert knowing.gap == equal.gap == 0.0
    assert knowing.best.evaluation.step_time < equal.best.evaluation.step_time
    layers = [sum("layers" in name for name in stage.blocks) for stage in knowing.best.plan.stages]
    positions = knowing.best.plan.positions
    of_rank = [
        sum(n for n, at in zip(layers, positions, strict=True) if at == q) for q in range(knowing.best.plan.pipeline)
    ]
    assert of_rank[0] > of_rank[-1]  # the first ranks are on the fast node


SMALL = problem(nodes=2, devices=2, layers=7, batch=8)
"""Seven layers on two nodes of two devices."""


def test_interleaved_and_v_schedules_run_on_any_number_of_layers() -> None:
    # 7 layers on 2 ranks: the fuller one has 4, which 2 or 4 chunks divide; of 8 stages the last has the loss alone
    choices = {
        (layout.schedule, layout.chunks, layout.stages)
        for layout in layouts(SMALL, Space(pipeline=(2,), schedule=("interleaved", "zbv")))
    }
    # embedding and loss weigh as a layer each: 7 + 2 over 4 stages are 2, 3, 2, 2, of which both ends hold one less;
    # over 8 stages 1, 1, 1, 2, 1, 1, 1, 1: a stage of 2 layers where balanced stages have 1 is no choice
    counts = {("interleaved", 2), ("interleaved", 4), ("zbv", 2)}
    assert {(schedule, chunks) for schedule, chunks, _ in choices} == counts
    assert {stages for _, chunks, stages in choices if chunks == 2} == {"balanced"}
    assert {stages for _, chunks, stages in choices if chunks == 4} == {"balanced"}


def test_states_are_shared_by_all_or_by_a_node() -> None:
    shards = {(layout.zero, layout.zero_shards) for layout in layouts(SMALL, Space(data=(4,)))}
    assert shards == {(0, 0), *((zero, shards) for zero in (1, 2, 3) for shards in (0, 2))}


def test_layers_recompute_nothing_activations_alone_attention_a_part_or_all() -> None:
    recomputes = {layout.recompute for layout in layouts(SMALL, Space(pipeline=(1,)))}
    # a quarter, half and three quarters of 7 layers, rounded up: 2, 4 and 6
    parts = {FirstLayers(Recompute.FULL, count) for count in (2, 4, 6)}
    assert recomputes == {*Recompute, SomeOperators(("activation",)), *parts}


def test_offload_is_for_where_nothing_fits() -> None:
    small = problem(devices=4, layers=2, batch=4, hidden=256, ffn=1024)
    assert not any(layout.offload for layout in layouts(small))
    costs = SimulatedCost(small)
    spaces = Space(), Space(offload=list_offloadings())
    least, offloaded = (
        min(costs.peak_memory(complete(small, layout)) for layout in layouts(small, space)) for space in spaces
    )
    assert offloaded < least
    memory = (offloaded + least) / 2
    cluster = small.cluster.with_accelerators(lambda device: replace(device, memory=memory))
    tight = replace(small, cluster=cluster)
    result = search(BestFirst(), tight)
    assert result.best is not None and result.best.plan.offload
    assert result.scope is not None and "offload of optimizer states" in result.scope.tried
    # a known plan with more on the host fits too: what is proven is proven of all that the search may offload
    every = (SimulatedCost(tight).evaluate(complete(tight, each)) for each in layouts(tight, spaces[1]))
    assert result.best.evaluation.step_time <= min(evaluation.step_time for evaluation in every)
    assert "what the limits" not in str(result.scope)


def test_a_limit_of_a_decision_lists_no_layout_that_breaks_its_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    # a rule of its own for a decision that the layouts of a group share: slices need four stages
    def list_violations(of: Problem, layout: Layout) -> Iterator[Violation]:
        if layout.scatter_gather and layout.pipeline < 4:
            yield Violation("scatter_gather", f"scatter_gather needs 4 stages, met {layout.pipeline}")
        yield from violations(of, layout)

    monkeypatch.setattr(choices_module, "violations", list_violations)
    small = problem(devices=8, layers=8, batch=8)
    pipelines = {
        limit: {layout.pipeline for layout in layouts(small, Space(scatter_gather=limit, tensor=(2,)))}
        for limit in ((False,), (True,), (False, True))
    }
    assert pipelines == {(False,): {1, 2, 4}, (True,): {4}, (False, True): {1, 2, 4}}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, item in DECISIONS.items() for value in item.values],
    ids=str,
)
def test_a_limit_to_one_value_lists_legal_layouts(name: str, value: object) -> None:
    some_layouts = list(islice(layouts(SMALL, Space(**{name: (value,)})), 200))  # type: ignore[arg-type]
    assert any(getattr(layout, name) == value for layout in some_layouts)
    for layout in some_layouts:
        assert list(violations(SMALL, layout)) == []
        assert getattr(layout, name) == value or not DECISIONS[name].changes(layout)
