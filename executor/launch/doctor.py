"""Reports what this machine has and lacks for executing plans, and the circumstances of measurements."""

import os
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from meshwise.executor.recording.timeline import physical_memory

NEEDED = ("simpy", "networkx", "numpy", "pandas", "matplotlib", "pydantic", "PyYAML", "typer", "rich")
OPTIONAL = {"torch": "execute and calibrate; install the extra exec"}


def report() -> dict[str, Any]:
    """Return versions, cores, memory in bytes, GPUs, installed packages, and missing ones with their purpose."""
    found = {name: _version(name) for name in (*NEEDED, *OPTIONAL)}
    return {
        "meshwise": _version("meshwise"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "executable": sys.executable,
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": physical_memory(),
        "installed": {name: found_version for name, found_version in found.items() if found_version},
        "missing": {name: OPTIONAL.get(name, "needed") for name, found_version in found.items() if not found_version},
        **_torch(),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _torch() -> dict[str, Any]:
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:  # OSError: a shared library of torch's is missing
        return {"gpus": [], "backends": [], "torch_error": str(error)}
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    available = {"gloo": dist.is_available() and dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return {"gpus": gpus, "backends": [name for name, usable in available.items() if usable]}


def circumstances() -> dict[str, str]:
    """Return the versions and the machine that something is measured with."""
    return {
        "meshwise": version("meshwise"),
        "torch": version("torch"),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def today() -> str:
    """Return the date in UTC, as ``2026-11-21``."""
    return time.strftime("%Y-%m-%d", time.gmtime())
