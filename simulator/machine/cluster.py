"""Clusters: nodes of accelerators on a fabric, with their slow devices and links, and other tenants.

A `Cluster` lists nodes, equal or not, on a `Fabric`. It is plain data; `meshwise.simulator.interconnect` turns it into
links and routes. Its `CommunicationLibrary` says how well collectives use the links.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.brief import brief_repr
from meshwise.simulator.collective import Algorithm, Collective, CollectiveCurve
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.factors import RunCalibration
from meshwise.simulator.machine.host import Host
from meshwise.simulator.machine.topology import Crossbar, Fabric, Graph, Link, NodeNetwork, Switch, Torus


@dataclass(frozen=True, slots=True)
class Protocol:
    """A protocol of a communication library; its figures are relative to `SIMPLE`, for which links hold.

    Parameters
    ----------
    name
        Name in the library.
    launch, step
        Its launch and the latency of its steps, as fractions of those of the links.
    payload
        Fraction of the bandwidth that carries bytes of the collective, in (0, 1]; flags and idle time take the rest.
    messages
        Whether sends and all-to-alls may use it too, not only collectives that go in steps.

    Notes
    -----
    NCCL has three protocols [1]_. *Simple*, for which links hold, moves large chunks and waits for a flag in memory.
    *LL* writes 4 bytes of flag with every 4 of data, *LL128* 8 with every 120, and neither waits; both reach less of
    the bandwidth than the flags alone would leave. Sends and all-to-alls have LL and Simple [2]_.

    References
    ----------
    .. [1] NVIDIA/nccl, src/graph/tuning.cc and src/device/prims_ll128.h.
    .. [2] NVIDIA/nccl, src/enqueue.cc: ``NCCL_P2P_LL_THRESHOLD``.
    """

    name: str
    launch: float
    step: float
    payload: float
    messages: bool = False

    def __post_init__(self) -> None:
        if not (self.launch >= 0 and self.step >= 0 and 0 < self.payload <= 1):
            raise ValueError(f"a protocol has launch >= 0, step >= 0 and payload in (0, 1], met {self}")

    def latency(self, latency: float, launch: float) -> float:
        """Return the latency in s of a phase under this protocol.

        ``latency`` is that of the phase under `SIMPLE`; its part ``launch`` is paid once, the rest in steps.
        """
        return launch * self.launch + (latency - launch) * self.step


SIMPLE = Protocol("simple", launch=1.0, step=1.0, payload=1.0)
"""The protocol for which latency, launch and bandwidth of links hold."""


@dataclass(frozen=True, slots=True)
class CommunicationLibrary:
    """A communication library such as NCCL: how well it uses links. By default it loses nothing.

    Parameters
    ----------
    protocols
        Its protocols besides `SIMPLE`. It runs each collective of each size by the fastest one; collectives in
        switches run by `SIMPLE` alone.
    own
        Cost of the copy of a rank's own part of a buffer, for groups inside a node: bytes on the rank's port per byte
        copied. A ring all-gather puts ``(n - 1 + own) / n`` of the size on a port.
    reduction
        Fraction of a port's bandwidth that collectives in the switches of a node reach, in (0, 1].
    reduction_launch
        Extra seconds that such a collective costs once.
    """

    protocols: tuple[Protocol, ...] = ()
    own: float = 0.0
    reduction: float = 1.0
    reduction_launch: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.own <= 2 and 0 < self.reduction <= 1 and self.reduction_launch >= 0):
            raise ValueError(f"own lies in [0, 2], reduction in (0, 1], reduction_launch >= 0, met {self}")

    def list_protocol_costs(
        self, latency: float, launch: float | None, messages: bool
    ) -> Iterator[tuple[float, float]]:
        """Yield (seconds of latency, bytes on links per byte moved) of a phase for every protocol that may run it.

        ``launch`` is the part of the latency that is paid once, or ``None`` if `SIMPLE` alone may run the phase;
        ``messages`` says whether the phase is sends or an all-to-all.
        """
        yield latency, 1.0
        if launch is not None:
            for protocol in self.protocols:
                if protocol.messages or not messages:
                    yield protocol.latency(latency, launch), 1.0 / protocol.payload


LOSSLESS = CommunicationLibrary()
"""A library with `SIMPLE` alone that reaches the full rate of links."""


FULL_BISECTION = Crossbar()
"""The fabric of clusters that do not name one."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node: devices on one fast network, with their hosts and NICs.

    Parameters
    ----------
    devices
        Number of accelerators.
    network
        Network between them.
    nics, nic
        Number of NICs, which the devices share evenly, and one direction of the link of each.
    hosts
        Number of hosts, each with an even share of the devices: more than one in a rack-scale node.
    """

    accelerator: Accelerator
    host: Host
    devices: int
    network: NodeNetwork
    nics: int
    nic: Link
    hosts: int = 1

    __repr__ = brief_repr()

    def __post_init__(self) -> None:
        if min(self.devices, self.nics, self.hosts) < 1:
            raise ValueError(
                f"devices, nics and hosts of a node are at least 1, met {self.devices}, {self.nics}, {self.hosts}"
            )
        if self.devices % self.hosts:
            raise ValueError(f"hosts({self.hosts}) divide the devices({self.devices}) of a node")


@dataclass(frozen=True, slots=True)
class Tenant:
    """Another job on the network, whose ``devices`` repeat a ``collective`` of ``size`` bytes.

    The first one begins at second ``start``, and each later one ``period`` seconds after the one before it, or at the
    end of that one if it takes longer.
    """

    name: str
    devices: tuple[int, ...]
    collective: Collective
    size: float
    period: float
    start: float = 0.0

    __repr__ = brief_repr()

    def __post_init__(self) -> None:
        if len(set(self.devices)) < 2 or len(set(self.devices)) != len(self.devices):
            raise ValueError(f"tenant {self.name} has at least two different devices")
        if self.size <= 0 or self.period <= 0 or self.start < 0:
            raise ValueError(f"tenant {self.name}: size and period are positive, start is not negative")


@dataclass(frozen=True)
class Cluster:
    """Nodes on a fabric.

    Parameters
    ----------
    nodes
        Kinds of node, each with the number of nodes of it that follow each other. Devices are numbered in this order.
    fabric
        Network between nodes; a `Torus` or a `Graph` joins the devices themselves.
    speeds
        Devices that are slower or faster than their data sheet, as (device, factor).
    link_speeds
        Links that are slower or faster than built, by name, as ``("nic 3 out", 0.5)``.
    collectives
        Measured curves; a curve for the same collective and group size replaces the model.
    algorithms
        Algorithms that the user fixes; for other collectives the fastest is chosen by size and topology.
    tenants
        Other jobs on the same network.
    overlap_slowdown
        Time of computing beneath a collective over its time alone: collectives take processors and memory bandwidth.
    library
        Communication library of the machine.
    estimated
        Sentences that name the figures measured neither on this machine nor on one like it, and their origin.
    calibration
        What measured steps told about this machine, whose figures have the factors already; ``None`` without any.
    """

    name: str
    nodes: tuple[tuple[Node, int], ...]
    fabric: Fabric = FULL_BISECTION
    speeds: tuple[tuple[int, float], ...] = ()
    link_speeds: tuple[tuple[str, float], ...] = ()
    collectives: tuple[CollectiveCurve, ...] = ()
    algorithms: tuple[tuple[Collective, Algorithm], ...] = ()
    tenants: tuple[Tenant, ...] = ()
    overlap_slowdown: float = 1.0
    library: CommunicationLibrary = LOSSLESS
    estimated: tuple[str, ...] = ()
    calibration: RunCalibration | None = None

    __repr__ = brief_repr()

    def __post_init__(self) -> None:
        if not self.nodes or min(count for _, count in self.nodes) < 1:
            raise ValueError(f"cluster {self.name}: nodes are at least 1, met {[count for _, count in self.nodes]}")
        total = self.num_devices
        if isinstance(self.fabric, Torus) and self.fabric.num_devices != total:
            shape = " * ".join(map(str, self.fabric.shape))
            raise ValueError(f"torus {shape} = {prod(self.fabric.shape)} devices, the nodes have {total}")
        if isinstance(self.fabric, Graph):
            names = {name for a, b, _ in self.fabric.edges for name in (a, b)}
            missing_device = next((d for d in range(total) if f"device {d}" not in names), None)
            if missing_device is not None:
                raise ValueError(f"a graph has a vertex for every device, met none named device {missing_device}")
        for device, factor in self.speeds:
            if not (0 <= device < total and factor > 0):
                raise ValueError(f"speeds are (device below {total}, factor above 0), met ({device}, {factor})")
        for tenant in self.tenants:
            if max(tenant.devices) >= total or min(tenant.devices) < 0:
                raise ValueError(f"tenant {tenant.name}: devices are below {total}, met {max(tenant.devices)}")
        if not 1 <= self.overlap_slowdown <= 2:
            raise ValueError(f"overlap_slowdown lies in [1, 2], met {self.overlap_slowdown}")

    def with_size(self, nodes: int | None = None, devices_per_node: int | None = None) -> "Cluster":
        """Return the same machine with another number of nodes, or of devices in each.

        Raises
        ------
        ValueError
            If the nodes are of different kinds, or the fabric fixes their number.
        """
        if len(self.nodes) > 1 or isinstance(self.fabric, Torus | Graph):
            raise ValueError(f"cluster {self.name}: a mixed cluster, a torus and a graph have a size of their own")
        devices = self.first_node.devices if devices_per_node is None else devices_per_node
        return replace(self, nodes=((replace(self.first_node, devices=devices), nodes or self.num_nodes),))

    def with_nodes(self, change: Callable[[Node], Node]) -> "Cluster":
        """Return the same machine with every kind of node replaced by ``change`` of it."""
        return replace(self, nodes=tuple((change(node), count) for node, count in self.nodes))

    def with_accelerators(self, change: Callable[[Accelerator], Accelerator]) -> "Cluster":
        """Return the same machine with every kind of accelerator replaced by ``change`` of it.

        >>> from meshwise.simulator.catalog import cluster
        >>> half = cluster("dgx-h100").with_accelerators(lambda each: each.at_speed(0.5))
        >>> cluster("dgx-h100").accelerator.memory_bandwidth / half.accelerator.memory_bandwidth
        2.0
        """
        return self.with_nodes(lambda node: replace(node, accelerator=change(node.accelerator)))

    @property
    def num_devices(self) -> int:
        """Number of accelerators."""
        return sum(node.devices * count for node, count in self.nodes)

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return sum(count for _, count in self.nodes)

    @property
    def first_node(self) -> Node:
        """The first kind of node; the only one of a homogeneous cluster."""
        return self.nodes[0][0]

    @property
    def accelerator(self) -> Accelerator:
        """The accelerator of the first kind of node; a mixed cluster has others too (`accelerators`)."""
        return self.first_node.accelerator

    @property
    def host(self) -> Host:
        """The host of the first kind of node; a mixed cluster may have others too."""
        return self.first_node.host

    @property
    def accelerators(self) -> tuple[Accelerator, ...]:
        """The distinct accelerators, in order of nodes."""
        return tuple(dict.fromkeys(node.accelerator for node, _ in self.nodes))

    def accelerator_of(self, device: int) -> Accelerator:
        """Return the accelerator of ``device`` at its speed in ``speeds``."""
        return _at_speed(self.node_kind(device).accelerator, self._speed.get(device, 1.0))

    def node_of(self, device: int) -> int:
        """Return the number of the node of ``device``."""
        return int(self.device_nodes[device])

    def node_kind(self, device: int) -> Node:
        """Return the kind of the node of ``device``."""
        return self.nodes[int(self.node_kinds[self.device_nodes[device]])][0]

    @cached_property
    def _speed(self) -> dict[int, float]:
        return dict(self.speeds)

    @cached_property
    def free_devices(self) -> Sequence[int]:
        """Devices that no tenant uses, in order."""
        if not self.tenants:
            return range(self.num_devices)
        tenant_devices = {device for tenant in self.tenants for device in tenant.devices}
        return tuple(device for device in range(self.num_devices) if device not in tenant_devices)

    @cached_property
    def node_kinds(self) -> NDArray[np.int64]:
        """For every node, the index of its kind in ``nodes``."""
        return np.repeat(np.arange(len(self.nodes)), [count for _, count in self.nodes])

    @cached_property
    def device_nodes(self) -> NDArray[np.int64]:
        """For every device, the number of its node."""
        devices = np.array([node.devices for node, _ in self.nodes])[self.node_kinds]
        return np.repeat(np.arange(len(devices)), devices)

    @cached_property
    def device_kinds(self) -> NDArray[np.int64]:
        """For every device a number, equal for devices of the same accelerator and speed."""
        order = {accelerator: index for index, accelerator in enumerate(self.accelerators)}
        kind_numbers = np.array([order[node.accelerator] for node, _ in self.nodes])
        kinds = kind_numbers[self.node_kinds[self.device_nodes]]
        numbers: dict[tuple[int, float], int] = {}
        for device, factor in self.speeds:
            if factor != 1.0:
                kinds[device] = len(order) + numbers.setdefault((int(kinds[device]), factor), len(numbers))
        return kinds

    @cached_property
    def first_devices(self) -> NDArray[np.int64]:
        """For every node its first device; the last entry is the number of devices."""
        devices = [node.devices for node, count in self.nodes for _ in range(count)]
        return np.array([0, *accumulate(devices)])


@lru_cache(maxsize=1024)
def _at_speed(accelerator: Accelerator, factor: float) -> Accelerator:
    return accelerator.at_speed(factor) if factor != 1.0 else accelerator


def build_homogeneous(
    name: str,
    accelerator: Accelerator,
    host: Host,
    nodes: int,
    devices_per_node: int,
    intra_node: Link | NodeNetwork,
    inter_node: Link,
    nics_per_node: int = 1,
) -> Cluster:
    """Return a cluster of ``nodes`` equal nodes; a plain link as ``intra_node`` is a port into a switch."""
    network = Switch(intra_node) if isinstance(intra_node, Link) else intra_node
    node = Node(accelerator, host, devices_per_node, network, nics_per_node, inter_node)
    return Cluster(name, ((node, nodes),))
