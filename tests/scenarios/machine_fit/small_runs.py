"""Rows of small plans of one made-up machine, for tests that fit it."""

from dataclasses import replace
from typing import Any

from meshwise.scenarios.machine_fit.shares import predict_time
from meshwise.scenarios.published.runs import Run, build_run
from meshwise.simulator.machine.factors import Factors

ROW: dict[str, Any] = {
    "row_id": "base", "source_id": "ours", "model": "small", "arch": "gpt", "n_layers": 4, "hidden": 8192,
    "n_heads": 64, "ffn_hidden": 32768, "vocab": 51200, "seq_len": 2048, "precision": "bf16", "accelerator": "A100 SXM",
    "accel_mem_gb": 80, "framework": "Megatron-LM", "n_devices": 16, "devices_per_node": 8, "dp": 16, "tp": 1, "pp": 1,
    "zero_stage": 1, "recompute": "none", "micro_batch": 1, "global_batch": 32, "schedule": "1F1B", "status": "ok",
    "step_time_s": 1.0,
}  # fmt: skip

CHANGES: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"dp": 2, "tp": 8},
    "tensor over nodes": {"dp": 1, "tp": 16},
    "pipeline": {"dp": 4, "pp": 4},
    "small": {"hidden": 256, "ffn_hidden": 1024, "n_heads": 4, "seq_len": 256},
    "recompute": {"recompute": "full", "micro_batch": 2},
}

RUNS = [ROW | changes | {"row_id": name} for name, changes in CHANGES.items()]


def measure(row: dict[str, Any], factors: Factors) -> Run:
    """Return the run of a row as a machine with factors would have measured it."""
    run = build_run(row)
    assert run.scenario is not None, run.skipped
    seconds = predict_time(run.scenario.problem, run.scenario.choose_plan(), factors.logarithms)
    return replace(run, step_time=seconds)
