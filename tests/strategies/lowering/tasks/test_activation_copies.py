"""Activations on the host: what leaves, what is held on both sides meanwhile, and what waits."""

from dataclasses import replace

import pytest

from meshwise.simulator.program import TaskKind
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.offloading import NO_OFFLOADING, Offloading
from meshwise.strategies.plan.recomputation import Recompute

from ..costs.test_offload import copied, four_layers, hosted, kept, passes, run, ticks

ACTIVATIONS = Offloading(activations=(1.0,))


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_activations_leave_and_come_back_but_for_the_two_blocks_in_the_buffers(
    recompute: Recompute, microbatches: int
) -> None:
    # 8 layers a rank, and every backward follows its forward at once: its last two layers are still in the buffers
    small, layout = hosted(devices=2, batch=2 * microbatches), Layout(data=2, recompute=recompute, offload=ACTIVATIONS)
    timeline, (size,) = run(small, layout), kept(small, layout)
    for way in ("to host", "from host"):
        assert copied(timeline, way) == 2 * microbatches * (8 - 2) * size


def test_in_a_pipeline_all_of_a_stage_leaves_where_another_pass_comes_between() -> None:
    # 1F1B on two ranks, four layers each: on the first a backward follows the forward of a later microbatch or
    # another backward, on the second that of its own
    small, layout = hosted(devices=2, batch=5), Layout(pipeline=2, offload=ACTIVATIONS)
    first, second = kept(small, layout)
    expected = 5 * 4 * first + 5 * (4 - 2) * second
    timeline = run(small, layout)
    assert copied(timeline, "to host") == copied(timeline, "from host") == expected


@pytest.mark.parametrize(("fraction", "layers"), [(1.0, 4), (0.75, 3), (0.7, 3), (0.25, 1), (0.01, 1)])
def test_a_fraction_of_activations_is_one_of_a_stage_s_layers_rounded_up(fraction: float, layers: int) -> None:
    small = hosted(devices=2, batch=5)
    layout = Layout(pipeline=2, offload=Offloading(activations=(fraction, 0.0)))
    timeline = run(small, layout)
    assert copied(timeline, "to host") == 5 * layers * kept(small, layout)[0]
    first = [name for name in complete(small, layout).stages[0].blocks if name.startswith("layer")][:layers]
    left = {span.operators for span in timeline.spans if span.kind is TaskKind.HOST_COPY}
    assert left == {f"activations of {name} {way}" for name in first for way in ("to host", "from host")}


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL])
def test_a_device_holds_two_buffers_in_place_of_what_left(recompute: Recompute) -> None:
    # 1F1B: the first of four ranks holds four microbatches of two layers, of which each keeps as much
    small, layout = hosted(devices=4, batch=8, pcie=1e6), Layout(pipeline=4, recompute=recompute)
    timelines = [run(small, replace(layout, offload=offload)) for offload in (NO_OFFLOADING, ACTIVATIONS)]
    peaks = [[profile.peak for profile in timeline.memory] for timeline in timelines]
    sizes = kept(small, layout)
    assert peaks[0][0] - peaks[1][0] == (4 * 2 - 2) * sizes[0]
    assert peaks[0][1] - peaks[1][1] == (3 * 2 - 2) * sizes[1]
    assert max(peaks[1]) == SimulatedCost(small).peak_memory(complete(small, replace(layout, offload=ACTIVATIONS)))


def test_the_host_holds_what_left_until_it_has_come_back() -> None:
    # GPipe: every forward, then every backward from the first microbatch on, so that all four layers of all leave
    small, layout = hosted(devices=2, batch=4, pcie=1e7), Layout(data=1, pipeline=2, schedule="gpipe")
    timeline = run(small, replace(layout, offload=ACTIVATIONS))
    first, second = kept(small, layout)
    assert copied(timeline, "to host") == 4 * 4 * (first + second)
    (profile,) = timeline.host_memory
    # two layers of the second rank's first backward have come back into its buffers before its last have left
    assert profile.peak == 4 * 4 * first + (4 * 4 - 2) * second
    assert profile.totals[-1] == 0


def test_slow_copies_of_activations_are_what_a_step_waits_for() -> None:
    small, copy = four_layers(1e7)
    forward, backward, optimizer = passes(small)
    (e, f, *_, h), (eb, b, *_, hb) = forward, backward
    assert copy > sum(forward) + sum(backward)
    # the third layer waits for the first one's copy and the fourth for the second's; both stay. The second comes
    # back when the fourth's backward has left its buffer, then the first
    there = e + f + 2 * copy + f + h
    back = hb + b + 2 * copy + b + eb
    assert ticks(lower(small, complete(small, Layout(offload=ACTIVATIONS)))) == there + back + optimizer
