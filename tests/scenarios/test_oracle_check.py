"""The simulator beside one rank of the executor's own model: what is equal, and that what is not is seen."""

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tiny_jobs import cluster  # noqa: E402

from meshwise.executor.check.oracle import RankOracle, rank_oracle  # noqa: E402
from meshwise.executor.job import Job  # noqa: E402
from meshwise.scenarios import oracle_check  # noqa: E402
from meshwise.scenarios.oracle_check import Check, check_plan, find_axes, list_roles  # noqa: E402
from meshwise.simulator.models.experts import Experts  # noqa: E402
from meshwise.simulator.models.model import build  # noqa: E402
from meshwise.simulator.models.transformer import Transformer  # noqa: E402
from meshwise.strategies.plan.completion import complete  # noqa: E402
from meshwise.strategies.plan.layout import Layout  # noqa: E402
from meshwise.strategies.plan.offloading import offloading  # noqa: E402
from meshwise.strategies.plan.parallelism import Attention  # noqa: E402
from meshwise.strategies.plan.plan import Plan  # noqa: E402
from meshwise.strategies.plan.problem import Problem, Training  # noqa: E402
from meshwise.strategies.plan.recomputation import Recompute, SomeOperators  # noqa: E402

LAYERS, HIDDEN, FFN, VOCAB, SEQUENCE = 2, 256, 1024, 1024, 256
SPEC = Transformer(LAYERS, HIDDEN, 4, 4, FFN, VOCAB, tied_embeddings=False)
LLAMA = replace(SPEC, heads=8, kv_heads=2, ffn=704, ffn_kind="swiglu", positions="rotary")


def case(
    global_batch: int = 8, spec: Transformer = SPEC, precision: str = "fp32", **layout: Any
) -> tuple[Problem, Plan]:
    chosen = Layout(**layout)
    training = Training(global_batch, SEQUENCE, precision)
    ranks = chosen.data * chosen.tensor * chosen.pipeline * chosen.context
    problem = Problem(build(spec, SEQUENCE, precision), cluster(ranks), training)
    return problem, complete(problem, chosen)


def checked(global_batch: int = 8, spec: Transformer = SPEC, precision: str = "fp32", **layout: Any) -> Check:
    return check_plan(spec, *case(global_batch, spec, precision, **layout))


def lines(found: Check, rank: int = 0) -> dict[tuple[str, tuple[str, ...]], tuple[int, float]]:
    """Return the oracle's own count and bytes by kind and group."""
    return {(line.kind, line.axes): (line.oracle, line.oracle_bytes) for line in found.ranks[rank].traffic}


@pytest.mark.parametrize(
    "layout",
    [
        {"data": 2, "microbatch": (3, 1)},
        {"microbatch": 8},  # one microbatch: gradients come as activations go
        {"data": 2, "microbatch": 4, "overlap_gradients": False},
        {"data": 2, "microbatch": 2, "gradient_reduction": "parameter_server"},
        {"data": 2, "zero": 1, "microbatch": 4},
        {"data": 2, "tensor": 2, "zero": 1},
        {"data": 4, "zero": 1, "zero_shards": 2},
        {"data": 2, "zero": 2, "microbatch": 2},
        {"data": 2, "zero": 3, "recompute": Recompute.FULL},
        {"data": 2, "zero": 3, "reshard_after_forward": False},
        {"data": 4, "zero": 3, "zero_shards": 2},
        {"tensor": 2, "microbatch": 2, "sequence_parallel": True},
        {"tensor": 2, "microbatch": 2, "sequence_parallel": True, "recompute": Recompute.FULL},
        {"context": 2, "microbatch": 4, "attention": Attention.RING},
        {"context": 2, "microbatch": 4, "attention": Attention.ALL_GATHER},
        {"pipeline": 2, "microbatch": 2},
        {"pipeline": 2, "microbatch": 2, "schedule": "gpipe"},
        {"pipeline": 2, "microbatch": 2, "schedule": "zb1p"},
        {"pipeline": 2, "microbatch": 1, "schedule": "zb1p", "recompute": Recompute.FULL},
        {"data": 2, "pipeline": 2, "microbatch": 1, "schedule": "zb1p", "zero": 2},
        {"data": 2, "pipeline": 2, "microbatch": 2, "zero": 3, "global_batch": 16},
        {"data": 2, "pipeline": 2, "microbatch": 2, "zero": 3, "global_batch": 16, "schedule": "gpipe"},
        {"microbatch": 8, "offload": offloading(["parameters", "optimizer"])},
        {"data": 2, "microbatch": 2, "offload": offloading(["optimizer"])},
        {"data": 2, "microbatch": 1, "offload": offloading(["optimizer"])},  # what the host's step makes is on the host
        {"data": 2, "microbatch": 2, "offload": offloading(["activations"])},
        {"data": 128, "tensor": 4, "pipeline": 2, "global_batch": 512},
    ],
    ids=str,
)
def test_states_collectives_and_peak_are_the_same(layout: dict[str, Any]) -> None:
    found = checked(**layout)
    assert found.equal, found.to_json()


