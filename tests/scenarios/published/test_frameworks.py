"""Rows whose publishers spell things their own way: each is predicted, or skipped with a reason."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.scenarios.published.frameworks import find_entry, zero_stage
from meshwise.scenarios.published.row import Row
from meshwise.scenarios.published.runs import build_run

ROW: dict[str, Any] = {
    "row_id": "one", "source_id": "ours", "model": "Llama-2-7B", "arch": "llama", "n_layers": 4, "hidden": 1024,
    "n_heads": 16, "ffn_hidden": 2816, "vocab": 32000, "seq_len": 2048, "precision": "bf16", "framework": "Megatron-LM",
    "accelerator": "A100-SXM4-80GB", "n_devices": 16, "devices_per_node": 8, "dp": 4, "tp": 2, "pp": 2,
    "micro_batch": 1, "grad_accum": 4, "global_batch": 16, "step_time_s": 1.0,
}  # fmt: skip
SPELLINGS: dict[str, tuple[object, ...]] = {
    "framework": ("torchtitan", "DeepSpeed", "HF Trainer", "Accelerate + FSDP", "nanotron", "Colossal-AI", "Alpa",
                  "Pax", "T5X", "MindSpore", "PaddleNLP", "GPT-NeoX", "ms-swift", "veScale", "Primus", "levanter",
                  "LitGPT", ""),
    "recompute": ("none", "AC", "no AC", "remat", "selective op", "every 2 layers", "block 3", True, False, 1, 0, None),
    "precision": ("bf16-mixed", "MXFP8", "NVFP4", "float8 rowwise", "AMP", "HYBRID", "TF32", None),
    "accelerator": ("H200", "MI300X", "L4", "V100-SXM2-16GB", "TPU v6e", "Gaudi 3", "GB200 NVL72",
                    "Ascend 910B", "abacus"),
    "inter_node_link": ("8x400Gb/s RoCEv2", "EFA 3200 Gbps", "Slingshot-11", "CX-7 400Gb/s x 8", "100 GbE", "none"),
    "intra_node_link": ("NVSwitch", "PCIe Gen5", "xGMI", "NVL72", "ICI", "no NVLink"),
    "schedule": ("AFAB", "Interleaved1F1B", "ScheduleZBVZeroBubble", "DualPipe", "LoopedBFS", "Seq1F1B"),
    "zero_stage": (0, "ZeRO-3", "stage 2", "FSDP", "hpZ", "MiCS", "os+g", "none"),
    "optimizer": ("paged_adamw_8bit", "adamw_torch_fused", "Muon", "LAMB", "GaLore", None),
    "offload": ("none", "cpu", "ZeRO-Infinity NVMe", "activations", True),
    "seq_len": ("4k", "2048 tokens", None),
    "global_batch": ("512k tokens", 17, None),
    "micro_batch": (0.5, 3, "1-4", None),
    "dp": ("auto", 3, None),
    "nic_gbps_per_device": ("8x400", "200 Gb/s", 0),
    "model": ("Mixtral 8x7B", "BERT-large", "Stable Diffusion XL", "Mamba-2.8B", "Llama-2-7B QLoRA", "7B", ""),
}  # fmt: skip


@given(st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in SPELLINGS.items()}))
@settings(max_examples=150, deadline=None)
def test_every_row_is_predicted_or_skipped_with_a_reason(changes: dict[str, object]) -> None:
    run = build_run(ROW | changes)
    assert (run.scenario is None) == bool(run.skipped)
    fields = (*ROW, "model", "plan", "arch")
    assert not run.skipped or run.skipped.startswith(fields) or " divides " in run.skipped, run.skipped


@pytest.mark.parametrize(("field", "value"), [(name, value) for name, values in SPELLINGS.items() for value in values])
def test_one_spelling_alone_skips_no_row(field: str, value: object) -> None:
    run = build_run(ROW | {field: value})
    assert not run.skipped


@pytest.mark.parametrize(
    ("words", "family", "zero"),
    [
        ("Megatron-LM", "megatron", 0),
        ("MegaScale", "megatron", 0),
        ("Primus (Megatron)", "megatron", 0),
        ("Primus-torchtitan", "torch", 3),
        ("NeMo 24.07", "megatron", 1),
        ("torchtitan", "torch", 3),
        ("torchtune", "torch", 3),
        ("Colossal-AI Gemini", "autograd", 3),
        ("DeepSpeed ZeRO++", "autograd", 3),
        ("DeepSpeed ZeRO-2", "autograd", 2),
        ("PyTorch DDP", "torch", 0),
        ("MaxText", "xla", 3),
        ("levanter", "xla", 3),
        ("PaxML", "xla", 0),
        ("Alpa", "xla", 0),
    ],
)
def test_families_of_frameworks(words: str, family: str, zero: int) -> None:
    row = Row({"framework": words})
    assert (find_entry(row).family, zero_stage(row)) == (family, zero)
