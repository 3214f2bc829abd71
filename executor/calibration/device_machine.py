"""Describes the machine whose devices are measured, in the words of rows of measurements."""

import datetime
import os
import platform
import re
from dataclasses import dataclass
from typing import Any

import torch

from meshwise.executor.calibration.figures import PUBLISHER
from meshwise.executor.device import read_memory_size

GIB = 2.0**30

_NAMES = (
    (r"GH200 480GB", "GH200 SXM 96GB", "NVLink4"),
    (r"GB200\b", "GB200 SXM", "NVLink5/NVSwitch"),
    (r"B200\b", "B200 SXM", "NVLink5/NVSwitch"),
    (r"H200$", "H200 SXM", "NVLink4/NVSwitch"),
    (r"H100 80GB HBM3", "H100 SXM", "NVLink4/NVSwitch"),
    (r"A100-SXM4-80GB", "A100 SXM", "NVLink3/NVSwitch"),
    (r"A100-SXM4-40GB", "A100 SXM 40GB", "NVLink3/NVSwitch"),
    (r"A100 80GB PCIe", "A100 PCIe", "PCIe"),
    (r"L40S", "L40S", "PCIe"),
    (r"V100-SXM2-16GB", "V100 SXM2 16GB", "NVLink2"),
    (r"V100-SXM2", "V100 SXM2", "NVLink2"),
)
"""Name of a device by its driver, and the names of device and links in rows, which the simulator reads."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that rows were measured on.

    Parameters
    ----------
    accelerator, link
        Names of the device and of the links between devices, in the words of rows.
    memory, host_memory
        Bytes of one device and of the host.
    """

    accelerator: str
    link: str
    num_devices: int
    memory: float
    host: str
    host_memory: float
    cores: int
    software: str
    date: str

    def fields(self) -> dict[str, Any]:
        """Return the fields that every row of this machine has; ``data/README.md`` explains them."""
        words = re.sub(r"[^a-z0-9]+", "_", self.accelerator.lower())
        return {
            "source_id": f"meshwise_{words}_{self.date}",
            "source_repo": PUBLISHER,
            "date": self.date,
            "machine": self.host,
            "accelerator": self.accelerator,
            "accel_mem_gb": self.memory / 1e9,
            "devices_per_node": self.num_devices,
            "host_mem_GiB": self.host_memory / GIB,
            "cores": self.cores,
            "software": self.software,
        }


def describe_machine(device: str) -> Machine:
    """Return this machine with its devices of a kind, ``"cuda"`` or ``"cpu"``; a device of a CPU is a core."""
    is_cuda = device == "cuda"
    host_memory = read_memory_size()
    cores = os.cpu_count() or 1
    name, link = look_up_name(torch.cuda.get_device_name(0)) if is_cuda else ("cpu", "shared memory")
    num_devices = torch.cuda.device_count() if is_cuda else cores
    if is_cuda and num_devices > 1 and not torch.cuda.can_device_access_peer(0, 1):
        link = "PCIe"
    return Machine(
        accelerator=name,
        link=link,
        num_devices=num_devices,
        memory=float(torch.cuda.get_device_properties(0).total_memory) if is_cuda else host_memory / cores,
        host=platform.node() or "host",
        host_memory=host_memory,
        cores=cores,
        software=f"torch {torch.__version__}" + (f", CUDA {torch.version.cuda}" if is_cuda else ""),
        date=datetime.date.today().isoformat(),
    )


def look_up_name(device: str) -> tuple[str, str]:
    """Return the names of a device and its links in rows, by the driver's name; that name and PCIe where unknown.

    >>> look_up_name("NVIDIA H200")
    ('H200 SXM', 'NVLink4/NVSwitch')
    >>> look_up_name("NVIDIA H200 NVL")
    ('NVIDIA H200 NVL', 'PCIe')
    """
    for pattern, name, link in _NAMES:
        if re.search(pattern, device):
            return name, link
    return device, "PCIe"
