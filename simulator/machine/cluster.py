"""The machine: nodes of accelerators, what joins them, and what is not as it should be.

A `Cluster` is a list of nodes, equal or not, on a `Fabric`. It is plain data; `meshwise.simulator.interconnect` turns
it into links and routes. Its communication `Library` says how it drives the links that it is given.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.brief import brief
from meshwise.simulator.collective import Algorithm, Collective, CollectiveCurve
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.host import Host
from meshwise.simulator.machine.topology import Crossbar, Fabric, Graph, Link, NodeNetwork, Switch, Torus


@dataclass(frozen=True, slots=True)
class Protocol:
    """A way to move a collective's bytes, beside the one that links are described by.

    Parameters
    ----------
    name
        What the library calls it.
    launch, step
        Its launch and the latency of its steps, as parts of those of the links.
    payload
        Part of the bandwidth that is left for the bytes of a collective, in (0, 1]; the rest
        are flags and idle time.
    messages
        Whether sends and all-to-alls may use it too, not only collectives that go in steps.

    Notes
    -----
    NCCL has three protocols [1]_. *Simple*, which links are described by, moves large chunks and
    waits for a flag in memory. *LL* writes 4 bytes of flag with every 4 of data, *LL128* 8 with
    every 120, and neither waits; both reach less of the bandwidth than that alone would leave.
    Sends and all-to-alls have LL and Simple [2]_.

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
        """Return the latency of a phase, of which ``launch`` is paid once and the rest in steps."""
        return launch * self.launch + (latency - launch) * self.step


SIMPLE = Protocol("simple", launch=1.0, step=1.0, payload=1.0)
"""The protocol that links are described by."""


@dataclass(frozen=True, slots=True)
class Library:
    """What a communication library makes of links; by default nothing is lost.

    Parameters
    ----------
    protocols
        Those that it has beside `SIMPLE`. It takes the fastest for every collective and size, except
        for one in switches, which runs by `SIMPLE` alone.
    own
        Bytes of its port that each byte costs which a rank of a group inside a node keeps for itself,
        because it copies it too: a ring all-gather puts ``(n - 1 + own) / n`` of the size on a port.
    reduction
        Part of a port's bandwidth that collectives in the switches of a node reach, in (0, 1].
    reduction_launch
        What they cost once besides, in s.
    """

    protocols: tuple[Protocol, ...] = ()
    own: float = 0.0
    reduction: float = 1.0
    reduction_launch: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.own <= 2 and 0 < self.reduction <= 1 and self.reduction_launch >= 0):
            raise ValueError(f"own lies in [0, 2], reduction in (0, 1], reduction_launch >= 0, met {self}")

    def ways(self, latency: float, launch: float | None, messages: bool) -> Iterator[tuple[float, float]]:
        """Yield (latency, bytes on links for every byte) of a phase by every protocol that may run it.

        ``launch`` is the part of its latency that is paid once, ``None`` where `SIMPLE` alone may run it;
        ``messages`` says that it is sends or an all-to-all.
        """
        yield latency, 1.0
        if launch is not None:
            for protocol in self.protocols:
                if protocol.messages or not messages:
                    yield protocol.latency(latency, launch), 1.0 / protocol.payload


LOSSLESS = Library()
"""The library that makes of links what they are: `SIMPLE` alone, and nothing lost."""


FULL_BISECTION = Crossbar()
"""The fabric of clusters that name none."""


@dataclass(frozen=True, slots=True)
class Node:
    """Devices that share the fast interconnect, their host or hosts, and their NICs.

    Parameters
    ----------
    devices
        Accelerators of the node.
    network
        How they reach each other.
    nics, nic
        NICs that they share evenly, and one direction of one NIC's link.
    hosts
        Hosts that hold the devices evenly: more than one in a rack-scale node.
    """

    accelerator: Accelerator
    host: Host
    devices: int
    network: NodeNetwork
    nics: int
    nic: Link
    hosts: int = 1

    __repr__ = brief()

    def __post_init__(self) -> None:
        if min(self.devices, self.nics, self.hosts) < 1:
            raise ValueError(
                f"devices, nics and hosts of a node are at least 1, met {self.devices}, {self.nics}, {self.hosts}"
            )
        if self.devices % self.hosts:
            raise ValueError(f"hosts({self.hosts}) divide the devices({self.devices}) of a node")