@pytest.mark.parametrize(
    "layout",
    [
        {"microbatch": 8},
        {"microbatch": 8, "recompute": Recompute.FULL},
        {"microbatch": 8, "spec": replace(LLAMA, kv_heads=8, qk_norm=True)},
        {"microbatch": 8, "spec": replace(SPEC, heads=8, kv_heads=2)},  # queries are put together, keys are not moved
        {"tensor": 2, "microbatch": 8, "sequence_parallel": True},
        {"context": 2, "microbatch": 4, "attention": Attention.ULYSSES},
        {"pipeline": 2, "microbatch": 2, "schedule": "zb1p"},
        {"data": 2, "zero": 3},
    ],
    ids=str,
)
def test_llama_is_the_same(layout: dict[str, Any]) -> None:
    found = checked(**({"spec": LLAMA} | layout))
    assert found.equal, found.to_json()


@pytest.mark.parametrize(
    "layout",
    [
        {"data": 2, "microbatch": 4},
        {"data": 2, "microbatch": 2, "gradient_reduction": "parameter_server"},  # which returns 2 bytes a parameter
        {"data": 2, "zero": 1, "microbatch": 4},
        {"data": 2, "zero": 2, "microbatch": 2},  # shards are the main weights: none in bf16
        {"data": 2, "zero": 3, "microbatch": 2},
        {"microbatch": 8, "offload": offloading(["parameters", "optimizer"])},  # nor where the host has them
        {  # gradients become fp32 on the host: the largest is a third of what the device holds
            "data": 2,
            "microbatch": 1,
            "offload": offloading(["optimizer"]),
            "spec": replace(SPEC, layers=1, vocab=8192),
        },
        {"pipeline": 2, "microbatch": 2, "schedule": "zb1p"},  # gradients of logits wait in bf16
        {"pipeline": 2, "microbatch": 2, "schedule": "zb2p"},
    ],
    ids=str,
)
def test_bf16_is_the_same(layout: dict[str, Any]) -> None:
    found = checked(**layout, precision="bf16")
    assert found.equal, found.to_json()


def test_operators_that_are_computed_again_leave_nothing_from_step_to_step() -> None:
    # where backward is split torch keeps its graph until all gradients of weights are there
    layout = {"pipeline": 2, "microbatch": 1, "schedule": "zb1p"}
    kept, again = (checked(**layout, recompute=how) for how in (Recompute.NONE, SomeOperators(("activation", "up"))))
    peaks = [
        [line.oracle for rank in each.ranks for line in rank.memory if line.category == "peak"]
        for each in (kept, again)
    ]
    assert all(less < more for more, less in zip(*peaks, strict=True))


def test_tensor_parallel_sends_what_megatron_does() -> None:
    found = checked(tensor=2, microbatch=4)
    # two microbatches; a layer has two sums in each pass, the embedding one and the head's input one; the loss over a
    # cut vocabulary has three, of a number a token: maximum, sum, and the target's logit
    tokens = 4 * SEQUENCE
    sums, values = 2 * (4 * LAYERS + 2), 2 * 3
    size = 4 * tokens * (sums * HIDDEN + values)
    assert lines(found) == {("all_reduce", ("tensor",)): (sums + values, size)}


