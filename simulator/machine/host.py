"""The host computer of accelerators: its memory, and the PCIe tree between it and them."""

from dataclasses import dataclass
from math import inf

from meshwise.simulator.machine.topology import Link


@dataclass(frozen=True, slots=True)
class Pcie:
    """PCIe tree between host memory and devices; NICs are behind the same switches.

    Parameters
    ----------
    link
        One direction of a device's slot.
    devices_per_switch
        Devices that share one switch and its uplink, which is as wide as one slot.
    """

    link: Link
    devices_per_switch: int = 1

    def __post_init__(self) -> None:
        if self.devices_per_switch < 1:
            raise ValueError(f"devices_per_switch is at least 1, met {self.devices_per_switch}")


@dataclass(frozen=True, slots=True)
class Host:
    """A host computer.

    Parameters
    ----------
    memory
        Bytes.
    memory_bandwidth
        Byte/s of all NUMA nodes together, in each direction of a copy.
    cores
        Processor cores.
    launch
        Seconds that a process takes to launch one kernel; 0 if graphs are replayed.
    numa_nodes
        NUMA nodes, each with an even share of bandwidth and devices.
    pcie
        PCIe tree by which devices reach the host; ``None`` if devices use host memory itself.
    """

    name: str
    memory: float
    memory_bandwidth: float = inf
    cores: int = 1
    launch: float = 0.0
    numa_nodes: int = 1
    pcie: Pcie | None = None

    def __post_init__(self) -> None:
        if min(self.memory, self.memory_bandwidth) <= 0 or min(self.cores, self.numa_nodes) < 1:
            raise ValueError(f"host {self.name}: memory, bandwidth, cores and numa_nodes are positive, met {self}")
        if self.launch < 0:
            raise ValueError(f"host {self.name}: launch is not negative, met {self.launch}")
