"""Rows of kernels: every one runs, the project reads each, and runs in a row are told apart."""

import json
from collections import Counter

import pytest

torch = pytest.importorskip("torch")
from meshwise.executor.calibration import device_kernels  # noqa: E402
from meshwise.executor.calibration.device_kernels import build_product  # noqa: E402
from meshwise.executor.calibration.device_measures import CPU_SIZES, GPU_SIZES, list_kernels, list_repeated_kernels  # noqa: E402
from meshwise.simulator.calibration.kernel_rows import read_rows  # noqa: E402

from .test_device_kernels import read  # noqa: E402

MACHINE = {"source_id": "s", "source_repo": "meshwise calibrate", "accelerator": "H200 SXM"}


def test_every_kernel_runs_and_every_row_is_read() -> None:
    lines = []
    for kernel in (*list_kernels(CPU_SIZES, "cpu"), *list_repeated_kernels(CPU_SIZES)):
        kernel.prepare("cpu")()
        lines.append(json.dumps({**MACHINE, **kernel.fields, "time_us": 1.0}).encode())
    used, skipped = read_rows(lines)  # raises where a line is no row
    assert len(used) + len(skipped) == len(lines)


def test_a_gpu_is_measured_on_what_the_fit_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_kernels, "has_fp8", lambda device: True)
    lines = [
        json.dumps({**MACHINE, **kernel.fields, "time_us": 1.0}).encode() for kernel in list_kernels(GPU_SIZES, "cpu")
    ]
    families = Counter(row.family for row in read_rows(lines)[0])
    for name in ("matmul forward", "matmul input gradient", "matmul weight gradient", "attention forward"):
        assert families[name] >= 30, families
    for name in ("matmul forward tf32", "matmul forward fp8", "batched matmul forward", "norm backward", "optimizer"):
        assert families[name] >= 3, families
    assert len(set(lines)) == len(lines)  # nothing is measured twice


def test_runs_in_a_row_tell_a_burst_from_sustained_work() -> None:
    kernel = build_product("bf16", 8, 8, 8)
    assert read(kernel, in_a_row=1, time_us=9_000).burst  # 9 ms, and clocks sink in 10
    assert not read(kernel, in_a_row=2, time_us=9_000).burst
    assert not read(kernel, time_us=9_000).burst  # where nothing is said clocks have sunk
