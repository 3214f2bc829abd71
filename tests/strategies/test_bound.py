"""The bound is never above a step, and is the step itself where one path says all."""

from dataclasses import replace

import pytest

from simulator.engine import step_time
from strategies.completion import complete
from strategies.cost_model import SimulatedCost
from strategies.layout import Layout
from strategies.lowering import lower
from strategies.offloading import WHOLE, Offloading

from .problems import problem

FAST, SLOW = 1e12, 1e7


def bound_and_step(layout: Layout, bandwidth: float = 1e9, *, clipped: bool = False) -> tuple[float, float]:
    devices = layout.data * layout.tensor * layout.pipeline
    small = problem(devices=devices, bandwidth=bandwidth)
    small = replace(small, training=replace(small.training, gradient_clipping=clipped))
    plan = complete(small, layout)
    return SimulatedCost(small).bound(plan), step_time(lower(small, plan))


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
    ],
    ids=lambda layout: repr(layout),
)
def test_a_busiest_stage_that_never_waits_says_what_a_step_takes(layout: Layout) -> None:
    bound, step = bound_and_step(layout, FAST)
    assert bound == step


@pytest.mark.parametrize("offload", [Offloading(optimizer=WHOLE), Offloading(optimizer=(0.5,))])
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
        Layout(zero=3, pipeline=2, offload=Offloading(parameters=WHOLE, optimizer=WHOLE)),
    ],
    ids=lambda layout: repr(layout),
)
def test_no_step_takes_less_than_its_bound(layout: Layout, bandwidth: float, data: int) -> None:
    bound, step = bound_and_step(replace(layout, data=data), bandwidth)
    assert 0 < bound <= step
