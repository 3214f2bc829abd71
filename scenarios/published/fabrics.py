"""The fabric between the nodes of a row: its kind and measured record by its words, else defaults of the kind."""

import re
from dataclasses import replace

from meshwise.scenarios.published.row import GB, Row
from meshwise.simulator.catalog.fabrics import UNKNOWN_FABRIC, fabric_default
from meshwise.simulator.catalog.records import find_fitted_link
from meshwise.simulator.machine.cluster import Node
from meshwise.simulator.machine.topology import Link

_MEASURED = (
    (r"\bp5\.48|\bp5e?\b|efa v2|32 ?x ?100 ?g", "efa-3200g"),
    (r"\bp4de?\b|efa v1", "efa-400g"),
    (r"tcpx(?!o)", "tcpx-200g"),
    (r"a3-?ultra|a3ultra", "roce-400g"),
)
"""Words for machines and networks whose collectives were fitted, and the link's name in the catalogue."""
_KINDS = (
    (r"\befa\b|elastic fabric", "efa"),
    (r"tcpx|fastrak|gpudirect-tcp", "tcpx"),
    (r"slingshot|\bcxi\b|cassini", "slingshot"),
    (r"roce|rocev2|spectrum|rdma over", "roce"),
    (r"infiniband|\bib\b|\b[hnexfq]dr\d*\b|quantum|sharp\b", "infiniband"),
    (r"sockets?\b|\btcp\b|ethernet|gvnic", "sockets"),
)


def find_fabric_kind(row: Row) -> str:
    """Return the kind of fabric that the words of a row tell; ``unknown`` where they tell none.

    >>> find_fabric_kind(Row({"inter_node_link": "8 x 400 Gb/s RoCE"})), find_fabric_kind(Row({}))
    ('roce', 'unknown')
    """
    words = row.text("inter_node_link")
    return next((kind for pattern, kind in _KINDS if re.search(pattern, words)), UNKNOWN_FABRIC)


def bridged_generation(row: Row, devices: int, generation: int) -> int:
    """Return the PCIe generation between pairs of devices that NVLink bridges join; 0 for another network.

    Rings of more than one pair run at the rate of PCIe: 23.7 GB/s on four A100 and 48.8 GB/s on four H100 with bridged
    pairs (sources vidur_a100_pairwise_nvlink and vidur_h100_pairwise_nvlink).
    """
    words = row.text("intra_node_link")
    if devices <= 2 or not re.search(r"nvlink", words) or not re.search(r"\bpairs?\b|pairwise|bridge", words):
        return 0
    row.assume(f"NVLink joins pairs; a ring of {devices} devices runs at the rate of PCIe {generation}.0 between them")
    return generation


def wire_nics(row: Row, node: Node, rate: float | None) -> Node:
    """Return a node with the NICs that a row tells; ``rate`` is the line rate of all of them in bytes/s, or None.

    A network whose collectives were measured has its record. Else NICs reach what is usual for their kind of fabric;
    those of accelerators whose library is not NCCL keep latency and launch of the catalogue.
    """
    words = row.text("accelerator", "inter_node_link")
    name = next((link for pattern, link in _MEASURED if re.search(pattern, words)), None)
    if name is not None:
        link, line_rate = find_fitted_link(name)
        nic = _scale_nic(link, (rate or node.nics * line_rate) / node.nics * link.bandwidth / line_rate)
        row.assume(f"NICs as measured for {name}: {link.bandwidth / line_rate:.2f} of line rate")
        return replace(node, nic=nic)
    kind = find_fabric_kind(row)
    unknown = fabric_default(UNKNOWN_FABRIC)
    is_default = node.nic.latency == unknown.latency
    if not is_default and rate is None:
        return node
    default = fabric_default(kind)
    line_rate = rate / node.nics if rate is not None else node.nic.bandwidth / unknown.share
    bandwidth = default.share * line_rate
    nic = default.nic(line_rate) if is_default else _scale_nic(node.nic, bandwidth)
    # within 10 % a stated rate is the catalogue's, rounded
    if nic.latency == node.nic.latency and 0.9 <= bandwidth / node.nic.bandwidth <= 1.1:
        return node
    total = line_rate * node.nics * 8 / GB
    row.assume(
        f"NICs of {total:.4g} Gb/s a node in all{', as the row states' if rate is not None else ''}, of which large "
        f"messages reach {default.share:.2f} ({kind} fabric; {default.low:.2f} to {default.high:.2f})"
    )
    return replace(node, nic=nic)


def _scale_nic(nic: Link, bandwidth: float) -> Link:
    return replace(nic, bandwidth=bandwidth)
