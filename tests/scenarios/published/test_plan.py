"""The plan of a row: what it states, and the nearest that is simulated."""

from typing import Any

import pytest

from meshwise.scenarios.published.runs import build_run
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.recomputation import Recompute, SomeOperators

from .test_scenario import ROW, scenario


def plan(change: dict[str, Any]) -> Plan:
    return scenario(change).choose_plan()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, {"data": 4, "tensor": 2, "num_microbatches": 2, "sequence_parallel": True}),
        ({"dp": None}, {"data": 4}),
        ({"dp": 8}, {"data": 4}),  # the other degrees and n_devices win
        ({"n_devices": None}, {"data": 4}),
        ({"tp": None, "dp": None}, {"data": 8, "tensor": 1}),
        ({"tp": 1, "dp": 4, "cp": 2}, {"data": 4, "context": 2}),
        ({"tp": 1, "dp": 2, "pp": 4}, {"pipeline": 4, "num_microbatches": 4}),
        ({"micro_batch": None, "grad_accum": 1}, {"microbatch": 2, "num_microbatches": 1}),
        ({"micro_batch": 2.0}, {"microbatch": 2}),
        ({"micro_batch": 3}, {"microbatch": 2}),  # 2 sequences a rank
        ({"global_batch": None, "grad_accum": 4}, {"num_microbatches": 4}),
        ({"global_batch": 9}, {"num_microbatches": 2}),  # rounded to what 4 ranks divide
        ({"tp": 1, "dp": 8, "micro_batch": 0.5, "global_batch": 4}, {"data": 4, "context": 2, "microbatch": 1}),
        ({"tp": 1, "dp": 8, "zero_stage": 3, "fsdp_shards": 4}, {"replica": 2, "shards": 4, "zero": 3}),
        (
            {"tp": 1, "dp": 8, "zero_stage": 1, "plan_note": "num-distributed-optimizer-instances=2"},
            {"replica": 2, "shards": 4, "zero": 1},
        ),
        (
            {"tp": 1, "dp": 8, "fsdp_shards": 8, "zero_stage": None, "framework": "torchtitan"},
            {"replica": 1, "zero": 3},
        ),
        ({"zero_stage": None}, {"zero": 1}),  # NeMo's distributed optimizer
        ({"zero_stage": None, "framework": "DeepSpeed ZeRO-2"}, {"zero": 2}),
        ({"zero_stage": None, "framework": "PyTorch DDP"}, {"zero": 0}),
        ({"tp": 1, "dp": 4, "pp": 2, "vpp": 4}, {"schedule": "interleaved", "chunks": 4}),
        ({"tp": 1, "dp": 4, "pp": 2, "schedule": "ZB-V", "global_batch": 16}, {"schedule": "zbv", "chunks": 2}),
        (  # stages keep parameters and gradients whole, and each of 2 stages has a microbatch
            {
                **{"tp": 1, "dp": 4, "pp": 2, "zero_stage": 3, "framework": "torchtitan", "micro_batch": None},
                "global_batch": 32,
            },
            {"zero": 1, "num_microbatches": 2, "microbatch": 4},
        ),
        ({"tp": 1, "dp": 8, "zero_stage": 3, "framework": "torchtitan"}, {"zero": 3}),
        ({"recompute": "selective"}, {"recompute": Recompute.SELECTIVE}),
        ({"recompute": None}, {"recompute": Recompute.NONE}),  # it fits
        ({"dp_overlap": "off"}, {"overlap_gradients": False}),
        ({"sequence_parallel": False}, {"sequence_parallel": False}),
        ({"tp_overlap": None}, {"overlap_tensor": True}),  # as NeMo's recipes
        ({"tp_overlap": None, "framework": "Megatron-LM"}, {"overlap_tensor": False}),
        ({"tp_overlap": "off"}, {"overlap_tensor": False}),
        ({"tp_overlap": "--tp-comm-overlap"}, {"sequence_parallel": True, "overlap_tensor": True}),
        ({"tp_overlap": "--tp-comm-overlap", "sequence_parallel": False}, {"overlap_tensor": False}),
        ({"tp_overlap": "--tp-comm-overlap", "tp": 1, "dp": 8}, {"overlap_tensor": False}),
        (  # refused with a split backward
            {"tp_overlap": True, "dp": 2, "pp": 2, "schedule": "ZB-H1"},
            {"schedule": "zb1p", "overlap_tensor": False},
        ),
    ],
)
def test_plans(change: dict[str, Any], expected: dict[str, Any]) -> None:
    found = plan(change)
    assert {name: getattr(found, name) for name in expected} == expected


