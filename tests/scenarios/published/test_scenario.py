from typing import Any

import pytest

from meshwise.scenarios.published.runs import run_of
from meshwise.scenarios.scenario import Scenario
from meshwise.scenarios.studies.accuracy import techniques
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.recomputation import Recompute

ROW = {
    "row_id": "one", "source_id": "ours", "model": "small", "arch": "gpt", "n_layers": 8, "hidden": 1024,
    "n_heads": 16, "ffn_hidden": 4096, "vocab": 51200, "seq_len": 1024, "precision": "bf16", "accelerator": "H100 SXM",
    "accel_mem_gb": 80, "n_devices": 8, "devices_per_node": 8, "dp": 4, "tp": 2, "pp": 1, "cp": 1, "ep": 1, "vpp": 1,
    "zero_stage": 0, "recompute": "none", "micro_batch": 1, "global_batch": 8, "schedule": "1F1B", "offload": "none",
    "framework": "NeMo", "status": "ok", "step_time_s": 0.1,
}  # fmt: skip


def scenario(change: dict[str, Any]) -> Scenario:
    run = run_of(ROW | change)
    assert run.scenario is not None, run.skipped
    return run.scenario


def plan(change: dict[str, Any]) -> Plan:
    return scenario(change).chosen()


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
            {"tp": 1, "dp": 8, "fsdp_shards": 8, "zero_stage": None, "framework": "torchtitan"},
            {"replica": 1, "zero": 3},
        ),
        ({"zero_stage": None}, {"zero": 1}),  # NeMo's distributed optimizer
        ({"zero_stage": None, "framework": "DeepSpeed ZeRO-2"}, {"zero": 2}),
        ({"zero_stage": None, "framework": "PyTorch DDP"}, {"zero": 0}),
        ({"tp": 1, "dp": 4, "pp": 2, "vpp": 4}, {"schedule": "interleaved", "chunks": 4}),
        ({"tp": 1, "dp": 4, "pp": 2, "schedule": "ZB-V", "global_batch": 16}, {"schedule": "zbv", "chunks": 2}),
        ({"recompute": "selective"}, {"recompute": Recompute.SELECTIVE}),
        ({"recompute": None}, {"recompute": Recompute.NONE}),  # it fits
        ({"dp_overlap": "off"}, {"overlap_gradients": False}),
        ({"sequence_parallel": False}, {"sequence_parallel": False}),
        ({"tp_overlap": None}, {"overlap_tensor": False}),
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


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"dp": None}, "dp 4 (not stated; n_devices / (tp * pp * cp))"),
        ({"dp": 8}, "dp 4: the stated 8 * 2 are not n_devices(8)"),
        ({"cp": None}, "cp 1 (not stated)"),
        ({"optimizer": "Muon"}, "optimizer lion (Muon: one momentum; its orthogonalisation is not simulated)"),
        ({"optimizer": None}, "optimizer adamw (not stated)"),
        ({"precision": "NVFP4"}, "precision fp8 (for 4 bits, at the rate of 4 bits where the device has one)"),
        ({"precision": "fp8", "accelerator": "A100"}, "precision bf16, for A100 SXM 80GB has no fp8"),
        ({"precision": "bf16", "accelerator": "V100"}, "precision fp16, for V100 SXM2 32GB has no bf16"),
        ({"zero_stage": None}, "zero_stage 1 (not stated; from nemo)"),
        ({"sequence_parallel": None}, "sequence_parallel true (not stated; from nemo)"),
        ({"global_batch": 9}, "global_batch 8, for dp(4) * micro_batch(1) do not divide 9"),
        ({"micro_batch": 3}, "micro_batch 2, for 3 does not divide the 2 sequences of a rank"),
        ({"model": "Llama LoRA"}, "weights are frozen, and adapters count for nothing (LoRA)"),
        ({"grad_accum": 1, "global_batch": 8}, "micro_batch 2, for 1 a device make the global_batch(8)"),
        ({"dp": "FSDP 4"}, "dp left out, for dp is a number above 0, met 'FSDP 4'"),
        (
            {"framework": "MaxText", "accelerator": "TPU v5p", "sequence_parallel": None, "tp_overlap": None},
            "tensor communication runs beside products, as XLA cuts both on TPUs (tp_overlap not stated)",
        ),
        ({"recompute": None}, "recompute none, micro_batch 1: of what is not stated the first that fits"),
        ({"tp": 1, "dp": 8, "ep": 3, "moe_experts": 6}, "expert 1, for expert divides data(8), met 3"),
    ],
)
def test_every_assumption_is_listed(change: dict[str, Any], line: str) -> None:
    assumed = run_of(ROW | change).assumed
    assert any(each.startswith(line) for each in assumed), assumed


def test_a_schedule_with_too_few_microbatches_becomes_a_plainer_one() -> None:
    run = run_of(ROW | {"tp": 1, "dp": 4, "pp": 2, "vpp": 4, "global_batch": 4})
    assert run.scenario is not None
    assert run.scenario.chosen().schedule in ("1f1b", "gpipe")
    assert any(line.startswith("schedule ") and "for interleaved" in line for line in run.assumed)


def test_embedding_and_loss_take_the_place_of_layers() -> None:
    stages = plan({"tp": 1, "dp": 2, "pp": 4, "n_layers": 6}).stages
    layers = [sum(name.startswith("layers") for name in stage.blocks) for stage in stages]
    assert layers == [1, 2, 2, 1]  # (6 + 2) / 4 = 2 a stage