def test_zero_3_gathers_twice_and_scatters_once_a_microbatch() -> None:
    found = checked(data=2, zero=3, microbatch=2)
    matrices = 4 * HIDDEN**2 + 2 * HIDDEN * FFN
    layer = matrices + 3 * HIDDEN + HIDDEN + FFN + HIDDEN + 4 * HIDDEN  # biases of qkv and three others, two norms
    ends = (VOCAB + SEQUENCE) * HIDDEN, VOCAB * HIDDEN + 2 * HIDDEN
    # 2 microbatches; every unit for forward and for backward, but the head, whose backward comes at once
    gathers, scatters = 2 * (2 * (LAYERS + 1) + 1), 2 * (LAYERS + 2)
    every = LAYERS * layer + sum(ends)
    assert lines(found) == {
        ("all_gather", ("data",)): (gathers, 4 * 2 * (2 * every - ends[1])),
        ("reduce_scatter", ("data",)): (scatters, 4 * 2 * every),
    }


def test_replicas_are_summed_once_a_step() -> None:
    found = lines(checked(global_batch=16, data=4, zero=3, zero_shards=2))
    assert found["all_reduce", ("replica",)][0] == LAYERS + 2  # a unit each, not one a microbatch, of which there are 4


def test_microbatches_add_to_the_buckets_of_their_gradients() -> None:
    problem, _ = case(data=2)
    cases = (case(global_batch=n, data=2) for n in (2, 16))
    one, memory = (rank_oracle(Job(SPEC, each.training, plan, steps=1), 0).memory for each, plan in cases)
    assert memory.peak - one.peak < memory.gradients / 100  # buckets are there all the time; a step has more tokens
    assert memory.gradients == memory.parameters == 4 * problem.graph.num_parameters


def test_a_cut_table_keeps_the_gradient_of_its_own_rows() -> None:
    problem, plan = case(tensor=2, microbatch=4)
    memory = rank_oracle(Job(SPEC, problem.training, plan, steps=1), 0).memory
    assert memory.gradients == memory.parameters


def test_a_rank_of_every_kind() -> None:
    assert list_roles(case(data=2, tensor=2, pipeline=2)[1]) == (0, 4)
    assert list_roles(case(data=2, microbatch=(3, 1))[1]) == (0, 1)
    assert list_roles(case(data=4, gradient_reduction="parameter_server")[1]) == (0, 1)
    _, plan = case(data=2, tensor=2, pipeline=2)
    assert find_axes(plan, (0, 2)) == ("data",) and find_axes(plan, (1, 5)) == ("pipeline",)
    assert find_axes(plan, (0, 1, 2, 3)) == ("data", "tensor") and find_axes(plan, (3,)) == ()


def test_what_differs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(job: Job, rank: int) -> RankOracle:
        return rank_oracle(replace(job, plan=case(tensor=2, microbatch=8)[1]), rank)

    monkeypatch.setattr("meshwise.executor.check.oracle.rank_oracle", wrong)
    found = check_plan(SPEC, *case(data=2, microbatch=4))
    assert not found.equal
    different = {line.category for line in found.ranks[0].memory if not line.equal}
    assert {"parameters", "gradients", "optimizer"} <= different
    # the ranks that a tensor-parallel plan sums among lie along data in the plan that was asked for
    assert {line.axes for line in found.ranks[0].traffic if not line.equal} == {("data",)}


def test_zero_1_scatters_gradients_and_gathers_parameters_once_a_step() -> None:
    found = checked(data=2, zero=1, microbatch=1)
    parameters = case(data=2)[0].graph.num_parameters
    assert parameters % 2 == 0  # no rank's part is padded
    assert lines(found) == {
        ("all_gather", ("data",)): (1, 4 * parameters),
        ("reduce_scatter", ("data",)): (1, 4 * parameters),
    }


def test_a_mixture_of_experts_is_refused_for_its_tokens_go_where_data_says() -> None:
    mixed = replace(LLAMA, experts=Experts(4, 2, 704))
    with pytest.raises(ValueError, match=r"a model without experts, met one with them: .* how many tokens an expert"):
        checked(spec=mixed, data=2, expert=2)


def test_a_plan_that_cannot_be_built_and_a_machine_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, plan = case(data=2)
    wrong = replace(problem, training=replace(problem.training, optimizer="lion"))
    with pytest.raises(ValueError, match=r"cannot build this plan: optimizer: .* met lion"):
        check_plan(SPEC, wrong, plan)
    monkeypatch.setattr(oracle_check, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="a check needs torch, which is not installed"):
        check_plan(SPEC, problem, plan)
