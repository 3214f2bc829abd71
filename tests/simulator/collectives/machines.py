"""Small clusters with numbers that a hand can add, and what groups of their devices cost."""

import numpy as np
from hypothesis import settings

from meshwise.simulator.collective import Algorithm, Collective
from meshwise.simulator.collectives.choose import idle_time, phases
from meshwise.simulator.interconnect.interconnect import interconnect
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster, Node
from meshwise.simulator.machine.host import Host
from meshwise.simulator.machine.topology import Crossbar, Fabric, Link, NodeNetwork, Switch

PORT, NIC = Link(latency=0.25, bandwidth=8.0), Link(latency=0.5, bandwidth=2.0)
CPU = Accelerator("cpu", (("fp32", 1e9),), memory=1e9, memory_bandwidth=1e9)
MANY = settings(max_examples=1000, deadline=None)


def machine(
    nodes: int = 4,
    devices: int = 4,
    *,
    network: NodeNetwork | None = None,
    nics: int | None = None,
    nic: Link = NIC,
    fabric: Fabric | None = None,
) -> Cluster:
    """Return equal nodes; by default a switch inside, a NIC for every device, and full bisection between."""
    node = Node(CPU, Host("h", 1e9), devices, network or Switch(PORT), nics or devices, nic)
    return Cluster("m", ((node, nodes),), fabric or Crossbar())


def time(cluster: Cluster, collective: Collective, algorithm: Algorithm, group: list[int], size: float) -> float:
    """Return the idle time of one group."""
    return idle_time(cluster, phases(cluster, collective, algorithm, np.array([group])), 0, size)


def loads(
    cluster: Cluster, collective: Collective, algorithm: Algorithm, group: list[int], size: float
) -> list[dict[str, float]]:
    """Return for every phase of one group the bytes over each link, by the link's name."""
    network = interconnect(cluster)
    parts = phases(cluster, collective, algorithm, np.array([group]))
    return [
        {network.name(link): size * load for link, load in zip(part.link.tolist(), part.load.tolist(), strict=True)}
        for part in parts
    ]


def latencies(cluster: Cluster, collective: Collective, algorithm: Algorithm, group: list[int]) -> list[float]:
    """Return the latency of every phase of one group."""
    return [float(part.latency[0]) for part in phases(cluster, collective, algorithm, np.array([group]))]


def ends(group: list[int], part: str, sent: float, received: float) -> dict[str, float]:
    """Return the same bytes over both ways of every port or NIC."""
    return {f"{part} {d} {way}": load for d in group for way, load in (("out", sent), ("in", received))}
