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


def require_device(device: str, num_ranks: int) -> None:
    """Raise ``ValueError`` where this host lacks devices for ``num_ranks`` ranks: a GPU for each; cores are shared."""
    check_device(device)
    if device == CUDA:
        num_gpus = count_gpus()
        if num_gpus < num_ranks:
            nearest = (
                f"a plan of {num_gpus} rank{'s' if num_gpus > 1 else ''}, or --device {CPU}"
                if num_gpus
                else f"--device {CPU}"
            )
            requirement = f"{num_ranks} GPU{'s' if num_ranks > 1 else ''}"
            raise ValueError(
                f"--device: cuda needs {requirement}, one for each rank of a host, met {num_gpus}; nearest: {nearest}"
            )


def count_gpus() -> int:
    """Return how many GPUs torch sees on this host."""
    import torch

    return torch.cuda.device_count()


def read_memory_size() -> float:
    """Return the bytes of this host's main memory."""
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def read_device_memory(device: str) -> float:
    """Return the bytes that tensors on a device of a kind may take: a GPU's own memory, or main memory."""
    if device == CPU or not count_gpus():
        return read_memory_size()
    import torch

    return float(torch.cuda.get_device_properties(0).total_memory)


_ISA_LIMIT = "ONEDNN_MAX_CPU_ISA"
_LAST_WITHOUT_TILES = "AVX512_CORE_FP16"  # the last of oneDNN's instruction sets before those with tiles
_PRODUCT = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"


def avoid_broken_tiles() -> None:
    """Make this process and its children compute bf16 without tiles where a product with tiles kills a process.

    The trial takes a few seconds, once a process and only where the processor announces tiles. A limit that the user
    has set stays. oneDNN reads the limit at its first product.
    """
    if _ISA_LIMIT not in os.environ and _announces_tiles() and _tiles_trap():
        os.environ[_ISA_LIMIT] = _LAST_WITHOUT_TILES


def _announces_tiles() -> bool:
    cpu_file = Path("/proc/cpuinfo")
    return cpu_file.exists() and _has_tiles(cpu_file.read_text())


def _has_tiles(cpu_text: str) -> bool:
    return "amx_tile" in cpu_text.split()


@cache
def _tiles_trap() -> bool:
    process = subprocess.run([sys.executable, "-c", _PRODUCT], stderr=subprocess.DEVNULL, check=False)
    return process.returncode < 0
