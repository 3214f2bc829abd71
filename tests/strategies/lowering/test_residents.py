"""What ranks and hosts hold where parameters and states are on hosts, to the byte."""

from dataclasses import replace
from itertools import pairwise

import pytest

from meshwise.simulator.engine import simulate
from meshwise.simulator.program import Category
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.offloading import NO_OFFLOADING, UPDATE_CHUNKS, Offloading, StepPlace
from meshwise.strategies.plan.recomputation import Recompute

from ..problems import problem
from .costs.test_offload import held, hosted, kept, load_parameters, run

STATES, GRADIENT, PARAMETER = 12, 4, 2
"""Bytes of a parameter in bf16 with AdamW: fp32 main copy and two moments, fp32 gradient, itself."""

ACTIVATIONS = Offloading(activations=(1.0,))
PARAMETERS = Offloading(optimizer=(1.0,), parameters=(1.0,))


def test_one_rank_s_host_holds_every_block_that_leaves() -> None:
    # slow copies: the first layer's is the last to come back, and the sixth has left before the first comes
    small, layout = hosted(devices=1, batch=1, pcie=1e6), Layout(offload=ACTIVATIONS)
    (profile,), (size,) = run(small, layout).host_memory, kept(small, layout)
    assert profile.peak == 6 * size
    assert sorted(set(profile.totals)) == [n * size for n in range(7)]


def test_parameters_of_two_units_at_most_are_on_the_device() -> None:
    small = hosted(devices=1, batch=2)
    timeline = run(small, Layout(offload=PARAMETERS))
    blocks = [block.parameters for block in StageCosts(small).plan_costs(complete(small, Layout())).stages[0].blocks]
    pairs = [first + second for first, second in pairwise(blocks)]
    assert max(held(timeline, Category.PARAMETERS)) == PARAMETER * max(pairs)
    assert max(held(timeline, Category.GRADIENTS)) == GRADIENT * max(pairs)
    assert held(timeline, Category.PARAMETERS)[-1] == held(timeline, Category.GRADIENTS)[-1] == 0
    assert max(held(timeline, Category.OPTIMIZER)) == 0
    (profile,) = timeline.host_memory
    assert set(profile.totals) == {(STATES + GRADIENT + PARAMETER) * sum(blocks)}


def test_tied_parameters_are_on_the_host_once() -> None:
    small = hosted(devices=1, tied=True)
    (profile,) = run(small, Layout(offload=PARAMETERS)).host_memory
    assert profile.peak == (STATES + GRADIENT + PARAMETER) * load_parameters(small)


def test_with_zero_3_a_shard_from_the_host_is_gone_when_it_is_gathered() -> None:
    small = hosted(devices=4, batch=4)
    plans = [complete(small, Layout(data=4, zero=3, offload=each)) for each in (NO_OFFLOADING, PARAMETERS)]
    cost = StageCosts(small).plan_costs(plans[0])
    blocks, (parameters,) = [block.parameters for block in cost.stages[0].blocks], cost.parameters
    most = [max(held(simulate(lower(small, plan)), Category.PARAMETERS)) for plan in plans]
    pair = max(first + second for first, second in pairwise(blocks))
    assert most == [PARAMETER * (parameters // 4 + pair), PARAMETER * pair]


@pytest.mark.parametrize("step", [StepPlace.HOST, StepPlace.DEVICE])
def test_the_sum_of_gradients_is_held_also_where_copies_take_no_time(step: StepPlace) -> None:
    small = problem(devices=2, batch=2)  # nothing is said of what is between a device and its host
    small = replace(small, training=replace(small.training, framework="torch"))
    plan = complete(small, Layout(data=2, overlap_gradients=False, offload=Offloading(optimizer=(1.0,), step=step)))
    (parameters,) = StageCosts(small).plan_costs(plan).parameters
    flat = small.training.gradient_bytes * parameters
    assert max(held(simulate(lower(small, plan)), Category.BUFFERS)) >= flat


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_a_device_that_steps_has_two_chunks_of_states_from_the_end_of_its_passes(fraction: float) -> None:
    small = hosted(devices=1, pcie=1e8)
    offload = Offloading(optimizer=(fraction,), step=StepPlace.DEVICE)
    states = held(run(small, Layout(offload=offload)), Category.OPTIMIZER)
    away = STATES * load_parameters(small) * fraction
    stays = STATES * load_parameters(small) - away
    assert states[0] == states[-1] == stays
    assert max(states) == stays + 2 * away / UPDATE_CHUNKS


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("step", list(StepPlace))
def test_the_copy_of_gradients_that_was_summed_is_there_until_it_is_read(fraction: float, step: StepPlace) -> None:
    # torch's reducer copies gradients into one piece after the last backward; here it is what fills a device most
    small = hosted(devices=2, batch=2, layers=2, vocab=4096)
    small = replace(small, training=replace(small.training, framework="torch"))
    layout = Layout(data=2, overlap_gradients=False, recompute=Recompute.FULL)
    plan = complete(small, replace(layout, offload=Offloading(optimizer=(fraction,), step=step)))
    timeline, (parameters,) = simulate(lower(small, plan)), StageCosts(small).plan_costs(plan).parameters
    chunks = 2 * STATES * parameters * fraction / UPDATE_CHUNKS if step is StepPlace.DEVICE else 0
    assert timeline.peak_memory == SimulatedCost(small).peak_memory(plan)
    assert timeline.peak_memory == timeline.memory[0].totals[-1] + GRADIENT * parameters + chunks
