"""Sizes of what a calibration measures, and the files of its figures.

Figures of devices are rows: one JSON object a line, written as soon as it is measured.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwise.simulator.models.presets import PRESETS
from meshwise.simulator.models.transformer import Transformer

MEASURED_MODEL = PRESETS["gpt-byte"]
"""The model at whose sizes kernels are measured."""
LLAMA_MODEL = replace(MEASURED_MODEL, ffn_kind="swiglu", positions="rotary", biases="none")
"""The same model with the kernels of a Llama."""
TINY_MODEL = Transformer(layers=2, hidden=8, heads=1, kv_heads=1, ffn=16, vocab=256)
"""A model so small that its time is launches only."""
BATCH, SEQUENCE = 4, 128
MESSAGES = tuple(4**exponent * 1024 for exponent in range(8))
"""Bytes of the measured messages: 1 KiB to 16 MiB."""
MATMULS = (*((m, n, k) for m in (128, 512) for n in (256, 1024) for k in (64, 256, 1024)), (1024, 1024, 1024))
GRADIENTS = ((512, 256, 256), (512, 1024, 256), (512, 256, 1024), (1024, 512, 128), (1024, 128, 512))
"""Products whose gradients are measured."""
ATTENTIONS = ((4, 8, 16), (16, 128, 8), (16, 64, 32), (16, 128, 64))
"""Heads of all sequences, tokens and head dim of measured attention. The first shape is almost only launches; in the
second, exponentials take most of the time."""
PAUSE_SIZE = 400
"""Size of the square product before each collective, about a millisecond, as between collectives of a small layer."""
COPY_BYTES = 64 * 2**20
"""Bytes of a copy that does not fit into any cache."""


def calibration_file(folder: Path, rank: int) -> Path:
    """Return the file into which ``rank`` writes its figures as JSON."""
    return folder / f"rank-{rank}.json"


PUBLISHER = "meshwise calibrate"
"""``source_repo`` of the rows that `meshwise.executor.calibration.device_calibration` measures on a machine."""
DIGITS = 6


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append a row to a file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({name: _round_value(value) for name, value in row.items()}) + "\n")


def count_rows(path: Path) -> int:
    """Return the number of rows in a file, 0 where the file does not exist."""
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def describe_row(row: Mapping[str, Any]) -> str:
    """Return a one-line description of the kernel of a row.

    >>> describe_row({"kernel": "gemm", "dtype": "bf16", "pass": "fwd", "m": 8, "n": 8, "k": 16, "layout": "TN"})
    'gemm bf16 fwd m=8 n=8 k=16 layout=TN'
    """
    words = [str(row[name]) for name in ("kernel", "dtype", "pass") if name in row]
    sizes = [f"{name}={value}" for name, value in row.items() if name not in ("kernel", "dtype", "pass", "note")]
    return " ".join(words + sizes)


def _round_value(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