def test_a_schedule_with_too_few_microbatches_becomes_a_plainer_one() -> None:
    run = build_run(ROW | {"tp": 1, "dp": 4, "pp": 2, "vpp": 4, "global_batch": 4})
    assert run.scenario is not None
    found = run.scenario.choose_plan()
    assert found.num_microbatches == 1 and found.schedule == "0F0 0B0\n1F0 1B0"  # 1F1B of one microbatch
    assert any(line.startswith("schedule ") and "for interleaved" in line for line in run.assumed)


def test_1f1b_with_fewer_microbatches_than_stages_stays_1f1b_and_keeps_stated_stages() -> None:
    note = "decoder-first-pipeline-num-layers=1; decoder-last-pipeline-num-layers=3"
    found = plan({"tp": 1, "dp": 2, "pp": 4, "global_batch": 4, "plan_note": note, "sequence_parallel": None})
    # rank r begins with min(4 - r, 2) forwards: the last one alternates, where GPipe would not
    orders = ("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2F1 2B0 2B1", "3F0 3B0 3F1 3B1")
    assert found.schedule.splitlines() == list(orders)
    layers = [sum(name.startswith("layers") for name in stage.blocks) for stage in found.stages]
    assert layers == [1, 2, 2, 3]


def test_embedding_and_loss_take_the_place_of_layers() -> None:
    stages = plan({"tp": 1, "dp": 2, "pp": 4, "n_layers": 6}).stages
    layers = [sum(name.startswith("layers") for name in stage.blocks) for stage in stages]
    assert layers == [1, 2, 2, 1]  # (6 + 2) / 4 = 2 a stage


def test_little_is_recomputed_where_nothing_else_fits() -> None:
    big = {"n_layers": 48, "hidden": 8192, "n_heads": 64, "ffn_hidden": 32768, "tp": 8, "dp": 1, "recompute": None}
    run = build_run(ROW | big | {"seq_len": 4096, "micro_batch": 4})
    assert run.scenario is not None
    assert run.scenario.choose_plan().recompute is not Recompute.NONE
    assert build_run(ROW | big).scenario.choose_plan().recompute is Recompute.NONE  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("model", "operators"),
    [
        # q kept, k not, which is a third of qkv, v kept, projection not; up kept, down not
        (
            {"arch": "gpt", "ffn_type": "gelu"},
            "input_norm qkv/2 projection attention_residual feed_forward_norm activation down feed_forward_residual",
        ),
        # k is a twelfth of qkv; of gate and factor the first is kept, then down
        (
            {"arch": "llama", "ffn_type": "swiglu", "n_heads": 10, "n_kv_heads": 1, "head_dim": 64},
            "input_norm rotary projection attention_residual feed_forward_norm up/2 activation feed_forward_residual",
        ),
    ],
    ids=["gelu", "swiglu"],
)
def test_every_second_product_is_kept(model: dict[str, Any], operators: str) -> None:
    stated = {"recompute": "selective", "recompute_detail": "per-op SAC", "framework": "torchtitan", "tp": 1, "dp": 8}
    assert plan(stated | model).recompute == SomeOperators(tuple(operators.split()))


@pytest.mark.parametrize("words", ["selective (minimal: save matmul outputs)", "minimal", "dots"])
def test_products_are_kept_and_all_else_runs_again(words: str) -> None:
    # of a layer: norm, rotary, attention, residual, norm, activation, residual; not qkv, projection, up and down
    operators = [
        "input_norm",
        "rotary",
        "attention",
        "attention_residual",
        "feed_forward_norm",
        "activation",
        "feed_forward_residual",
    ]
    assert plan({"recompute": words, "framework": "MaxText", "arch": "llama"}).recompute == SomeOperators(
        tuple(operators)
    )
    assert plan({"recompute": "full", "recompute_detail": "remat_policy=minimal"}).recompute is Recompute.FULL


@pytest.mark.parametrize(
    ("recompute", "detail", "expected"),
    [
        ("none", "no per-op SAC", Recompute.NONE),
        ("full", "full AC, not per-op", Recompute.FULL),
        (None, "per-op SAC", Recompute.NONE),  # it fits
    ],
)
def test_what_a_row_states_of_recompute_wins_over_its_details(
    recompute: str | None, detail: str, expected: Recompute
) -> None:
    assert plan({"recompute": recompute, "recompute_detail": detail}).recompute == expected


def test_attention_of_context_ranks() -> None:
    change = {"tp": 1, "cp": 2, "plan_note": "cp_comm_type a2a"}
    assert plan(change).attention is Attention.ULYSSES
    assert plan(change | {"cp": 8, "dp": 1, "n_heads": 4, "global_batch": 2}).attention is Attention.RING
