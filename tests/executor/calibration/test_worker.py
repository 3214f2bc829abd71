"""Processes that time a device import torch, and nothing that simulates."""

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[3]


def test_workers_need_torch_and_nothing_that_simulates() -> None:
    absent = ("simpy", "pandas", "numba", "pydantic", "yaml", "typer", "rich", "highspy", "matplotlib", "scipy")
    modules = (
        "meshwise.executor.calibration.device_calibration",
        "meshwise.executor.calibration.worker",
        "meshwise.executor.calibration.device_measures",
        "meshwise.executor.calibration.device_training",
        "meshwise.executor.calibration.device_transfers",
    )
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); import {', '.join(modules)}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