def test_little_is_recomputed_where_nothing_else_fits() -> None:
    big = {"n_layers": 48, "hidden": 8192, "n_heads": 64, "ffn_hidden": 32768, "tp": 8, "dp": 1, "recompute": None}
    run = run_of(ROW | big | {"seq_len": 4096, "micro_batch": 4})
    assert run.scenario is not None
    assert run.scenario.chosen().recompute is not Recompute.NONE
    assert run_of(ROW | big).scenario.chosen().recompute is Recompute.NONE  # type: ignore[union-attr]


def test_attention_of_context_ranks() -> None:
    change = {"tp": 1, "cp": 2, "plan_note": "cp_comm_type a2a"}
    assert plan(change).attention is Attention.ULYSSES
    assert plan(change | {"cp": 8, "dp": 1, "n_heads": 4, "global_batch": 2}).attention is Attention.RING


def test_precision_words() -> None:
    words = {
        "amp_bf16": "bf16", "bfloat16": "bf16", "bf16 compute, fp32 weights": "bf16", "FP8-CS": "fp8", "MXFP8": "fp8",
        "float16": "fp16", "TF32": "tf32", "fp32": "fp32", "something": "bf16", "mixed precision": "fp16",
    }  # fmt: skip
    for word, precision in words.items():
        assert scenario({"precision": word}).problem.training.precision == precision, word


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"model": "Stable Diffusion XL", "arch": "unet"},
            "arch is of a diffusion model, whose sizes a row cannot state, and model names none known",
        ),
        ({"n_layers": None, "hidden": None}, "n_layers and hidden are not stated, and model names none that is known"),
        ({"accelerator": "abacus"}, "accelerator 'abacus' is not in the catalogue, and no peak is stated"),
        ({"accelerator": None}, "accelerator is not stated"),
        ({"seq_len": None}, "seq_len is not stated"),
        ({"tp": 3}, "tp(3) * pp(1) * cp(1) = 3 divides n_devices, met 8"),
        ({"tp": "two"}, "tp is a number above 0, met 'two'"),
        ({"n_devices": None, "dp": None}, "n_devices is not stated, and neither is dp"),
        ({"global_batch": 2, "dp": 5, "n_devices": 10}, "global_batch 2 is not cut over dp(5) * micro_batch(1)"),
        ({"n_heads": 17, "tp": 2}, "plan.tensor: tensor divides heads(17), met 2; nearest: 1"),
    ],
)
def test_what_cannot_be_expressed_has_a_reason(change: dict[str, Any], reason: str) -> None:
    run = run_of(ROW | change)
    assert run.scenario is None and run.skipped == reason


def test_techniques() -> None:
    assert techniques(scenario({})) == ("dp", "tp", "sp")
    assert techniques(scenario({"tp_overlap": True})) == ("dp", "tp", "sp", "tp overlap")
    mixed = scenario(
        {"tp": 1, "dp": 8, "ep": 4, "moe_experts": 8, "zero_stage": 3, "recompute": "full", "precision": "fp8"}
    )
    assert techniques(mixed) == ("dp", "ep", "zero3", "recompute", "fp8", "moe")
    assert techniques(scenario({"n_devices": 1, "dp": 1, "tp": 1})) == ("plain",)


@pytest.mark.parametrize(
    ("framework", "expected"),
    [
        ("Megatron-LM (April 2021)", "megatron_2021"),
        ("Megatron-LM v2.4", "megatron_2021"),
        ("Megatron-LM", "megatron"),
        ("Megatron-LM (mcore, 2024-07)", "megatron"),
        ("Megatron-LM 23e00ed0 + TE 2.5", "megatron"),
        ("NeMo", "nemo"),
        ("torchtitan", "torch"),
    ],
)
def test_products_of_megatron_from_before_2022_neither_add_nor_sum_gradients(framework: str, expected: str) -> None:
    assert scenario({"framework": framework}).problem.training.framework == expected


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        ({"gradient_precision": "bf16"}, {"gradient_precision": "same"}),
        ({"gradient_precision": "fp32"}, {"gradient_precision": "fp32"}),
        ({"norm_kernel": "eager"}, {"composes_norms": True}),
        ({"norm_kernel": "fused"}, {"composes_norms": False}),
        ({"loss": "gathered"}, {"gathers_logits": True}),
        ({"loss": "sharded"}, {"gathers_logits": False}),
        ({"framework": "a trainer of our own"}, {"framework": "unknown"}),
        ({"framework": "PyTorch FSDP"}, {"framework": "torch"}),
    ],
)
def test_conventions_that_a_row_states_are_taken(fields: dict[str, Any], changes: dict[str, Any]) -> None:
    training = scenario(fields).problem.training
    assert {name: getattr(training, name) for name in changes} == changes


def test_a_word_of_a_convention_that_is_not_known_is_told() -> None:
    assumptions = scenario({"norm_kernel": "triton", "gradient_precision": "bf8"}).assumptions
    assert any("norm_kernel 'triton' taken as fused" in line for line in assumptions)
    assert any("gradient_precision 'bf8' not known" in line for line in assumptions)


def test_gathered_logits_are_whole_on_every_tensor_rank() -> None:
    change = {"framework": "a trainer", "tp": 8, "pp": 1, "dp": 1, "n_devices": 8, "devices_per_node": 8}
    sharded, gathered = (scenario({**change, "loss": loss}) for loss in ("sharded", "gathered"))
    cuts = [
        next(dict(each.cuts) for each in value.chosen().shardings if each.operator.endswith(".cross_entropy"))
        for value in (sharded, gathered)
    ]
    assert "vocab" in cuts[0] and "vocab" not in cuts[1]
