"""What single operators of a tiny layer cost, reckoned on paper; and the step and the memory that they add up to."""

from dataclasses import replace

import pytest

from meshwise.simulator.collective import Collective
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.models.model import BlockBuilder
from meshwise.simulator.operator_graph import Block
from meshwise.simulator.units import TICKS_PER_SECOND
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.costs.optimizer import allocates_gradients
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.operators.costs import compute_operator_costs
from meshwise.strategies.operators.pass_costs import NodeCosts
from meshwise.strategies.plan.mesh import TENSOR
from meshwise.strategies.plan.sharding import OperatorSharding

from ..problems import list_stage_memories, problem
from .tiny import DOWN, PEAKS, SIDE, UP, WIDE, X, layer, setting, tiny_problem

STATES = 4 + 4 + 8
"""Bytes of a parameter, of its gradient and of two moments."""


def node_costs(*blocks: Block, devices: int = 1, tied: tuple[str, ...] = (), **training: object) -> NodeCosts:
    return NodeCosts(setting(tiny_problem(*blocks, devices=devices, tied=tied, **training)))


def of_one(costs: NodeCosts, name: str, *cut: str, block: int = 0) -> tuple[float, int, int]:
    """Return the seconds of an operator with some dims cut, the bytes it keeps, and those it holds besides."""
    where = costs.setting.problem.graph.blocks[block]
    sharding = OperatorSharding(f"{where.name}.{name}", tuple((dim, (TENSOR,)) for dim in cut))
    own = costs.compute_passes(where.name, name, (sharding,))
    ticks = int(own.passes[0]) * costs.setting.plan.num_microbatches + int(own.ending[0])
    kept = int(own.states[0]) + sum(int(saved[0]) for saved in own.saved.values())
    return ticks / TICKS_PER_SECOND, kept, int(own.transient[0])


def test_seconds_by_hand() -> None:
    # up: a product is 2 * 8 * 8 * 16 = 2048 FLOP, 2 s, and 0.5 s of launch; backward is two of them; its update moves
    # 4 + 2 * 8 + 4 = 24 bytes a parameter, of two tensors
    costs = node_costs(layer())
    assert of_one(costs, "up")[0] == 3 * (2.5 + 5.0) + 24 * UP / 1024 + 2 * 0.25
    assert of_one(costs, "side")[0] == 3 * (2.5 + 5.0) + 24 * SIDE / 1024 + 0.25
    # activation: two tensors are read and one is made, 1.5 s; backward reads these two again, and the gradient of the
    # third, and makes two: 2.5 s; nothing is updated
    assert of_one(costs, "activation")[0] == 3 * (0.5 + 1.5 + 0.5 + 2.5)
    assert costs.fixed_ticks / TICKS_PER_SECOND == 0.5  # the update is launched


def test_gradients_added_apart_are_read_and_their_sums_read_and_written() -> None:
    # 4 + 2 * 4 bytes a parameter in each of 3 microbatches, a kernel a tensor
    apart, fused = (of_one(node_costs(layer(), framework=name), "up")[0] for name in ("megatron_2021", "megatron"))
    assert apart - fused == 3 * (12 * UP / 1024 + 2 * 0.5)


def test_clipping_reads_gradients_once_and_sums_one_number_over_all_ranks() -> None:
    for devices in (1, 2):
        plain, clipped = (node_costs(layer(), devices=devices, gradient_clipping=on) for on in (False, True))
        assert of_one(clipped, "up")[0] - of_one(plain, "up")[0] == 4 * UP / 1024
        group = clipped.setting.rank.groups.get(TENSOR)
        norm = group.ticks(Collective.ALL_REDUCE, 4.0) if group else 0
        assert clipped.fixed_ticks - plain.fixed_ticks == 0.5 * TICKS_PER_SECOND + norm  # a kernel, and the sum
        assert plain.fixed_ticks == 0.5 * TICKS_PER_SECOND


def test_factored_moments_by_hand() -> None:
    # Adafactor: 8 rows and 16 columns of the weight and 16 of the bias, 4 bytes each, in and out; no other moments
    seconds, kept, _ = of_one(node_costs(layer(), optimizer="adafactor"), "up")
    assert seconds == 3 * 7.5 + ((4 + 4) * UP + 2 * 4 * 40) / 1024 + 2 * 0.25
    assert kept == (4 + 4) * UP + 4 * 40 + X


def test_weights_in_fp8_by_hand() -> None:
    # a cast is a launch more in either pass; it reads 2 bytes and writes 1 byte twice, of x (64 values, 0.25 s) and of
    # the gradient of wide (128, 0.5 s). The update moves 4 + 2 * 12 + 2 = 30 bytes a parameter, and of each of 128
    # weights reads 2 bytes and writes 2 copies of 1 byte, which stay
    seconds, kept, _ = of_one(node_costs(layer("bf16"), precision="fp8"), "up")
    assert seconds == 3 * (2.5 + 0.75 + 5.0 + 1.0) + (30 * UP + 4 * 128) / 1024 + 2 * 0.25
    assert kept == (2 + 4 + 12) * UP + 2 * 128 + 64  # x is kept in one byte


def test_a_parameter_of_two_operators_is_updated_and_kept_with_the_first() -> None:
    costs = node_costs(layer(), layer(name="last"), tied=("down_weight",))
    first, second = (of_one(costs, "down", block=block) for block in range(2))
    assert first[0] - second[0] == 24 * DOWN / 1024
    assert (first[1], second[1]) == (STATES * DOWN + WIDE, WIDE)