@dataclass(frozen=True, slots=True)
class Tenant:
    """Another job on the network: over and over its ``devices`` exchange ``size`` bytes by ``collective``.

    It starts at ``start`` and every ``period`` s after, or when the last exchange has ended if that is later.
    """

    name: str
    devices: tuple[int, ...]
    collective: Collective
    size: float
    period: float
    start: float = 0.0

    __repr__ = brief()

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
        Kinds of node, each with how many of it follow each other; devices are numbered through.
    fabric
        How nodes reach each other; a `Torus` or a `Graph` joins the devices themselves.
    speeds
        Devices that compute slower or faster than their data sheet, as (device, factor).
    link_speeds
        Links that are slower or faster than built, by name, as ``("nic 3 out", 0.5)``.
    collectives
        Measured curves; a curve for the very collective and group size replaces the model.
    algorithms
        Algorithms that the user fixes; the others are chosen by size and topology.
    tenants
        Other jobs on the same network.
    overlap_slowdown
        Factor by which computing takes longer while a collective of the data axis runs beneath it.
    library
        What the communication library makes of the links.
    estimated
        In words, which figures were measured neither on this machine nor on one like it, and where they come from.
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
    library: Library = LOSSLESS
    estimated: tuple[str, ...] = ()

    __repr__ = brief()

    def __post_init__(self) -> None:
        if not self.nodes or min(count for _, count in self.nodes) < 1:
            raise ValueError(f"cluster {self.name}: nodes are at least 1, met {[count for _, count in self.nodes]}")
        total = self.num_devices
        if isinstance(self.fabric, Torus) and self.fabric.num_devices != total:
            shape = " * ".join(map(str, self.fabric.shape))
            raise ValueError(f"torus {shape} = {prod(self.fabric.shape)} devices, the nodes have {total}")
        if isinstance(self.fabric, Graph):
            names = {name for a, b, _ in self.fabric.edges for name in (a, b)}
            missing = next((d for d in range(total) if f"device {d}" not in names), None)
            if missing is not None:
                raise ValueError(f"a graph has a vertex for every device, met none named device {missing}")
        for device, factor in self.speeds:
            if not (0 <= device < total and factor > 0):
                raise ValueError(f"speeds are (device below {total}, factor above 0), met ({device}, {factor})")
        for tenant in self.tenants:
            if max(tenant.devices) >= total or min(tenant.devices) < 0:
                raise ValueError(f"tenant {tenant.name}: devices are below {total}, met {max(tenant.devices)}")
        if not 1 <= self.overlap_slowdown <= 2:
            raise ValueError(f"overlap_slowdown lies in [1, 2], met {self.overlap_slowdown}")

    def resized(self, nodes: int | None = None, devices_per_node: int | None = None) -> "Cluster":
        """Return the same machine with another number of nodes, or of devices in each.

        Raises
        ------
        ValueError
            Where the nodes are of different kinds, or the fabric has a size of its own.
        """
        if len(self.nodes) > 1 or isinstance(self.fabric, Torus | Graph):
            raise ValueError(f"cluster {self.name}: a mixed cluster, a torus and a graph have a size of their own")
        devices = self.first.devices if devices_per_node is None else devices_per_node
        return replace(self, nodes=((replace(self.first, devices=devices), nodes or self.num_nodes),))

    def with_nodes(self, change: Callable[[Node], Node]) -> "Cluster":
        """Return the same machine with ``change`` made to every kind of node."""
        return replace(self, nodes=tuple((change(node), count) for node, count in self.nodes))

    def with_accelerators(self, change: Callable[[Accelerator], Accelerator]) -> "Cluster":
        """Return the same machine with ``change`` made to every kind of accelerator.

        >>> from meshwise.simulator.catalog import cluster
        >>> half = cluster("dgx-h100").with_accelerators(lambda each: each.at_speed(0.5))
        >>> cluster("dgx-h100").accelerator.memory_bandwidth / half.accelerator.memory_bandwidth
        2.0
        """
        return self.with_nodes(lambda node: replace(node, accelerator=change(node.accelerator)))

    @property
    def num_devices(self) -> int:
        """Accelerators in all."""
        return sum(node.devices * count for node, count in self.nodes)

    @property
    def num_nodes(self) -> int:
        """Nodes in all."""
        return sum(count for _, count in self.nodes)

    @property
    def first(self) -> Node:
        """The first kind of node; the only one of a homogeneous cluster."""
        return self.nodes[0][0]

    @property
    def accelerator(self) -> Accelerator:
        """The first node's accelerator."""
        return self.first.accelerator

    @property
    def host(self) -> Host:
        """The first node's host."""
        return self.first.host

    @property
    def accelerators(self) -> tuple[Accelerator, ...]:
        """The different accelerators, in order of nodes."""
        return tuple(dict.fromkeys(node.accelerator for node, _ in self.nodes))

    def accelerator_of(self, device: int) -> Accelerator:
        """Return the accelerator of ``device``, at its own speed."""
        return _at_speed(self.node_kind(device).accelerator, self._speed.get(device, 1.0))

    def node_of(self, device: int) -> int:
        """Return the node that holds ``device``."""
        return int(self.device_nodes[device])

    def node_kind(self, device: int) -> Node:
        """Return the kind of node that holds ``device``."""
        return self.nodes[int(self.node_kinds[self.device_nodes[device]])][0]

    @cached_property
    def _speed(self) -> dict[int, float]:
        return dict(self.speeds)

    @cached_property
    def free_devices(self) -> Sequence[int]:
        """The devices that no tenant uses, in order."""
        if not self.tenants:
            return range(self.num_devices)
        taken = {device for tenant in self.tenants for device in tenant.devices}
        return tuple(device for device in range(self.num_devices) if device not in taken)

    @cached_property
    def node_kinds(self) -> NDArray[np.int64]:
        """For every node, the index of its kind in ``nodes``."""
        return np.repeat(np.arange(len(self.nodes)), [count for _, count in self.nodes])

    @cached_property
    def device_nodes(self) -> NDArray[np.int64]:
        """For every device, its node."""
        devices = np.array([node.devices for node, _ in self.nodes])[self.node_kinds]
        return np.repeat(np.arange(len(devices)), devices)

    @cached_property
    def device_kinds(self) -> NDArray[np.int64]:
        """For every device, a number for its accelerator and speed: equal numbers compute alike."""
        order = {accelerator: index for index, accelerator in enumerate(self.accelerators)}
        of_kind = np.array([order[node.accelerator] for node, _ in self.nodes])
        kinds = of_kind[self.node_kinds[self.device_nodes]]
        numbers: dict[tuple[int, float], int] = {}
        for device, factor in self.speeds:
            if factor != 1.0:
                kinds[device] = len(order) + numbers.setdefault((int(kinds[device]), factor), len(numbers))
        return kinds

    @cached_property
    def first_devices(self) -> NDArray[np.int64]:
        """For every node its first device, and after the last the number of devices."""
        devices = [node.devices for node, count in self.nodes for _ in range(count)]
        return np.array([0, *accumulate(devices)])


@lru_cache(maxsize=1024)
def _at_speed(accelerator: Accelerator, factor: float) -> Accelerator:
    return accelerator.at_speed(factor) if factor != 1.0 else accelerator


def homogeneous(
    name: str,
    accelerator: Accelerator,
    host: Host,
    nodes: int,
    devices_per_node: int,
    intra_node: Link | NodeNetwork,
    inter_node: Link,
    nics_per_node: int = 1,
) -> Cluster:
    """Return ``nodes`` equal nodes; a plain link inside a node is a port into its switch."""
    network = Switch(intra_node) if isinstance(intra_node, Link) else intra_node
    node = Node(accelerator, host, devices_per_node, network, nics_per_node, inter_node)
    return Cluster(name, ((node, nodes),))
