"""``meshwise calibrate`` on the device: a cluster file, and the rows that it is fitted to."""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from .rows import RowFile, read_rows

SECONDS, TINY_SECONDS = 60, 2
LONGEST = 340.0
"""Seconds after which a calibration is given up."""


def calibrate(device: str, seconds: int) -> dict[str, Any]:
    """Return what the command told, how many rows it measured of each kind, and its time."""
    with tempfile.TemporaryDirectory(prefix="meshwise-") as name:
        out, start = Path(name, "machine.yaml"), monotonic()
        command = [sys.executable, "-m", "meshwise", "calibrate", "--device", device, "--seconds", str(seconds)]
        result = subprocess.run(
            [*command, "--out", str(out), "--json"], capture_output=True, text=True, timeout=LONGEST, check=False
        )
        if result.returncode:
            lines = result.stderr.strip().splitlines() or [str(result.returncode)]
            raise RuntimeError(lines[-1])
        rows_file = out.with_suffix(".jsonl")
        rows = read_rows(rows_file) if rows_file.exists() else []
        kinds = Counter(str(row.get("kind", row.get("op", "row"))) for row in rows)
        figures = {"seconds": monotonic() - start, "rows": dict(kinds), "cluster": json.loads(result.stdout)}
        told = f"{len(rows)} rows, " if rows else ""
        return figures | {"summary": f"{told}{figures['seconds']:.0f} s"}


def measure(rows: RowFile, device: str, *, is_tiny: bool) -> None:
    """Calibrate, in a row."""
    rows.measure("meshwise calibrate", partial(calibrate, device, TINY_SECONDS if is_tiny else SECONDS))
