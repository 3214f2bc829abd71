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
    scale_cluster: Callable[[float], Cluster]


def machine_parts(cluster: Cluster, precision: str) -> tuple[MachinePart, ...]:
    """Return the parts of a cluster: FLOP/s in a precision, memory bandwidth, and every kind of link that it has."""
    return tuple(_list_parts(cluster, precision))


def with_memory(cluster: Cluster, change: Callable[[float], float]) -> Cluster:
    """Return a cluster whose devices have other memory; ``change`` maps old to new bytes."""
    return cluster.with_accelerators(lambda device: replace(device, memory=change(device.memory)))


def with_host_memory(cluster: Cluster, change: Callable[[float], float]) -> Cluster:
    """Return a cluster whose hosts have other memory; ``change`` maps old to new bytes."""
    return cluster.with_nodes(lambda node: replace(node, host=replace(node.host, memory=change(node.host.memory))))


def _list_parts(cluster: Cluster, precision: str) -> Iterator[MachinePart]:
    device = cluster.accelerator
    yield MachinePart(
        "FLOP/s",
        format_compute_rate(device.peak(precision)),
        lambda factor: cluster.with_accelerators(
            lambda accelerator: replace(
                accelerator, peak_flops=tuple((dtype, rate * factor) for dtype, rate in accelerator.peak_flops)
            )
        ),
    )
    yield MachinePart(
        "memory bandwidth",
        format_bandwidth(device.memory_bandwidth),
        lambda factor: cluster.with_accelerators(
            lambda accelerator: replace(accelerator, memory_bandwidth=accelerator.memory_bandwidth * factor)
        ),
    )
    is_direct = isinstance(cluster.fabric, Torus | Graph)
    if not is_direct and max(node.devices for node, _ in cluster.nodes) > 1:
        node_link = cluster.first_node.network.link
        yield MachinePart(
            "links inside a node", format_bandwidth(node_link.bandwidth), lambda f: _scale_node_links(cluster, f)
        )
    if is_direct or cluster.num_nodes > 1:
        link = next(_list_links(cluster.fabric)) if is_direct else cluster.first_node.nic
        name = "links between devices" if is_direct else "links between nodes"
        yield MachinePart(name, format_bandwidth(link.bandwidth), lambda factor: _scale_fabric(cluster, factor))
    if any(node.host.pcie for node, _ in cluster.nodes):
        pcie = next(node.host.pcie for node, _ in cluster.nodes if node.host.pcie)
        yield MachinePart(
            "links to hosts", format_bandwidth(pcie.link.bandwidth), lambda f: _scale_host_links(cluster, f)
        )


def _scale_node_links(cluster: Cluster, factor: float) -> Cluster:
    faster_cluster = cluster.with_nodes(lambda node: replace(node, network=_scale_links(node.network, factor)))
    # measured curves replace the model of links: those of groups inside a node become faster with its links
    curves = (
        curve.at_speed(factor) if curve.ranks <= cluster.first_node.devices else curve for curve in cluster.collectives
    )
    return replace(faster_cluster, collectives=tuple(curves))


def _scale_fabric(cluster: Cluster, factor: float) -> Cluster:
    faster_cluster = cluster.with_nodes(lambda node: replace(node, nic=_scale_links(node.nic, factor)))
    fabric = cluster.fabric if isinstance(cluster.fabric, Crossbar) else _scale_links(cluster.fabric, factor)
    scales_all = isinstance(cluster.fabric, Torus | Graph)
    curves = (
        curve.at_speed(factor) if scales_all or curve.ranks > cluster.first_node.devices else curve
        for curve in cluster.collectives
    )
    return replace(faster_cluster, fabric=fabric, collectives=tuple(curves))


def _scale_host_links(cluster: Cluster, factor: float) -> Cluster:
    def scale_host(host: Host) -> Host:
        bandwidth = host.memory_bandwidth * factor
        return replace(host, memory_bandwidth=bandwidth, pcie=_scale_links(host.pcie, factor) if host.pcie else None)

    return cluster.with_nodes(lambda node: replace(node, host=scale_host(node.host)))


def _scale_links(value: Any, factor: float) -> Any:
    """Return a value in which all links, at any depth, have ``factor`` times the bandwidth."""
    if isinstance(value, Link):
        return replace(value, bandwidth=value.bandwidth * factor)
    if isinstance(value, tuple):
        return tuple(_scale_links(item, factor) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{item.name: _scale_links(getattr(value, item.name), factor) for item in fields(value)})
    return value


def _list_links(value: Any) -> Iterator[Link]:
    """Yield the links in a value, at any depth."""
    if isinstance(value, Link):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _list_links(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _list_links(getattr(value, field.name))
