"""Rows of what is measured: one JSON object a line, written as soon as it is known."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PUBLISHER = "meshwise calibrate"
"""``source_repo`` of rows that were measured on one machine by `executor.device_calibration`."""
DIGITS = 6


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row at the end of a file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({name: _rounded(value) for name, value in row.items()}) + "\n")


def count(path: Path) -> int:
    """Return how many rows a file has; none where there is no file."""
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def described(row: Mapping[str, Any]) -> str:
    """Return what a kernel's row is of, in one line.

    >>> described({"kernel": "gemm", "dtype": "bf16", "pass": "fwd", "m": 8, "n": 8, "k": 16, "layout": "TN"})
    'gemm bf16 fwd m=8 n=8 k=16 layout=TN'
    """
    words = [str(row[name]) for name in ("kernel", "dtype", "pass") if name in row]
    sizes = [f"{name}={value}" for name, value in row.items() if name not in ("kernel", "dtype", "pass", "note")]
    return " ".join(words + sizes)


def _rounded(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
