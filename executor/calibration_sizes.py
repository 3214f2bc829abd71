"""What a calibration measures, and where its figures go."""

from dataclasses import replace
from pathlib import Path

from simulator.models.presets import PRESETS
from simulator.models.transformer import Transformer

MEASURED = PRESETS["gpt-byte"]
"""The model at whose sizes kernels are measured."""
LLAMA = replace(MEASURED, ffn_kind="swiglu", positions="rotary", biases="none")
"""The same with the kernels of a Llama."""
TINY = Transformer(layers=2, hidden=8, heads=1, kv_heads=1, ffn=16, vocab=256)
"""A model so small that only its launches count."""
BATCH, SEQUENCE = 4, 128
MESSAGES = tuple(4**exponent * 1024 for exponent in range(8))
"""Bytes of the measured messages: 1 KiB to 16 MiB."""
MATMULS = (*((m, n, k) for m in (128, 512) for n in (256, 1024) for k in (64, 256, 1024)), (1024, 1024, 1024))
GRADIENTS = ((512, 256, 256), (512, 1024, 256), (512, 256, 1024), (1024, 512, 128), (1024, 128, 512))
"""Products whose gradients are measured."""
ATTENTIONS = ((4, 8, 16), (16, 128, 8), (16, 64, 32), (16, 128, 64))
"""Heads of all sequences, tokens and head dim of measured attention: the first is almost all launches, and in the
second exponentials take most of the time."""
BETWEEN = 400
"""Size of the square product before each collective: about a millisecond, as between those of a small layer."""
COPY = 64 * 2**20
"""Bytes of a copy that no cache holds."""


def calibration_file(folder: Path, rank: int) -> Path:
    """Return where ``rank`` leaves its figures as JSON."""
    return folder / f"rank-{rank}.json"
