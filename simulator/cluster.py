"""The machine: accelerators, hosts and the links between them.

A `Cluster` is a set of nodes; a node has a host, accelerators joined by an
intra-node interconnect, and NICs into the inter-node fabric. The topology is a
networkx graph underneath (`Cluster.topology`); routes and groups are typed values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise

import networkx as nx


class Collective(StrEnum):
    """A communication among a group of ranks, or between two."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    SEND = "send"


@dataclass(frozen=True, slots=True)
class MatmulModel:
    """How near a matrix multiplication comes to the peak of an accelerator.

    ``time = launch + waves(m, n) * wave_work / (peak * fraction * k / (k + half_k))``: a
    tile of ``tile`` rows and columns runs on one of ``units`` processors, and the last
    wave of tiles costs as much as a full one where ``units`` is not 0.

    Parameters
    ----------
    fraction
        Largest fraction of the data-sheet peak, for a large reduction dim.
    half_k
        Reduction length at which half of that fraction is reached.
    tile
        Rows and columns of the output tile of one processor.
    units
        Processors that work on tiles at once; 0 for no wave quantisation.
    gradient
        Rate of the two gradient products, bias gradient included, over that of forward.
    """

    fraction: float = 1.0
    half_k: float = 0.0
    tile: tuple[int, int] = (1, 1)
    units: int = 0
    gradient: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"matmul fraction lies in (0, 1], met {self.fraction}")
        if not 0 < self.gradient <= 2:
            raise ValueError(f"matmul gradient lies in (0, 2], met {self.gradient}")
        if self.half_k < 0 or self.units < 0 or min(self.tile) < 1:
            raise ValueError(f"matmul half_k, units and tile are not negative, met {self}")


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A device that computes.

    Parameters
    ----------
    peak_flops
        Dense peak in FLOP/s by dtype, as ``(("bf16", 312e12), ...)``.
    memory
        Bytes of device memory.
    memory_bandwidth
        Bytes a second between the device and its memory.
    launch
        Seconds that the device is busy for one kernel besides its work.
    matmul
        How near matrix multiplications come to the peak.
    kernel_bandwidth
        Fraction of ``memory_bandwidth`` reached by a kind of operator, as
        ``(("norm", 0.4), ...)``; kinds that are not named reach ``kernel_bandwidth_default``.
    reserved
        Bytes of memory that the framework takes before the first tensor.
    sharded_launch
        Seconds that a kernel on tensors cut over ranks takes more, and the update of a cut
        parameter, where the framework's dispatch is not hidden (torch's DTensor on a CPU).
    optimizer_launch
        Seconds that the optimizer takes for one parameter tensor besides its memory traffic;
        0 for fused optimizers.
    computes_collectives
        Whether collectives run on the very cores that compute (gloo on a CPU): then nothing
        is hidden beneath compute.
    """

    name: str
    peak_flops: tuple[tuple[str, float], ...]
    memory: float
    memory_bandwidth: float
    launch: float = 0.0
    matmul: MatmulModel = MatmulModel()
    kernel_bandwidth: tuple[tuple[str, float], ...] = ()
    kernel_bandwidth_default: float = 1.0
    reserved: float = 0.0
    sharded_launch: float = 0.0
    optimizer_launch: float = 0.0
    computes_collectives: bool = False

    def __post_init__(self) -> None:
        if not self.peak_flops or min(rate for _, rate in self.peak_flops) <= 0:
            raise ValueError(f"accelerator {self.name}: peak_flops are positive, met {self.peak_flops}")
        if min(self.memory, self.memory_bandwidth) <= 0:
            raise ValueError(f"accelerator {self.name}: memory and bandwidth are positive, met {self}")
        if min(self.launch, self.reserved, self.sharded_launch, self.optimizer_launch) < 0:
            raise ValueError(f"accelerator {self.name}: launch and reserved are not negative, met {self}")

    def peak(self, dtype: str) -> float:
        """Return the dense peak in FLOP/s for ``dtype``; ``ValueError`` where it is not known."""
        for name, rate in self.peak_flops:
            if name == dtype:
                return rate
        known = ", ".join(name for name, _ in self.peak_flops)
        raise ValueError(f"accelerator {self.name} has no peak for {dtype}; known: {known}")

    def bandwidth(self, kind: str) -> float:
        """Return the memory bandwidth in byte/s that operators of ``kind`` reach."""
        fraction = dict(self.kernel_bandwidth).get(kind, self.kernel_bandwidth_default)
        return self.memory_bandwidth * fraction


@dataclass(frozen=True, slots=True)
class Host:
    """The computer that holds accelerators: ``memory`` in byte, ``memory_bandwidth`` in byte/s."""

    name: str
    memory: float
    memory_bandwidth: float = float("inf")
    cores: int = 1


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a connection: ``latency`` in s, ``bandwidth`` in byte/s.

    ``launch`` is what a collective over this link costs once, in s, besides its steps.
    """

    latency: float
    bandwidth: float
    launch: float = 0.0

    def __post_init__(self) -> None:
        if self.latency < 0 or self.launch < 0 or self.bandwidth <= 0:
            raise ValueError(f"a link has latency >= 0 and bandwidth > 0, met {self}")


