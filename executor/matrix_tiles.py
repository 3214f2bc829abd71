"""Keeps oneDNN off matrix tiles (AMX) that a processor announces and then traps on, as some virtual machines do."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

_LIMIT = "ONEDNN_MAX_CPU_ISA"
_WITHOUT_TILES = "AVX512_CORE_FP16"  # the last of oneDNN's instruction sets before those with tiles
_PRODUCT = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"


def avoid_broken_tiles() -> None:
    """Let this process and those it starts compute bf16 without tiles where a product with them kills a process.

    It takes a few seconds, once a process and only where tiles are announced; a limit that the user has set stays.
    oneDNN reads the limit at its first product.
    """
    if _LIMIT not in os.environ and _are_announced() and _is_trap():
        os.environ[_LIMIT] = _WITHOUT_TILES


def _are_announced() -> bool:
    described = Path("/proc/cpuinfo")
    return described.exists() and _has_tiles(described.read_text())


def _has_tiles(described: str) -> bool:
    return "amx_tile" in described.split()


@cache
def _is_trap() -> bool:
    ended = subprocess.run([sys.executable, "-c", _PRODUCT], stderr=subprocess.DEVNULL, check=False)
    return ended.returncode < 0
