"""Machines with factors on the times of their parts."""

from dataclasses import fields, replace
from typing import Any

from meshwise.scenarios.calibration.calibrate import Slowdown, slow_curve, with_slowdown
from meshwise.simulator.collective import CollectiveCurve
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster, Node
from meshwise.simulator.machine.factors import Factors
from meshwise.simulator.machine.topology import Graph, Link


def apply_factors(cluster: Cluster, factors: Factors) -> Cluster:
    """Return a cluster on which every part takes its factor times as long.

    Memory sizes, host memory and other jobs on the network stay as they are, and so do peak rates, of which utilisation
    is a part: products reach less of them. With ``other`` alone a step takes exactly that much longer.

    >>> from meshwise.simulator.catalog import cluster
    >>> machine = cluster("dgx-h100", 2)
    >>> slow = apply_factors(machine, Factors(compute=2.0, other=1.5))
    >>> machine.accelerator.matmul.fraction / slow.accelerator.matmul.fraction
    3.0
    >>> machine.first_node.nic.bandwidth / slow.first_node.nic.bandwidth
    1.5
    """
    other, host = factors.other, factors.host * factors.other
    intra = factors.intra_rate * other, factors.intra_latency * other
    inter = factors.inter_rate * other, factors.inter_latency * other
    largest_node = max(node.devices for node, _ in cluster.nodes)

    def slow_node(node: Node) -> Node:
        pcie = node.host.pcie
        return replace(
            node,
            host=replace(
                node.host,
                launch=node.host.launch * host,
                pcie=None if pcie is None else replace(pcie, link=_slow_link(pcie.link, other, other)),
            ),
            network=_slow_links(node.network, *intra),
            nic=_slow_link(node.nic, *inter),
        )

    def slow_measured(curve: CollectiveCurve) -> CollectiveCurve:
        rate, latency = intra if curve.ranks <= largest_node else inter
        return slow_curve(curve, latency, rate)

    slowdown = Slowdown(1.0, factors.memory * other, host, host, host, host)
    slow_devices = with_slowdown(replace(cluster, collectives=()), slowdown).with_accelerators(
        lambda device: _slow_products(device, factors.compute * other, host)
    )
    library = cluster.library
    return replace(
        slow_devices.with_nodes(slow_node),
        fabric=_slow_links(cluster.fabric, *inter),
        library=replace(library, reduction_launch=library.reduction_launch * intra[1]),
        collectives=tuple(map(slow_measured, cluster.collectives)),
    )


def _slow_products(device: Accelerator, compute: float, host: float) -> Accelerator:
    """Return a device whose products take ``compute`` times as long, and whose grouped ones are launched so by a host.

    Where a faster device reached more than its peak, the peak is more.
    """
    matmul = replace(device.matmul, product_launch=device.matmul.product_launch * host)
    fastest = max(1.0, device.attention.forward, device.attention.backward)  # attention relative to the best product
    excess = max(1.0, *(share / compute for share in (fastest * matmul.fraction, *dict(matmul.fractions).values())))
    shares = tuple((dtype, share / compute / excess) for dtype, share in matmul.fractions)
    return replace(
        device,
        peak_flops=tuple((dtype, rate * excess) for dtype, rate in device.peak_flops),
        matmul=replace(matmul, fraction=matmul.fraction / compute / excess, fractions=shares),
    )


def _slow_link(link: Link, rate: float, latency: float) -> Link:
    return Link(link.latency * latency, link.bandwidth / rate, link.launch * latency)


def _slow_links(part: Any, rate: float, latency: float) -> Any:
    """Return a network or fabric with factors on the bytes, and on the latency and hops, of all of its links."""
    if isinstance(part, Graph):
        return Graph(tuple((start, end, _slow_link(link, rate, latency)) for start, end, link in part.edges))
    changes: dict[str, Any] = {
        field.name: _slow_link(value, rate, latency)
        for field in fields(part)
        if isinstance(value := getattr(part, field.name), Link)
    }
    if hasattr(part, "hop"):
        changes["hop"] = part.hop * latency
    return replace(part, **changes)
