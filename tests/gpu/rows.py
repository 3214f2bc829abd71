"""Rows of measurements on one device, one JSON object a line, each with when and on what it was measured."""

import gc
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meshwise.executor.device import CUDA, count_gpus

OK, FAILED, LEFT_OUT = "ok", "failed", "left out"
"""The status of a row."""
LONGEST_REASON = 500


def describe_device(device: str) -> dict[str, Any]:
    """Return the device's name, its driver, and the versions that it is used with."""
    import torch

    has_gpu = device == CUDA and count_gpus() > 0
    return {
        "device": torch.cuda.get_device_name(0) if has_gpu else platform.processor() or platform.machine(),
        "driver": _ask_driver() if has_gpu else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if has_gpu else None,
        "python": platform.python_version(),
    }


def _ask_driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


class RowFile:
    """A file to which rows are appended as they are measured, so that they stay however the run ends."""

    def __init__(self, path: Path, part: str, device: str, *, is_tiny: bool) -> None:
        self.path, self.part = path, part
        self._facts = describe_device(device) | {"tiny": is_tiny}

    def write(self, case: str, status: str, **figures: Any) -> None:
        """Append a row, and tell it."""
        date = datetime.now(UTC).isoformat(timespec="seconds")
        row = {"part": self.part, "case": case, "status": status, **figures, "date": date, **self._facts}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(describe_row(row), file=sys.stderr, flush=True)

    def measure(self, case: str, run: Callable[[], dict[str, Any]]) -> None:
        """Append what ``run`` returns; a failure is a row with its reason, and others go on."""
        try:
            figures = run()
        except Exception as error:  # whatever torch, a compiler or a device raises
            self.write(case, FAILED, reason=f"{type(error).__name__}: {str(error).strip()}"[:LONGEST_REASON])
        else:
            self.write(case, OK, **figures)
        finally:
            free_memory()


def free_memory() -> None:
    """Free what the models of a case held."""
    import torch

    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def describe_row(row: dict[str, Any]) -> str:
    """Return a row in a line of text."""
    told = row.get("summary") or str(row.get("reason", "")).partition("\n")[0]
    return f"{row['part']:<12}{row['status']:<10}{row['case']}{': ' if told else ''}{told}"
