"""The parts of a machine that can be faster or slower, each as a change of the cluster."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.machine.host import Host
from meshwise.simulator.machine.topology import Crossbar, Graph, Link, Torus
from meshwise.simulator.units import format_bandwidth, format_compute_rate


class MachinePart(NamedTuple):
    """A part of a machine: its name, its speed in words, and a function from a factor to the scaled cluster.

    Where all parts but latencies and launches are ``factor`` times as fast, no step takes less than its time
    divided by ``factor``.
    """

    name: str
    speed: str
    scaled: Callable[[float], Cluster]


def machine_parts(cluster: Cluster, precision: str) -> tuple[MachinePart, ...]:
    """Return the parts of a cluster: FLOP/s in a precision, memory bandwidth, and every kind of link that it has."""
    return tuple(_parts(cluster, precision))


def with_memory(cluster: Cluster, change: Callable[[float], float]) -> Cluster:
    """Return a cluster whose devices have other memory; ``change`` maps old to new bytes."""
    return cluster.with_accelerators(lambda device: replace(device, memory=change(device.memory)))


def with_host_memory(cluster: Cluster, change: Callable[[float], float]) -> Cluster:
    """Return a cluster whose hosts have other memory; ``change`` maps old to new bytes."""
    return cluster.with_nodes(lambda node: replace(node, host=replace(node.host, memory=change(node.host.memory))))


def _parts(cluster: Cluster, precision: str) -> Iterator[MachinePart]:
    device = cluster.accelerator
    yield MachinePart(
        "FLOP/s",
        format_compute_rate(device.peak(precision)),
        lambda factor: cluster.with_accelerators(
            lambda each: replace(each, peak_flops=tuple((d, r * factor) for d, r in each.peak_flops))
        ),
    )
    yield MachinePart(
        "memory bandwidth",
        format_bandwidth(device.memory_bandwidth),
        lambda factor: cluster.with_accelerators(
            lambda each: replace(each, memory_bandwidth=each.memory_bandwidth * factor)
        ),
    )
    direct = isinstance(cluster.fabric, Torus | Graph)
    if not direct and max(node.devices for node, _ in cluster.nodes) > 1:
        inside = cluster.first.network.link
        yield MachinePart("links inside a node", format_bandwidth(inside.bandwidth), lambda f: _inside(cluster, f))
    if direct or cluster.num_nodes > 1:
        link = next(_links(cluster.fabric)) if direct else cluster.first.nic
        name = "links between devices" if direct else "links between nodes"
        yield MachinePart(name, format_bandwidth(link.bandwidth), lambda factor: _between(cluster, factor))
    if any(node.host.pcie for node, _ in cluster.nodes):
        pcie = next(node.host.pcie for node, _ in cluster.nodes if node.host.pcie)
        yield MachinePart("links to hosts", format_bandwidth(pcie.link.bandwidth), lambda f: _to_hosts(cluster, f))


def _inside(cluster: Cluster, factor: float) -> Cluster:
    faster = cluster.with_nodes(lambda node: replace(node, network=_scaled(node.network, factor)))
    # measured curves replace the model of links: those of groups inside a node become faster with its links
    curves = (
        curve.at_speed(factor) if curve.ranks <= cluster.first.devices else curve for curve in cluster.collectives
    )
    return replace(faster, collectives=tuple(curves))


def _between(cluster: Cluster, factor: float) -> Cluster:
    faster = cluster.with_nodes(lambda node: replace(node, nic=_scaled(node.nic, factor)))
    fabric = cluster.fabric if isinstance(cluster.fabric, Crossbar) else _scaled(cluster.fabric, factor)
    every = isinstance(cluster.fabric, Torus | Graph)
    curves = (
        curve.at_speed(factor) if every or curve.ranks > cluster.first.devices else curve
        for curve in cluster.collectives
    )
    return replace(faster, fabric=fabric, collectives=tuple(curves))


def _to_hosts(cluster: Cluster, factor: float) -> Cluster:
    def faster(host: Host) -> Host:
        bandwidth = host.memory_bandwidth * factor
        return replace(host, memory_bandwidth=bandwidth, pcie=_scaled(host.pcie, factor) if host.pcie else None)

    return cluster.with_nodes(lambda node: replace(node, host=faster(node.host)))


def _scaled(value: Any, factor: float) -> Any:
    """Return a value in which all links, at any depth, have ``factor`` times the bandwidth."""
    if isinstance(value, Link):
        return replace(value, bandwidth=value.bandwidth * factor)
    if isinstance(value, tuple):
        return tuple(_scaled(each, factor) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: _scaled(getattr(value, each.name), factor) for each in fields(value)})
    return value


def _links(value: Any) -> Iterator[Link]:
    """Yield the links in a value, at any depth."""
    if isinstance(value, Link):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from _links(each)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _links(getattr(value, field.name))
