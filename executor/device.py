"""The devices on which ranks train, by name; `meshwise.executor.recording.accelerator` implements them.

It also keeps oneDNN off matrix tiles (AMX) that a processor announces but traps on, as some virtual machines do.
"""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

CPU, CUDA = "cpu", "cuda"
DEVICES = (CPU, CUDA)
"""Names of devices: cores with gloo between ranks, GPUs with NCCL."""


def check_device(device: str) -> None:
    """Raise ``ValueError`` where there is no device of that name."""
    if device not in DEVICES:
        raise ValueError(f"--device: {' or '.join(DEVICES)}, met {device[:60]!r}; nearest: {CPU}")


def require_device(device: str, ranks: int) -> None:
    """Raise where this host lacks devices for ``ranks`` ranks: a GPU for each one; cores are shared.

    Raises
    ------
    ValueError
        Where there is no such device, or this host has too few GPUs.
    """
    check_device(device)
    if device == CUDA:
        gpus = count_gpus()
        if gpus < ranks:
            near = f"a plan of {gpus} rank{'s' if gpus > 1 else ''}, or --device {CPU}" if gpus else f"--device {CPU}"
            needs = f"{ranks} GPU{'s' if ranks > 1 else ''}"
            raise ValueError(f"--device: cuda needs {needs}, one for each rank of a host, met {gpus}; nearest: {near}")


def count_gpus() -> int:
    """Return how many GPUs torch sees on this host."""
    import torch

    return torch.cuda.device_count()


_LIMIT = "ONEDNN_MAX_CPU_ISA"
_WITHOUT_TILES = "AVX512_CORE_FP16"  # the last of oneDNN's instruction sets before those with tiles
_PRODUCT = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"


def avoid_broken_tiles() -> None:
    """Make this process and its children compute bf16 without tiles where a product with tiles kills a process.

    The trial takes a few seconds, once a process and only where the processor announces tiles. A limit that the user
    has set stays. oneDNN reads the limit at its first product.
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
