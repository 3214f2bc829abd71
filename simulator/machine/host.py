"""The computer that holds accelerators: its memory, and the PCIe tree between it and them."""

from dataclasses import dataclass
from math import inf

from meshwise.simulator.machine.topology import Link


@dataclass(frozen=True, slots=True)
class Pcie:
    """The way from host memory to its devices, one direction; NICs sit behind the same switches.

    Parameters
    ----------
    link
        One device's slot.
    devices_per_switch
        Devices that share one switch, and its uplink, which is as wide as one slot.
    """

    link: Link
    devices_per_switch: int = 1

    def __post_init__(self) -> None:
        if self.devices_per_switch < 1:
            raise ValueError(f"devices_per_switch is at least 1, met {self.devices_per_switch}")


@dataclass(frozen=True, slots=True)
class Host:
    """The computer that holds accelerators.

    Parameters
    ----------
    memory
        Bytes.
    memory_bandwidth
        Byte/s of all its NUMA nodes together, each direction of a copy.
    cores
        Processor cores.
    launch
        Seconds that a process takes to launch one kernel; 0 where graphs are replayed.
    numa_nodes
        Memories, each with an even share of bandwidth and devices.
    pcie
        How devices reach the host; ``None`` where devices use host memory itself.
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
