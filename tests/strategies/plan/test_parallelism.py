"""Expert parallelism: what is moved, who holds what, and every way to the step time."""

import pytest

from meshwise.simulator.collective import Collective
from meshwise.simulator.models.experts import Experts
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.simulator.operator_graph import OperatorKind
from meshwise.simulator.program import TaskKind
from meshwise.simulator.units import to_ticks
from meshwise.strategies.lowering.costs.optimizer import count_updated_parameters
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.plan.rules import violations

from ..problems import find_block_cost, problem

SEQUENCE, HIDDEN, FP32 = 32, 64, 4
COUNT, TOP_K, WIDTH = 8, 2, 32


def mixture(layers: int = 4, batch: int = 16, **machine: object) -> Problem:
    """Return a network whose layers have 8 experts, 2 for a token, on a small machine."""
    base = problem(layers=layers, batch=batch, **machine)  # type: ignore[arg-type]
    experts = Experts(COUNT, TOP_K, WIDTH)
    spec = Transformer(
        layers, HIDDEN, 8, 8, 256, 128, ffn_kind="swiglu", tied_embeddings=False, experts=experts, positions="rotary"
    )
    return Problem(build(spec, SEQUENCE, "fp32"), base.cluster, Training(batch, SEQUENCE, "fp32"))


@pytest.mark.parametrize("expert", [2, 4, 8])
def test_tokens_go_to_their_experts_and_back(expert: int) -> None:
    # Lepikhin et al. 2020, section 3: two all-to-alls forward and two backward; a rank sends the tokens of its
    # sequence, each top_k times: capacity 32 * 2 / 8 = 8 for each of 8 experts
    small = mixture()
    plan, costs = complete(small, Layout(data=8, expert=expert)), StageCosts(small)
    steps = find_block_cost(costs, plan, "layers").work.segments
    sent = float(SEQUENCE * TOP_K * HIDDEN * FP32)
    for direction in (steps.forward, steps.backward):
        found = [(step.axis, step.collective, step.size) for step in direction if step.collective is not None]
        assert found == [("expert", Collective.ALL_TO_ALL, sent)] * 2


def test_a_tensor_rank_sends_its_part_of_the_tokens() -> None:
    # with sequence parallelism over 2 ranks half the tokens each: half the bytes of both exchanges; what an expert
    # reads is gathered from the 2, and what it makes in two partial sums is scattered over them
    small = mixture()
    layout = Layout(data=4, tensor=2, expert=4, sequence_parallel=True)
    plan, costs = complete(small, layout), StageCosts(small)
    steps = find_block_cost(costs, plan, "layers").work.segments
    found = [
        (step.axis, step.collective, step.size)
        for step in steps.forward
        if step.collective is not None and step.tensor.startswith(("dispatched", "expert_n"))
    ]
    whole = float(SEQUENCE * TOP_K * HIDDEN * FP32)
    assert found == [
        ("expert", Collective.ALL_TO_ALL, whole / 2),
        ("tensor", Collective.ALL_GATHER, whole),
        ("tensor", Collective.REDUCE_SCATTER, whole),
        ("expert", Collective.ALL_TO_ALL, whole / 2),
    ]


@pytest.mark.parametrize("expert", [1, 2, 4, 8])
@pytest.mark.parametrize("zero", [0, 1])
def test_experts_are_held_by_fewer_and_what_all_share_by_all(expert: int, zero: int) -> None:
    # an expert of a gated layer: 3 * 64 * 32 elements; 8 of them over the expert ranks; the others summed over all
    small = mixture()
    plan, costs = complete(small, Layout(data=8, expert=expert, zero=zero)), StageCosts(small)
    layer = find_block_cost(costs, plan, "layers")
    own = COUNT // expert * 3 * HIDDEN * WIDTH
    assert layer.expert_parameters == (own if expert > 1 else 0)
    whole = find_block_cost(costs, complete(small, Layout(data=8)), "layers").parameters
    assert layer.parameters == whole - (COUNT - COUNT // expert) * 3 * HIDDEN * WIDTH
    assert (plan.shards, plan.expert_shards) == (8, 8 // expert)
    # ZeRO shares each part over the ranks that hold it
    dense = layer.parameters - layer.expert_parameters
    shares = -(-dense // 8) + -(-layer.expert_parameters // (8 // expert))
    assert count_updated_parameters(plan, layer.parameters, layer.expert_parameters) == (
        shares if zero else layer.parameters
    )


def test_work_is_the_same_however_experts_are_spread() -> None:
    # each rank computes as many tokens as it sends: only the exchange is added
    small = mixture()

    def computing(expert: int) -> int:
        plan, costs = complete(small, Layout(data=8, expert=expert)), StageCosts(small)
        passes = find_block_cost(costs, plan, "layers").passes
        steps = (*passes.forward.segments, *passes.backward.segments)
        return sum(ticks for step, ticks in steps if not step.tensor)

    found = {computing(expert) for expert in (1, 2, 4)}
    assert max(found) == pytest.approx(min(found), rel=0.01)  # weights are read for fewer experts


@pytest.mark.parametrize(("expert", "sorts"), [(1, 0), (2, 2), (4, 2), (8, 0)])
@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
def test_tokens_of_several_experts_are_sorted_after_each_exchange(
    expert: int, sorts: int, recompute: Recompute
) -> None:
    # read and written once: 2 * 32 tokens * 2 * 64 * 4 bytes; a rank with one expert has nothing to sort
    small = mixture()
    plan, costs = complete(small, Layout(data=8, expert=expert, recompute=recompute)), StageCosts(small)
    rank, passes = costs.machine(plan).rank(0), find_block_cost(costs, plan, "layers").passes
    moved = 2 * SEQUENCE * TOP_K * HIDDEN * FP32
    ticks = to_ticks(rank.accelerator.launch + moved / rank.accelerator.bandwidth(OperatorKind.PERMUTE))
    for direction, times in ((passes.forward, 1), (passes.backward, 1 if recompute is Recompute.NONE else 2)):
        found = [taken for step, taken in direction.segments if step.label.startswith("sort of ")]
        assert found == [ticks] * sorts * times
    backward = [step for step, _ in passes.backward.segments]
    again = [step for step in backward if step.kind is TaskKind.RECOMPUTE and step.label.startswith("sort")]
    assert len(again) == (sorts if recompute is Recompute.FULL else 0)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(data=3, expert=3), "expert divides the experts(8), met 3; nearest: 2"),
        (Layout(data=6, expert=4), "expert divides data(6), met 4; nearest: 3"),
    ],
)
def test_what_cannot_be_is_refused_with_the_equation(layout: Layout, message: str) -> None:
    assert message in [violation.message for violation in violations(mixture(), layout)]


def test_a_model_without_experts_has_none_to_spread() -> None:
    assert "the model has no experts, met expert 2; nearest: 1" in [
        violation.message for violation in violations(problem(), Layout(data=8, expert=2))
    ]