def test_bytes_by_hand() -> None:
    # what is saved is counted with the first operator that saves it: x with up
    costs = node_costs(layer())
    assert [of_one(costs, name)[1] for name in ("up", "side", "activation", "down")] == [
        STATES * UP + X,
        STATES * SIDE,
        WIDE + WIDE,
        STATES * DOWN + WIDE,
    ]
    # backward is fullest: the gradients of what is made and read are there; besides there is what is made and read.
    # side has x too, which up keeps
    assert [of_one(costs, name)[2] for name in ("up", "side", "activation", "down")] == [
        (WIDE + X) + (X + WIDE),
        X + (WIDE + X) + (X + WIDE),
        (WIDE + WIDE + WIDE) + (WIDE + WIDE + WIDE),
        (X + WIDE) + (WIDE + X),
    ]
    # gradients of weights that are not added at once are there too, 4 bytes each
    apart = of_one(node_costs(layer(), framework="megatron_2021"), "up")
    assert apart[1:] == (STATES * UP + X, (WIDE + X + 4 * UP) + (X + WIDE))


def test_a_gate_that_another_operator_makes_is_kept_too() -> None:
    # 8 tokens of 16 values and their gates: 1024 bytes, of which the activation makes 512, and keeps 512 of its own
    builder = BlockBuilder("fp32", {"sequence": 4, "hidden": 8, "ffn": 16, "gate": 2})
    both, active = (
        builder.add_tensor("both", "batch sequence ffn gate"),
        builder.add_tensor("active", "batch sequence ffn"),
    )
    builder.add_elementwise("activation", "batch sequence ffn gate", (both,), (active,), saved=(both,))
    block = builder.build_block("gated", (both,), (active,), layer=True)
    for framework, gate in (("megatron", 0), ("torch", WIDE)):
        _, kept, besides = of_one(node_costs(block, framework=framework), "activation")
        assert kept == 2 * WIDE + gate
        assert besides == (WIDE + 2 * WIDE) + (2 * WIDE + WIDE)  # gradients, and the tensors themselves


def test_what_the_runtime_takes_is_there_whatever_is_chosen() -> None:
    # besides scratch memory the framework has a gradient that nothing reads for weights of either shape
    assert node_costs(layer()).resident_bytes == 1000 + 32 * 2**20 + 2 * 4 * 128


def test_gradients_of_a_cut_batch_are_summed_at_the_rate_of_all_parameters() -> None:
    # one sequence a rank: products of 1024 FLOP, 1 s; but that for the gradient of the weight moves 4 * 8 + 4 * 16
    # values and, in a sum of 4 bytes, 128 twice: (32 + 64 + 2 * 128) * 4 = 1408 bytes
    costs = node_costs(layer(), devices=2)
    passes = 0.5 + 1.0 + 2 * 0.5 + 1.0 + 1408 / 1024
    update = 24 * UP / 1024 + 2 * 0.25
    together = costs.setting.rank.groups[TENSOR].ticks(Collective.ALL_REDUCE, 4.0 * (UP + SIDE + DOWN))
    part = together * UP / (UP + SIDE + DOWN) / TICKS_PER_SECOND
    found, kept, besides = of_one(costs, "up", "batch")
    assert found == pytest.approx(3 * passes + update + part, abs=1 / TICKS_PER_SECOND)
    assert (kept, besides) == (STATES * UP + X // 2, (WIDE + X) // 2 + (X + WIDE) // 2)
    # cut along wide, each rank has half of the weight and of the bias, and nothing is summed
    halves = 0.5 + 1.0 + 2 * 0.5 + 1.0 + (64 + 64 + 2 * 64) * 4 / 1024
    found, kept, _ = of_one(costs, "up", "ffn")
    assert found == 3 * halves + 24 * UP / 2 / 1024 + 2 * 0.25
    assert kept == STATES * UP // 2 + X


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("precision", "changes"),
    [
        ("fp32", {}),
        ("fp32", {"gradient_clipping": True, "framework": "torch"}),
        ("bf16", {"framework": "megatron_2021", "gradient_clipping": True}),
        ("bf16", {"optimizer": "adafactor"}),
        ("fp8", {"framework": "nemo"}),
        ("fp8", {"optimizer": "adafactor", "gradient_clipping": True}),
    ],
)
def test_operators_that_are_whole_add_up_to_the_step_and_keep_what_it_keeps(
    tied: bool, precision: str, changes: dict[str, object]
) -> None:
    peaks = tuple((name, 1e12) for name, _ in PEAKS)
    device = Accelerator("fast", peaks, 1e12, 1e12, launch=1e-6, optimizer_launch=1e-7, reserved=1000.0)
    of = problem(devices=1, layers=2, batch=6, precision=precision, tied=tied, accelerator=device)
    of = replace(of, training=replace(of.training, **changes))
    costs = compute_operator_costs(of, {TENSOR: 1}, 2)
    whole = (0,) * len(costs.nodes)
    plan = costs.build_plan(whole)
    step = round(SimulatedCost(of).evaluate(plan).step_time * TICKS_PER_SECOND)
    assert abs(costs.graph.time(whole) - step) <= len(costs.nodes)  # a tick for each node's part of the update
    if precision == "fp32":  # else what several operators save in several dtypes is counted in that of the first
        states = sum(change.size for change in lower(of, plan).resident_memory)
        states += of.graph.num_parameters * 4 * allocates_gradients(of.training, plan)  # those of the first microbatch
        saved = sum(memory.kept_bytes for memory in list_stage_memories(StageCosts(of), plan))
        assert sum(int(kept[0]) for kept in costs.graph.kept_bytes) + costs.resident_bytes == states + saved
