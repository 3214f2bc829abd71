"""Reports what this machine has and lacks for executing plans."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from meshwise.executor.device import read_memory_size

REQUIRED_PACKAGES = ("simpy", "networkx", "numpy", "pandas", "matplotlib", "pydantic", "PyYAML", "typer", "rich")
OPTIONAL_PACKAGES = {"torch": "execute and calibrate; install the extra exec"}


def build_report() -> dict[str, Any]:
    """Return versions, cores, memory in bytes, GPUs, installed packages, and missing ones with their purpose."""
    versions = {name: _get_version(name) for name in (*REQUIRED_PACKAGES, *OPTIONAL_PACKAGES)}
    return {
        "meshwise": _get_version("meshwise"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "executable": sys.executable,
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": read_memory_size(),
        "installed": {name: package_version for name, package_version in versions.items() if package_version},
        "missing": {
            name: OPTIONAL_PACKAGES.get(name, "needed")
            for name, package_version in versions.items()
            if not package_version
        },
        **_describe_torch(),
    }


def _get_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _describe_torch() -> dict[str, Any]:
    try:
        import torch.distributed
    except (ImportError, OSError) as error:  # OSError: a shared library of torch's is missing
        return {"gpus": [], "backends": [], "torch_error": str(error)}
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    dist = torch.distributed
    backends = {"gloo": dist.is_available() and dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return {"gpus": gpus, "backends": [name for name, is_usable in backends.items() if is_usable]}
