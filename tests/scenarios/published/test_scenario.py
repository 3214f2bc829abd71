from typing import Any

import pytest

from meshwise.scenarios.published.accuracy import list_techniques
from meshwise.scenarios.published.runs import build_run
from meshwise.scenarios.scenario import Scenario

ROW = {
    "row_id": "one", "source_id": "ours", "model": "small", "arch": "gpt", "n_layers": 8, "hidden": 1024,
    "n_heads": 16, "ffn_hidden": 4096, "vocab": 51200, "seq_len": 1024, "precision": "bf16", "accelerator": "H100 SXM",
    "accel_mem_gb": 80, "n_devices": 8, "devices_per_node": 8, "dp": 4, "tp": 2, "pp": 1, "cp": 1, "ep": 1, "vpp": 1,
    "zero_stage": 0, "recompute": "none", "micro_batch": 1, "global_batch": 8, "schedule": "1F1B", "offload": "none",
    "framework": "NeMo", "status": "ok", "step_time_s": 0.1,
}  # fmt: skip


def scenario(change: dict[str, Any]) -> Scenario:
    run = build_run(ROW | change)
    assert run.scenario is not None, run.skipped
    return run.scenario


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
            "tensor communication runs beside products, as maxtext does there (tp_overlap not stated)",
        ),
        ({"n_heads": 17}, "n_heads 18, for tp(2) does not divide 17"),
        (
            {"global_batch": 2, "dp": 5, "n_devices": 10},
            "global_batch 5, for dp(5) * micro_batch(1) do not divide 2; which of them is meant is not understood",
        ),
        ({"seq_len": None}, "seq_len 4096 (a guess, for no field tells)"),
        ({"recompute": None}, "recompute none, micro_batch 1: of what is not stated the first that fits"),
        ({"tp": 1, "dp": 8, "ep": 3, "moe_experts": 6}, "expert 1, for expert divides data(8), met 3"),
    ],
)
def test_every_assumption_is_listed(change: dict[str, Any], line: str) -> None:
    assumed = build_run(ROW | change).assumed
    assert any(each.startswith(line) for each in assumed), assumed


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"model": "Stable Diffusion XL", "arch": "unet"},
            "arch is of a diffusion model, whose sizes a row cannot state, and model names none known",
        ),
        ({"n_layers": None, "hidden": None}, "n_layers and hidden are not stated, and model names none that is known"),
        ({"tp": 3}, "tp(3) * pp(1) * cp(1) = 3 divides n_devices, met 8"),
        ({"tp": "two"}, "tp is a number above 0, met 'two'"),
        ({"n_devices": None, "dp": None}, "n_devices is not stated, and neither is dp"),
    ],
)
def test_what_cannot_be_expressed_has_a_reason(change: dict[str, Any], reason: str) -> None:
    run = build_run(ROW | change)
    assert run.scenario is None and run.skipped == reason


def test_techniques() -> None:
    assert list_techniques(scenario({"tp_overlap": False})) == ("dp", "tp", "sp")
    assert list_techniques(scenario({"tp_overlap": True})) == ("dp", "tp", "sp", "tp overlap")
    mixed = scenario(
        {"tp": 1, "dp": 8, "ep": 4, "moe_experts": 8, "zero_stage": 3, "recompute": "full", "precision": "fp8"}
    )
    assert list_techniques(mixed) == ("dp", "ep", "zero3", "recompute", "fp8", "moe")
    assert list_techniques(scenario({"n_devices": 1, "dp": 1, "tp": 1})) == ("plain",)


@pytest.mark.parametrize(
    ("framework", "expected"),
    [
        ("Megatron-LM (April 2021)", "megatron_2021"),
        ("Megatron-LM v2.4", "megatron_2021"),
        ("Megatron-LM", "megatron_plain_loss"),
        ("Megatron-LM (mcore, 2024-07)", "megatron_plain_loss"),
        ("Megatron-LM 23e00ed0 + TE 2.5", "megatron_plain_loss"),
        ("NeMo", "nemo"),
        ("torchtitan", "torchtitan"),
    ],
)
def test_products_of_megatron_from_before_2022_neither_add_nor_sum_gradients(framework: str, expected: str) -> None:
    assert scenario({"framework": framework}).problem.training.framework == expected


COMPOSED = ("rms_norm", "rotary", "gated_activation", "softmax")
"""Kinds of operators of which torch runs several kernels."""


@pytest.mark.parametrize(
    ("note", "expected"),
    [
        ("cross-entropy fusion (cef)", "megatron"),
        ("no-gradient-accumulation-fusion=True", "megatron_plain"),
        ("test gpt3_cross_entropy_loss_fusion", "megatron_compiled_loss"),
        ("cross-entropy-loss-fusion=True; no-gradient-accumulation-fusion=True", "megatron_plain_compiled_loss"),
    ],
)
def test_what_megatron_fuses_is_read_from_the_notes(note: str, expected: str) -> None:
    row = {"framework": "Megatron-LM", "plan_note": note}
    assert scenario(row).problem.training.framework == expected


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        ({"gradient_precision": "bf16"}, {"gradient_precision": "same"}),
        ({"gradient_precision": "fp32"}, {"gradient_precision": "fp32"}),
        ({"norm_kernel": "eager", "framework": "PyTorch"}, {"composed": COMPOSED}),
        ({"norm_kernel": "fused", "framework": "PyTorch"}, {"composed": COMPOSED[1:]}),
        ({"attention_kernel": "unfused, fused softmax", "framework": "PyTorch"}, {"composed": COMPOSED[:3]}),
        ({"attention_kernel": "unfused, torch softmax", "framework": "NeMo"}, {"composed": COMPOSED[3:]}),
        ({"norm_kernel": "eager", "framework": "PyTorch", "compiled": True}, {"composed": ("rms_norm",)}),
        ({"framework": "Megatron-LM", "norm_kernel": "fused"}, {"composed": ()}),
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
    assumptions = scenario({"norm_kernel": "fuzed", "gradient_precision": "bf8"}).assumptions
    assert "norm_kernel 'fuzed' is not understood; nearest known word: fused" in assumptions
    assert any(line.startswith("gradient_precision 'bf8' is not understood") for line in assumptions)


def test_gathered_logits_are_whole_on_every_tensor_rank() -> None:
    change = {"framework": "a trainer", "tp": 8, "pp": 1, "dp": 1, "n_devices": 8, "devices_per_node": 8}
    sharded, gathered = (scenario({**change, "loss": loss}) for loss in ("sharded", "gathered"))
    cuts = [
        next(dict(each.cuts) for each in value.choose_plan().shardings if each.operator.endswith(".cross_entropy"))
        for value in (sharded, gathered)
    ]
    assert "vocab" in cuts[0] and "vocab" not in cuts[1]
