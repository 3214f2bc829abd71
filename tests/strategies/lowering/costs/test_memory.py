"""Memory of a plan by hand: what stays for a whole step, and what a stage takes."""

from dataclasses import replace

import pytest

from meshwise.simulator.program import Category
from meshwise.strategies.lowering.costs.memory import StageMemory, stage_memory
from meshwise.strategies.lowering.costs.offload import NO_HOST_SHARE, HostShare
from meshwise.strategies.lowering.costs.optimizer import Parameters
from meshwise.strategies.lowering.costs.recompute import BlockMemory
from meshwise.strategies.lowering.costs.weights import find_unit
from meshwise.strategies.lowering.residents import SINGLE_COPY, StateCopies, count_residents
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.lowering.tasks.fully_sharded import Sharing, list_changes
from meshwise.strategies.lowering.tasks.variants import FORWARD_PASS
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.offloading import WHOLE_FRACTION, Offloading
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Training

from ...problems import find_block_layout, problem

TRAINING = Training(32, 32, "fp32")
HELD = Parameters(1000, 10)


def plan(layout: Layout) -> Plan:
    return complete(problem(devices=layout.data * layout.pipeline), layout)


def held(
    layout: Layout,
    training: Training = TRAINING,
    parameters: Parameters = HELD,
    on_host: HostShare = NO_HOST_SHARE,
    several: StateCopies = SINGLE_COPY,
) -> list[int]:
    """Return bytes of parameters, gradients, optimizer states and buffers on the device, then those on the host."""
    device, host = count_residents(training, plan(layout), parameters, 12, on_host, several)
    assert [*device] == [Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER, Category.BUFFERS]
    return [*device.values(), *host.values()]


@pytest.mark.parametrize(
    ("zero", "expected"),
    # 1000 parameters of 4 bytes, gradients of 4 and two moments of 4; 4 ranks share one after the other
    [(0, [4000, 4000, 8000]), (1, [4000, 4000, 2000]), (2, [4000, 1000, 2000]), (3, [1000, 1000, 2000])],
)
def test_each_stage_of_zero_shares_one_thing_more(zero: int, expected: list[int]) -> None:
    assert held(Layout(data=4, zero=zero)) == [*expected, 12]


def test_fully_sharded_weights_of_16_bits_are_the_main_ones() -> None:
    # torch, 1000 parameters over 4 ranks: main weights and two moments of 4 bytes, 250 of each; beside them ZeRO 1
    # keeps all 1000 in bf16, of 2 bytes, and ZeRO 3 none
    training = replace(TRAINING, precision="bf16", framework="torch")
    sizes = {zero: held(Layout(data=4, zero=zero), training) for zero in (1, 3)}
    assert (sizes[1][0], sizes[1][2]) == (2000, 3000)
    assert (sizes[3][0], sizes[3][2]) == (0, 3000)


def test_weights_that_layers_multiply_by_in_fp8_are_kept_twice_more() -> None:
    # bf16: 2 bytes, gradients of 4; of 100 weights an fp8 copy and its transpose besides
    fp8 = replace(TRAINING, precision="fp8")
    parameters, gradients, *_ = held(Layout(), fp8, HELD._replace(quantised_elements=100))
    assert (parameters, gradients) == (2 * 1000 + 2 * 100, 4 * 1000)


def test_copies_in_fp8_of_shared_weights_come_and_go_with_the_block() -> None:
    # of 100 weights a copy and its transpose, of 1 byte each: a rank that shares them has none of the whole model
    # for the step, and those of a block as long as it has the block's parameters gathered
    fp8 = replace(TRAINING, precision="fp8")
    both = replace(TRAINING, precision="bf16"), fp8
    kept = [held(Layout(data=4, zero=3), each, HELD._replace(quantised_elements=100))[0] for each in both]
    assert kept[0] == kept[1]
    shared = Sharing(gradients=True, parameters=True)
    (block,) = list_changes(shared, fp8, FORWARD_PASS, [2 * 1000 + 2 * 100], ())
    assert [change.size for change in (*block.gathered, *block.released)] == [2200, 2200]


