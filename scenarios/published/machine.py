"""The machine of a row: nodes of a catalogue machine, as many as the row's devices need, with the row's own links.

The accelerator's published name selects a catalogue machine, or scales a related one by its data sheet. The words of a
row for its links tell what NICs a node has, and whether its devices are connected by PCIe.
"""

import re
from dataclasses import replace
from functools import lru_cache

from meshwise.scenarios.published.devices import Device, find_device
from meshwise.scenarios.published.fabrics import bridged_generation, wire_nics
from meshwise.scenarios.published.frameworks import launch_time
from meshwise.scenarios.published.row import GB, Row, Skip
from meshwise.scenarios.published.vocabulary.reading import find_words
from meshwise.scenarios.published.words import FOUR_BITS
from meshwise.scenarios.schema.cluster import MAX_DEVICES
from meshwise.simulator.catalog import cluster
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster, Node
from meshwise.simulator.machine.topology import Link, Switch, Torus
from meshwise.strategies.plan.mesh import divisors

_GENERATIONS = {
    "xdr": 800.0,
    "ndr": 400.0,
    "ndr200": 200.0,
    "hdr100": 100.0,
    "hdr": 200.0,
    "edr": 100.0,
    "fdr": 56.0,
    "qdr": 40.0,
}
"""Gb/s of an InfiniBand port with four lanes, by generation."""

_COUNT_BY_RATE = re.compile(
    r"(\d+)\s*(?:nics?|hcas?|ports?|rails?)?\s*(?:x|\*|of)\s*(\d+(?:\.\d+)?)\s*-?\s*(tb|gb|g)(?:it)?(?:/s|ps|be|e)?\b"
)
_RATE_BY_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*-?\s*(tb|gb|g)(?:it)?(?:/s|ps|be|e)?\s*(?:x|\*)\s*(\d+)\b")
"""A rate followed by a count: ``400 Gb/s x 8``."""
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*-?\s*([TtGg])(b|B|[Bb]its?)?(?:/s|ps|E|e)?\b")
_BIT = GB / 8
_GIGAS = {"t": 1000.0, "g": 1.0}
_MAX_NIC_RATE = 100_000.0
"""Gb/s of a node above which a stated rate cannot be that of its NICs."""


def nic_rate(row: Row, devices: int) -> float | None:
    """Return the total NIC bandwidth of a node with ``devices`` devices, in bytes/s; None where it is not stated."""
    stated_rate = row.optional_number("nic_gbps_per_device")
    if stated_rate is not None:
        return min(stated_rate, _MAX_NIC_RATE) * _BIT * devices
    words = row.text("inter_node_link")
    count_match = _COUNT_BY_RATE.search(words)
    if count_match:
        return _to_byte_rate(float(count_match[1]) * float(count_match[2]) * _GIGAS[count_match[3][0]])
    times_match = _RATE_BY_COUNT.search(words)
    if times_match:
        return _to_byte_rate(float(times_match[1]) * float(times_match[3]) * _GIGAS[times_match[2][0]])
    rate_match = _RATE.search(str(row.fields.get("inter_node_link")))
    if rate_match is None:
        rate = next((_GENERATIONS[word] for word in find_words("inter_node_link", words) if word in _GENERATIONS), None)
        return None if rate is None else _rate_by_generation(row, rate, devices)
    bits = 8.0 if rate_match[3] == "B" else 1.0
    return _interpret_rate(row, words, float(rate_match[1]) * bits * _GIGAS[rate_match[2].lower()], devices)


def _to_byte_rate(rate: float) -> float | None:
    return rate * _BIT if 0 < rate <= _MAX_NIC_RATE else None


def _interpret_rate(row: Row, words: str, rate: float, devices: int) -> float | None:
    """Return a node's bytes/s from one rate in Gb/s, which the words give per node, per device or per NIC."""
    known_words = find_words("inter_node_link", words)
    if "per_device" in known_words:
        return _to_byte_rate(rate * devices)
    if "per_node" in known_words or rate > 800:
        return _to_byte_rate(rate)
    if "rdma" in known_words or not _GENERATIONS.keys().isdisjoint(known_words):
        return _rate_by_generation(row, rate, devices)
    row.assume(f"one NIC of {rate:g} Gb/s a node, from {words[:60]!r}")
    return _to_byte_rate(rate)


