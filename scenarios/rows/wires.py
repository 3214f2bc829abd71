"""Words for links: what NICs a node has, and whether its devices reach each other by PCIe."""

import re

from scenarios.rows.row import Row

_GENERATIONS = (
    (r"\bxdr\b", 800.0),
    (r"\bndr(?!\d)", 400.0),
    (r"\bndr200\b", 200.0),
    (r"\bhdr100\b", 100.0),
    (r"\bhdr\b", 200.0),
    (r"\bedr\b", 100.0),
    (r"\bfdr\b", 56.0),
    (r"\bqdr\b", 40.0),
)
"""Gb/s of four lanes of InfiniBand by generation."""

_COUNTED = re.compile(
    r"(\d+)\s*(?:nics?|hcas?|ports?|rails?)?\s*(?:x|\*|of)\s*(\d+(?:\.\d+)?)\s*-?\s*(tb|gb|g)(?:it)?(?:/s|ps|be|e)?\b"
)
_TIMES = re.compile(r"(\d+(?:\.\d+)?)\s*-?\s*(tb|gb|g)(?:it)?(?:/s|ps|be|e)?\s*(?:x|\*)\s*(\d+)\b")
"""The rate first, and then how often: ``400 Gb/s x 8``."""
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*-?\s*([TtGg])(b|B|[Bb]its?)?(?:/s|ps|E|e)?\b")
_BIT = 1e9 / 8
_MOST = 100_000.0
"""Gb/s of one node beyond which a rate is no NIC's."""


def nic_rate(row: Row, devices: int) -> float | None:
    """Return the bytes a second that all NICs of a node with ``devices`` send together; None where not stated."""
    stated = row.optional_number("nic_gbps_per_device")
    if stated is not None:
        return min(stated, _MOST) * _BIT * devices
    words = row.text("inter_node_link")
    counted = _COUNTED.search(words)
    if counted:
        scale = 1000.0 if counted[3] == "tb" else 1.0
        return _checked(float(counted[1]) * float(counted[2]) * scale)
    times = _TIMES.search(words)
    if times:
        return _checked(float(times[1]) * float(times[3]) * (1000.0 if times[2] == "tb" else 1.0))
    single = _RATE.search(str(row.fields.get("inter_node_link")))
    if single is None:
        rate = next((rate for pattern, rate in _GENERATIONS if re.search(pattern, words)), None)
        return None if rate is None else _by_generation(row, rate, devices)
    bits = 8.0 if single[3] == "B" else 1.0
    return _single(row, words, float(single[1]) * bits * (1000.0 if single[2] in "tT" else 1.0), devices)


def _checked(rate: float) -> float | None:
    return rate * _BIT if 0 < rate <= _MOST else None


def _single(row: Row, words: str, rate: float, devices: int) -> float | None:
    """Return what one rate in words means: a node's, a device's, or that of one NIC."""
    if re.search(r"per (gpu|device|accelerator|chip|npu)|/gpu|a gpu|each gpu|rail", words):
        return _checked(rate * devices)
    if re.search(r"per node|node-node|node to node|/node|a node|aggregate|total|efa", words) or rate > 800:
        return _checked(rate)
    if re.search(r"infiniband|\bib\b|hdr|ndr|edr|xdr|roce|rdma|spectrum|connectx|\bcx-?\d|slingshot", words):
        return _by_generation(row, rate, devices)
    row.assume(f"one NIC of {rate:g} Gb/s a node, from {words[:60]!r}")
    return _checked(rate)


def _by_generation(row: Row, rate: float, devices: int) -> float | None:
    """Return the rate of a node of InfiniBand or RoCE: one NIC a device from 200 Gb/s on, one a node before."""
    if rate >= 200:
        row.assume(f"one NIC of {rate:g} Gb/s a device (number not stated)")
        return _checked(rate * devices)
    row.assume(f"one NIC of {rate:g} Gb/s a node (number not stated)")
    return _checked(rate)


def pcie_generation(row: Row) -> int | None:
    """Return the generation of PCIe that joins the devices of a node; None where something else does."""
    words = row.text("intra_node_link")
    if "pci" not in words or re.search(r"nvlink|nvswitch|xgmi|infinity|hccs|ici\b", re.sub(r"no nvlink", "", words)):
        return None
    found = re.search(r"(?:gen|pcie|pci-e)\s*-?([2-6])", words)
    if found is None:
        row.assume("PCIe 4.0 inside a node (generation not stated)")
    return int(found[1]) if found else 4