def test_xla_has_one_weight_of_a_block_whole_where_torch_has_all_of_them() -> None:
    # the widest weight of a layer is up's, 64 * 256, of 4 bytes; its gradient is whole alone
    small = problem(devices=4)
    both = [replace(small, training=replace(small.training, framework=name)) for name in ("torch", "xla")]
    layouts = [find_block_layout(StageCosts(each), complete(each, Layout(data=4, zero=3)), "layers") for each in both]
    shares = [layouts[0].parameter_share(tensor) for tensor in layouts[0].block.parameters]
    units = [find_unit(each.training, layout) for each, layout in zip(both, layouts, strict=True)]
    assert units[0] == (sum(shares), 0, 4 * sum(shares))
    assert units[1] == (64 * 256, 0, 4 * 64 * 256)
    assert sum(shares) > 4 * 64 * 64 + 2 * 64 * 256  # query, key, value, projection; up and down; norms besides


def test_versions_of_weights_and_buffers_of_gradients_count_each() -> None:
    assert held(Layout(), several=StateCopies(3, 2))[:3] == [3 * 4000, 2 * 4000, 8000]


def test_what_is_on_the_host_is_not_on_the_device() -> None:
    # 400 parameters, their gradients, and a quarter of the states
    layout = Layout(offload=Offloading(parameters=(0.4,), optimizer=WHOLE_FRACTION))
    found = held(layout, on_host=HostShare(0.25, 400))
    assert found == [600 * 4, 600 * 4, 6000, 12, 400 * 4, 400 * 4, 2000]


def test_gradients_that_begin_in_a_step_are_not_held() -> None:
    assert held(Layout(), replace(TRAINING, framework="torch"))[1] == 0


FIRST = BlockMemory(
    kept_bytes=10, recomputed_bytes=5, forward=20, backward=30, deferred_bytes=4, gradients=6, inputs=25, weights=9
)
LAST = BlockMemory(
    kept_bytes=3, recomputed_bytes=0, forward=1, backward=2, deferred_bytes=1, gradients=2, inputs=8, weights=7
)


def test_a_stage_of_runs_of_equal_blocks() -> None:
    found = stage_memory([(FIRST, 3), (LAST, 1)])
    assert found.kept_bytes == 3 * 10 + 3
    # forward is fullest at the third block: 30 + 20 against 33 + 1; beyond what is kept, 50 - 33
    assert found.forward == 50 - 33
    # backward at the third block too: 30 + 5 + 30
    assert found.backward == 65 - 33
    assert found.deferred_bytes == 3 * 4 + 1
    # gradients of inputs from the last block on: 33 + 0 + 2 + 8 = 43; it gives back 3 and leaves 1: 31, and the third
    # block makes it 31 + 5 + 6 + 25 = 67; the next ones begin with 6 less each
    assert found.inputs == 67 - 33
    # gradients of weights: 13 are deferred; the last needs 7 more, then 1 is given back, and the third needs 9 - 1
    assert found.weights == 8


def test_blocks_that_leave_more_than_they_kept_are_fullest_at_the_first() -> None:
    # each of 3 blocks gives back 1 and leaves 4: the first begins with 3 + 2 * 3 = 9, and needs 10 more
    leaving = BlockMemory(
        kept_bytes=1, recomputed_bytes=0, forward=0, backward=0, deferred_bytes=4, gradients=0, inputs=10, weights=0
    )
    assert stage_memory([(leaving, 3)]).inputs == 9 + 10 - 3


def test_weights_of_earlier_blocks_come_when_later_ones_have_given_back_what_they_deferred() -> None:
    # two last blocks defer 4 each and need 1 more; the first begins 8 lower and needs 20: 12 above where it began
    early = BlockMemory(kept_bytes=9, recomputed_bytes=0, forward=0, backward=0, deferred_bytes=2, weights=20)
    late = BlockMemory(kept_bytes=9, recomputed_bytes=0, forward=0, backward=0, deferred_bytes=4, weights=1)
    assert stage_memory([(early, 1), (late, 2)]).weights == 20 - 8


def test_a_pass_that_needs_nothing_more_is_never_fuller_than_what_is_kept() -> None:
    # backward begins with activations gone that were never made: 5 less than what is kept
    assert stage_memory([(BlockMemory(kept_bytes=9, recomputed_bytes=-5, forward=0, backward=0), 1)])[:3] == (9, 0, 0)
    assert stage_memory([]) == StageMemory(0, 0, 0)


def test_what_is_given_back_was_taken() -> None:
    memory = StageMemory(kept_bytes=10, forward=3, backward=4, deferred_bytes=6, inputs=5, weights=2)
    forward, backward, inputs, weights = memory.changes
    assert forward + backward == 0 == forward + inputs + weights
    # at the fullest moment of a pass, beyond what is held after it
    assert memory.working_bytes == (3, 10 + 4, 10 - 6 + 5, 6 + 2)