def _rate_by_generation(row: Row, rate: float, devices: int) -> float | None:
    """Return a node's bytes/s over InfiniBand or RoCE: one NIC per device from 200 Gb/s on, one per node below."""
    if rate >= 200:
        row.assume(f"one NIC of {rate:g} Gb/s a device (number not stated)")
        return _to_byte_rate(rate * devices)
    row.assume(f"one NIC of {rate:g} Gb/s a node (number not stated)")
    return _to_byte_rate(rate)


def pcie_generation(row: Row) -> int | None:
    """Return the PCIe generation that connects the devices of a node; None for another network."""
    words = row.text("intra_node_link")
    known_words = find_words("intra_node_link", words)
    if "pcie" not in known_words or not {"nvlink", "nvswitch", "xgmi", "hccs", "ici"}.isdisjoint(known_words):
        return None
    match = re.search(r"(?:gen|pcie|pci-e)\s*-?([2-6])", words)
    if match is None:
        row.assume("PCIe 4.0 inside a node (generation not stated)")
    return int(match[1]) if match else 4


PCIE_RATE = {2: 6 * GB, 3: 12 * GB, 4: 24 * GB, 5: 48 * GB, 6: 96 * GB}
"""Bytes/s of 16 PCIe lanes by generation, as NCCL assumes (src/graph/topo.h, PCI_BW 12.0 for generation 3)."""


def build_machine(row: Row, devices: int) -> Cluster:
    """Return the cluster of a row, of which the run uses ``devices`` devices."""
    if devices > MAX_DEVICES:
        raise Skip(f"n_devices is at most {MAX_DEVICES}, met {devices}")
    device = find_device(row)
    preset_cluster = _load_preset(device.preset, 1, None)
    if isinstance(preset_cluster.fabric, Torus) or device.preset.startswith("tpu"):
        base_cluster = _build_torus(row, device, devices)
    else:
        base_cluster = _build_nodes(row, device, devices, preset_cluster.first_node.devices)
    ((node, count),) = base_cluster.nodes
    row.note_words("intra_node_link", "inter_node_link")
    memory = row.optional_number("accel_mem_gb")
    node = replace(node, accelerator=_build_accelerator(row, node.accelerator, device, memory))
    if not device.preset.startswith("tpu"):
        node = _wire_node(row, device, node, count)
    node = replace(node, host=replace(node.host, launch=launch_time(row)))
    row.assume(f"hosts, links and fabric of {device.preset} where the row states none")
    return replace(base_cluster, nodes=((node, count),))


@lru_cache(maxsize=256)
def _load_preset(preset: str, nodes: int, devices: int | None) -> Cluster:
    return cluster(preset, nodes, devices)


