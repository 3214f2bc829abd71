"""``meshwise calibrate`` on GPUs, in its two steps: rows of the device, and the machine that is fitted to them."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from meshwise.executor.device import CUDA

from .rows import RowFile, read_rows

LONGEST = 330.0
"""Seconds after which the measurement is given up."""
MODULE = "meshwise.executor.calibration.device_calibration"


def calibrate(device: str, file: Path, options: Sequence[str]) -> dict[str, Any]:
    """Return how many rows were measured of each kind into a file, and the seconds."""
    start = monotonic()
    told = _run([MODULE, "--out", str(file), "--device", device, *options], LONGEST).stderr
    rows = read_rows(file)
    kinds = Counter(str(row.get("kernel", row.get("kind", "other"))) for row in rows)
    return {
        "rows": dict(kinds),
        "left_out": [line for line in told.splitlines() if line.startswith("left out")],
        "file": file.name,
        "seconds": monotonic() - start,
        "summary": f"{len(rows)} rows of {len(kinds)} kinds in {monotonic() - start:.0f} s, in {file.name}",
    }


def fit(file: Path) -> dict[str, Any]:
    """Return the machine that is fitted to rows of a device of the catalogue."""
    out = file.with_suffix(".yaml")
    result = _run(["meshwise", "calibrate", "--from", str(file), "--out", str(out), "--json"])
    return {"machine": json.loads(result.stdout), "file": out.name, "summary": f"a cluster file, {out.name}"}


def _run(arguments: Sequence[str], longest: float = 30.0) -> subprocess.CompletedProcess[str]:
    """Run a module of Python; ``RuntimeError`` with its last line where it fails."""
    command = [sys.executable, "-m", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=longest, check=False)
    if result.returncode:
        raise RuntimeError((result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1])
    return result


def measure(rows: RowFile, device: str, *, is_tiny: bool) -> None:
    """Measure the device and fit a machine to it, a row each; cores are fitted otherwise, and only measured here."""
    options = ["--seconds", "1", "--only", "kernels"] if is_tiny else ["--seconds", "60"]
    file = rows.path.with_suffix(".calibration.jsonl")
    rows.measure("rows of the device", partial(calibrate, device, file, options))
    if device == CUDA:
        rows.measure("machine", partial(fit, file))