@dataclass(frozen=True, slots=True)
class CollectiveCurve:
    """Measured time of a collective on ``ranks`` ranks: ``points`` of (bytes, seconds), sizes rising.

    The size of all-reduce, broadcast and send is the buffer of one rank; of all-gather,
    reduce-scatter and all-to-all it is the full buffer (all shards together).
    """

    collective: Collective
    ranks: int
    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)) or min(t for _, t in self.points) <= 0 or sizes[0] <= 0:
            raise ValueError(f"{self.collective} over {self.ranks} ranks: sizes rise and times are positive")

    def time(self, size: float) -> float:
        """Return seconds for ``size`` bytes: linear between points, first time below, last rate above."""
        points = self.points
        if size <= points[0][0]:
            return points[0][1]
        for (x0, y0), (x1, y1) in pairwise(points):
            if size <= x1:
                return y0 + (y1 - y0) * (size - x0) / (x1 - x0)
        x1, y1 = points[-1]
        x0, y0 = points[-2] if len(points) > 1 else (0.0, 0.0)
        slope = max((y1 - y0) / (x1 - x0), 0.0)
        return y1 + slope * (size - x1)


@dataclass(frozen=True, slots=True)
class Cluster:
    """``nodes`` equal nodes of ``devices_per_node`` accelerators.

    Parameters
    ----------
    intra_node
        Link of one accelerator into its node's switch, one direction.
    inter_node
        Link of one NIC into the fabric, one direction; the fabric has full bisection.
    nics_per_node
        NICs that a node's accelerators share evenly.
    collectives
        Measured curves; a curve for the very collective and group size replaces the model.
    """

    name: str
    accelerator: Accelerator
    host: Host
    nodes: int
    devices_per_node: int
    intra_node: Link
    inter_node: Link
    nics_per_node: int = 1
    collectives: tuple[CollectiveCurve, ...] = ()

    def __post_init__(self) -> None:
        if min(self.nodes, self.devices_per_node, self.nics_per_node) < 1:
            raise ValueError(
                f"cluster {self.name}: nodes, devices_per_node and nics_per_node are at least 1, "
                f"met {self.nodes}, {self.devices_per_node}, {self.nics_per_node}"
            )

    @property
    def num_devices(self) -> int:
        """Accelerators in all."""
        return self.nodes * self.devices_per_node

    def node(self, device: int) -> int:
        """Return the node that holds ``device``."""
        return device // self.devices_per_node

    def nic(self, device: int) -> int:
        """Return the NIC, counted over the whole cluster, that ``device`` uses."""
        local = device % self.devices_per_node * self.nics_per_node // self.devices_per_node
        return self.node(device) * self.nics_per_node + local

    def route(self, source: int, target: int) -> tuple["Port", ...]:
        """Return the ports that a message from one device to another occupies."""
        if source == target:
            return ()
        if self.node(source) == self.node(target):
            return (Port(PortKind.DEVICE_OUT, source), Port(PortKind.DEVICE_IN, target))
        return (Port(PortKind.NIC_OUT, self.nic(source)), Port(PortKind.NIC_IN, self.nic(target)))

    def port_link(self, port: "Port") -> Link:
        """Return the link behind ``port``."""
        inside = port.kind in (PortKind.DEVICE_OUT, PortKind.DEVICE_IN)
        return self.intra_node if inside else self.inter_node

    def topology(self) -> "nx.DiGraph[tuple[str, int]]":
        """Return the interconnect as a directed graph whose edges carry a `Link` as ``link``."""
        return _topology(self)

    def spans(self, devices: Sequence[int]) -> tuple[int, ...]:
        """Return how many of ``devices`` sit on each node they touch, in node order."""
        counts: dict[int, int] = {}
        for device in devices:
            counts[self.node(device)] = counts.get(self.node(device), 0) + 1
        return tuple(counts[node] for node in sorted(counts))


class PortKind(StrEnum):
    """Which end of which connection a port is."""

    DEVICE_OUT = "device out"
    DEVICE_IN = "device in"
    NIC_OUT = "nic out"
    NIC_IN = "nic in"


@dataclass(frozen=True, slots=True, order=True)
class Port:
    """One direction of a device's or a NIC's connection: what transfers share."""

    kind: PortKind
    index: int

    def __str__(self) -> str:
        return f"{self.kind} {self.index}"


@lru_cache(maxsize=4)
def _topology(cluster: Cluster) -> "nx.DiGraph[tuple[str, int]]":
    graph: nx.DiGraph[tuple[str, int]] = nx.DiGraph()
    for device in range(cluster.num_devices):
        switch, nic = ("switch", cluster.node(device)), ("nic", cluster.nic(device))
        for a, b in ((("device", device), switch), (switch, ("device", device))):
            graph.add_edge(a, b, link=cluster.intra_node)
        for a, b in ((("device", device), nic), (nic, ("device", device))):
            graph.add_edge(a, b, link=None)  # inside the host: not modelled as a bottleneck
    for nic_index in range(cluster.nodes * cluster.nics_per_node):
        for a, b in ((("nic", nic_index), ("fabric", 0)), (("fabric", 0), ("nic", nic_index))):
            graph.add_edge(a, b, link=cluster.inter_node)
    return graph