def _build_nodes(row: Row, device: Device, devices: int, node_size: int) -> Cluster:
    stated_size = row.optional_count("devices_per_node", 4096)
    if stated_size is None and devices > node_size:
        row.assume(f"devices_per_node {node_size} (not stated)")
    node_devices = stated_size or node_size
    # publishers count the trays of an NVL72 rack as nodes, though NVLink connects the whole rack
    if node_size >= 36 and node_devices < node_size and not re.search(r"nvl ?(4|8|16)\b", row.text("intra_node_link")):
        row.assume(f"devices of a rack of {node_size} reach each other by NVLink")
        node_devices = node_size
    max_devices = min(node_devices, devices)
    used_devices = next(count for count in reversed(divisors(devices)) if count <= max_devices)
    if used_devices != max_devices and devices > used_devices:
        nodes = devices // used_devices
        row.assume(f"{nodes} nodes with {used_devices} devices in use each, for {max_devices} do not divide {devices}")
    if used_devices > node_size and not isinstance(_load_preset(device.preset, 1, None).first_node.network, Switch):
        row.assume(f"devices_per_node {node_size}: {device.preset} has no more")
        used_devices = next(count for count in reversed(divisors(devices)) if count <= node_size)
    return _load_preset(device.preset, devices // used_devices, used_devices)


def _build_torus(row: Row, device: Device, devices: int) -> Cluster:
    """Return one slice of a torus, or several slices that the hosts' network connects."""
    slices = _count_slices(row, devices)
    if slices > 1 and device.preset != "tpu-v6e":
        return _load_preset(f"{device.preset}-slices", slices, devices // slices)
    slice_devices = _load_preset(device.preset, 1, None).first_node.devices
    used_devices = next(count for count in reversed(divisors(devices)) if count <= slice_devices)
    return _load_preset(device.preset, devices // used_devices, used_devices)


def _count_slices(row: Row, devices: int) -> int:
    match = re.search(r"\b(\d+) ?x? ?slices?\b|\b(\d+) slice", row.text("plan_note", "intra_node_link"))
    count = int(match[1] or match[2]) if match else 1
    if match and match[0] in row.text("plan_note"):
        row.assume(f"from plan_note: {match[0]!r} taken as {count} slices")
    shards = row.optional_count("fsdp_shards") or devices
    if not match and "dcn" in row.text("inter_node_link") and 1 < shards < devices and devices % shards == 0:
        count = devices // shards
        row.assume(f"{count} slices of {shards}, the devices that share parameters (slices not stated)")
    return count if 0 < count < devices and devices % count == 0 else 1


@lru_cache(maxsize=256)
def _scale_accelerator(base: Accelerator, device: Device) -> Accelerator:
    """Return an accelerator scaled to a related device's data sheet: all rates in proportion to its 16-bit peak."""
    peaks = dict(base.peak_flops)
    ratio = device.peak * 1e12 / peaks.get("bf16", peaks.get("fp16", device.peak * 1e12)) if device.peak else 1.0
    return replace(
        base,
        name=device.name or base.name,
        peak_flops=tuple((dtype, rate * ratio * device.clock) for dtype, rate in base.peak_flops),
        memory=device.memory * GB if device.memory else base.memory,
        memory_bandwidth=device.bandwidth * 1e12 if device.bandwidth else base.memory_bandwidth,
    )


def _build_accelerator(row: Row, base: Accelerator, device: Device, memory: float | None) -> Accelerator:
    accelerator_kind = _scale_accelerator(base, device) if device.name or device.clock != 1 else base
    if memory is not None and not 0.85 <= memory * GB / accelerator_kind.memory <= 1.15 and memory <= 10_000:
        row.assume(f"{memory:g} GB of device memory, which {accelerator_kind.name} has not by the catalogue")
        accelerator_kind = replace(accelerator_kind, memory=memory * GB)
    return _apply_four_bits(row, accelerator_kind)


_FOUR_BIT_RATIOS = {"b300": 3.0, "gb300": 3.0, "b200": 2.0, "gb200": 2.0, "mi355x": 2.0, "mi350x": 2.0}
"""Ratio of the dense 4-bit peak to the dense 8-bit peak (data sheets; a B300 has 15 PFLOP/s of NVFP4)."""


def _apply_four_bits(row: Row, base: Accelerator) -> Accelerator:
    """Return an accelerator with its 4-bit peak in the place of its 8-bit peak, for a row that trains in 4 bits."""
    if row.reading("precision").word != FOUR_BITS:
        return base
    ratio = _FOUR_BIT_RATIOS.get(row.reading("accelerator").word, 1.0)
    rates = tuple((dtype, rate * ratio if dtype == "fp8" else rate) for dtype, rate in base.peak_flops)
    return replace(base, peak_flops=rates)


def _wire_node(row: Row, device: Device, node: Node, count: int) -> Node:
    """Return a node with the row's stated links instead of the catalogue's."""
    slot_generation = 5 if device.preset in ("dgx-h100", "dgx-h200", "dgx-b200") else 4
    generation = pcie_generation(row) or device.pcie or bridged_generation(row, node.devices, slot_generation)
    if generation and node.devices > 1:
        pcie = node.host.pcie
        latency = pcie.link.latency if pcie is not None else node.nic.latency
        node = replace(node, network=Switch(Link(latency, PCIE_RATE[generation])))
        row.assume(f"devices of a node reach each other by PCIe {generation}.0 x16 through an ideal switch")
    elif device.link and isinstance(node.network, Switch):
        node = replace(node, network=replace(node.network, link=replace(node.network.link, bandwidth=device.link * GB)))
    if count == 1:
        return node
    return wire_nics(row, node, nic_rate(row, node.devices))
