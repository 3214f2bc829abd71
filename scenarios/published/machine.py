"""The machine of a row: nodes of a catalogue machine, as many as the row's devices need, with the row's own links.

The accelerator's published name selects a catalogue machine, or scales a related one by its data sheet. The words of a
row for its links tell what NICs a node has, and whether its devices are connected by PCIe.
"""

import re
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from meshwise.scenarios.files.errors import format_value
from meshwise.scenarios.published.fabrics import bridged_generation, wire_nics
from meshwise.scenarios.published.frameworks import apply_software, launch_time
from meshwise.scenarios.published.row import GB, Row, Skip
from meshwise.scenarios.published.words import FOUR_BITS
from meshwise.scenarios.schema.cluster import MAX_DEVICES
from meshwise.simulator.catalog import cluster
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster, Node
from meshwise.simulator.machine.topology import Link, Switch, Torus
from meshwise.strategies.plan.mesh import divisors


class Device(NamedTuple):
    """An accelerator, as a catalogue machine that has it or whose accelerator is scaled to it.

    Parameters
    ----------
    preset
        Name of the catalogue machine.
    name
        Name of the accelerator; empty for the machine's own accelerator.
    peak
        Dense 16-bit TFLOP/s; 0 for the machine's own.
    memory, bandwidth
        GB and TB/s of device memory; 0 for the machine's own.
    link
        GB/s in one direction into the node's switch; 0 for the machine's own network.
    pcie
        PCIe generation that connects the devices of a node; 0 for another network.
    """

    preset: str
    name: str = ""
    peak: float = 0.0
    memory: float = 0.0
    bandwidth: float = 0.0
    link: float = 0.0
    pcie: int = 0


_NVLINK_400 = 160.0
"""GB/s in one direction over the 8 NVLinks of export variants, 20 GB/s each as NCCL counts (src/graph/topo.h)."""

_DEVICES: tuple[tuple[str, Device], ...] = (
    ("gb300", Device("gb300-nvl72")),
    ("gb200", Device("gb200-nvl72")),
    ("b300", Device("dgx-b300")),
    ("b200", Device("dgx-b200")),
    # data sheets of NVIDIA; dense figures with accumulation in fp32
    ("b100", Device("dgx-b200", "B100", 1750, 180, 8.0)),
    ("gh200.*(14[14]|h200)", Device("dgx-h200", "GH200 141GB")),
    ("gh200", Device("dgx-h100", "GH200 96GB", 989, 96, 4.0)),
    ("h200nvl", Device("dgx-h200", "H200 NVL", 835, 141, 4.8, pcie=5)),
    ("h200", Device("dgx-h200")),
    ("h20(?!0)", Device("dgx-h100", "H20", 148, 96, 4.0)),
    ("h800", Device("dgx-h100", "H800", link=_NVLINK_400)),
    ("h100nvl", Device("dgx-h100", "H100 NVL", 835, 94, 3.9, pcie=5)),
    ("h100.*pci", Device("dgx-h100", "H100 PCIe", 756, 80, 2.0, pcie=5)),
    # torchtitan's benchmarks/llama3_h100_202412_torchtitan.md: 96 GB of HBM2e at 2.4 TB/s
    ("h100.*hbm2e", Device("dgx-h100", "H100 96GB HBM2e", 989, 96, 2.4)),
    ("h100", Device("dgx-h100")),
    ("a800", Device("dgx-a100-80gb", "A800", link=_NVLINK_400)),
    ("a100.*pci.*40|a100.*40.*pci", Device("dgx-a100-40gb", "A100 PCIe 40GB", pcie=4)),
    ("a100.*pci", Device("dgx-a100-80gb", "A100 PCIe", 312, 80, 1.94, pcie=4)),
    ("a100", Device("dgx-a100-80gb")),
    ("a10g", Device("dgx-a100-80gb", "A10G", 70, 24, 0.6, pcie=4)),
    ("a10(?!0)", Device("dgx-a100-80gb", "A10", 125, 24, 0.6, pcie=4)),
    ("a30", Device("dgx-a100-80gb", "A30", 165, 24, 0.933, pcie=4)),
    ("a40(?!0)", Device("dgx-a100-80gb", "A40", 149.7, 48, 0.696, pcie=4)),
    ("a6000", Device("dgx-a100-80gb", "RTX A6000", 154.8, 48, 0.768, pcie=4)),
    ("a5000", Device("dgx-a100-80gb", "RTX A5000", 111, 24, 0.768, pcie=4)),
    ("pro6000", Device("dgx-b200", "RTX PRO 6000", 503.8, 96, 1.79, pcie=5)),
    ("6000ada|rtx6000", Device("dgx-h100", "RTX 6000 Ada", 364, 48, 0.96, pcie=4)),
    ("l40s", Device("dgx-h100", "L40S", 362, 48, 0.864, pcie=4)),
    ("l40", Device("dgx-h100", "L40", 181, 48, 0.864, pcie=4)),
    ("l20", Device("dgx-h100", "L20", 119.5, 48, 0.864, pcie=4)),
    ("l4(?!0)", Device("dgx-h100", "L4", 121, 24, 0.3, pcie=4)),
    ("5090", Device("dgx-h100", "RTX 5090", 209.5, 32, 1.79, pcie=5)),
    ("4090", Device("dgx-h100", "RTX 4090", 165.2, 24, 1.008, pcie=4)),
    ("4080", Device("dgx-h100", "RTX 4080", 97.5, 16, 0.717, pcie=4)),
    ("3090", Device("dgx-a100-80gb", "RTX 3090", 71, 24, 0.936, pcie=4)),
    ("3080", Device("dgx-a100-80gb", "RTX 3080", 59.5, 10, 0.76, pcie=4)),
    ("v100.*pci", Device("dgx-1-v100-32gb", "V100 PCIe", 112, 0, 0.9, pcie=3)),
    ("v100", Device("dgx-1-v100-32gb")),
    ("titanv", Device("dgx-1-v100-16gb", "TITAN V", 110, 12, 0.653, pcie=3)),
    ("2080", Device("dgx-1-v100-16gb", "RTX 2080 Ti", 56.9, 11, 0.616, pcie=3)),
    ("titanrtx|quadrortx6000", Device("dgx-1-v100-32gb", "TITAN RTX", 130.5, 24, 0.672, pcie=3)),
    ("t4", Device("dgx-1-v100-16gb", "T4", 65, 16, 0.32, pcie=3)),
    ("p100", Device("dgx-1-v100-16gb", "P100", 21.2, 16, 0.732)),
    # data sheets of AMD
    ("mi355", Device("mi355x-8")),
    ("mi350", Device("mi355x-8", "MI350X", 2300, 288, 8.0)),
    ("mi325", Device("mi325x-8")),
    ("mi308", Device("mi300x-8", "MI308X", 188, 192, 5.3)),
    ("mi300a", Device("mi300x-8", "MI300A", 981, 128, 5.3)),
    ("mi300", Device("mi300x-8")),
    ("mi250x?", Device("frontier-mi250x")),
    ("mi210", Device("frontier-mi250x", "MI210", 181, 64, 1.6)),
    ("mi100", Device("frontier-mi250x", "MI100", 184.6, 32, 1.23)),
    # data sheets of Google, per chip (jax-ml/scaling-book, tpus.md)
    ("tpu.*(v?7|ironwood)", Device("tpu-v5p", "TPU v7", 2307, 192, 7.37)),
    ("v6e|trillium", Device("tpu-v6e")),
    ("v5p", Device("tpu-v5p")),
    ("v5e|v5lite|tpuv5", Device("tpu-v5e")),
    ("tpu.*v?4", Device("tpu-v4")),
    ("tpu.*v?3", Device("tpu-v4", "TPU v3", 123, 32, 0.9)),
    ("tpu.*v?2", Device("tpu-v4", "TPU v2", 46, 16, 0.7)),
    # data sheets of Huawei, Intel (Habana) and Amazon
    ("910c", Device("atlas-800t-a2", "Ascend 910C", 708, 128, 3.2)),
    ("910b|910(_|-)?93|a2", Device("atlas-800t-a2")),
    ("ascend|910|atlas", Device("atlas-800-910")),
    ("gaudi3", Device("gaudi2-8", "Gaudi3", 1677, 128, 3.7)),
    ("gaudi", Device("gaudi2-8")),
    ("trn2|trainium2", Device("aws-trn2")),
    ("trn1|trainium", Device("aws-trn2", "Trainium1", 190, 32, 0.82)),
)
_TABLE = tuple((re.compile(pattern), entry) for pattern, entry in _DEVICES)
"""Patterns for the accelerator's name without spaces and signs; the first match wins, so special cases come first."""

_BY_PEAK = (("dgx-1-v100-32gb", 125.0), ("dgx-a100-80gb", 312.0), ("dgx-h100", 989.0), ("dgx-b200", 2250.0))


def find_device(row: Row) -> Device:
    """Return the accelerator of a row; raise `Skip` where neither its name nor a peak rate is known."""
    words = re.sub(r"[^a-z0-9_]", "", row.text("accelerator"))
    if not words:
        raise Skip("accelerator is not stated")
    memory = row.optional_number("accel_mem_gb") or 0.0
    known_device = next((known for pattern, known in _TABLE if pattern.search(words)), None)
    if known_device is None:
        return _guess_device(row, memory)
    known_device = _find_variant(row, known_device, words, memory)
    if known_device.name:
        rates = f"{known_device.peak:g} TFLOP/s, {known_device.bandwidth:g} TB/s"
        figures = rates if known_device.peak else "its own links"
        row.assume(f"{known_device.name}: as the accelerator of {known_device.preset} with {figures} by data sheet")
    return known_device


def _guess_device(row: Row, memory: float) -> Device:
    peak = row.number("peak_tflops_used")
    if peak is None or not 1 <= peak <= 1e5:
        name = format_value(row.fields.get("accelerator"))
        raise Skip(f"accelerator {name} is not in the catalogue, and no peak is stated")
    preset, preset_peak = min(_BY_PEAK, key=lambda candidate: abs(candidate[1] - peak))
    name, speed = row.text("accelerator")[:40], peak / preset_peak
    row.assume(f"accelerator {name}: as that of {preset} at {speed:.2f} of its speed, from peak_tflops_used")
    return Device(preset, name, peak, memory)


def _find_variant(row: Row, known_device: Device, words: str, memory: float) -> Device:
    """Return the variant of an accelerator that matches the memory and the precision of a row."""
    if not memory and known_device.preset in ("dgx-a100-80gb", "dgx-1-v100-32gb") and not known_device.memory:
        suffix = re.search(r"(\d\d)gi?b?$", words)
        memory = float(suffix[1]) if suffix else 0.0
        if not memory:
            row.assume("accel_mem_gb of the larger variant (not stated)")
    if known_device.preset == "dgx-a100-80gb" and not known_device.peak and 0 < memory <= 45:
        return known_device._replace(preset="dgx-a100-40gb")
    if known_device.preset == "dgx-1-v100-32gb" and 0 < memory <= 17:
        return known_device._replace(preset="dgx-1-v100-16gb")
    is_v100 = known_device.preset == "dgx-1-v100-32gb"
    if is_v100 and (row.optional_count("devices_per_node") or 0) > 8 and not known_device.name:
        return known_device._replace(preset="dgx-2-v100-32gb")
    if known_device.preset == "frontier-mi250x" and memory > 100:
        return Device(known_device.preset, "MI250X, both dies as one device", 383, 128, 3.28)
    if known_device.preset == "atlas-800-910" and (memory > 40 or re.search("bf16|bfloat16", row.text("precision"))):
        row.assume("Ascend 910B, for the first 910 has no bf16 and 32 GB")
        return known_device._replace(preset="atlas-800t-a2")
    return known_device


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
        rate = next((rate for pattern, rate in _GENERATIONS if re.search(pattern, words)), None)
        return None if rate is None else _rate_by_generation(row, rate, devices)
    bits = 8.0 if rate_match[3] == "B" else 1.0
    return _interpret_rate(row, words, float(rate_match[1]) * bits * _GIGAS[rate_match[2].lower()], devices)


def _to_byte_rate(rate: float) -> float | None:
    return rate * _BIT if 0 < rate <= _MAX_NIC_RATE else None


def _interpret_rate(row: Row, words: str, rate: float, devices: int) -> float | None:
    """Return a node's bytes/s from one rate in Gb/s, which the words give per node, per device or per NIC."""
    if re.search(r"per (gpu|device|accelerator|chip|npu)|/gpu|a gpu|each gpu|rail", words):
        return _to_byte_rate(rate * devices)
    if re.search(r"per node|node-node|node to node|/node|a node|aggregate|total|efa", words) or rate > 800:
        return _to_byte_rate(rate)
    if re.search(r"infiniband|\bib\b|hdr|ndr|edr|xdr|roce|rdma|spectrum|connectx|\bcx-?\d|slingshot", words):
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
    if "pci" not in words or re.search(r"nvlink|nvswitch|xgmi|infinity|hccs|ici\b", re.sub(r"no nvlink", "", words)):
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
    memory = row.optional_number("accel_mem_gb")
    accelerator = _build_accelerator(row, node.accelerator, device, memory)
    node = replace(node, accelerator=apply_software(row, accelerator))
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
        name=device.name,
        peak_flops=tuple((dtype, rate * ratio) for dtype, rate in base.peak_flops),
        memory=device.memory * GB if device.memory else base.memory,
        memory_bandwidth=device.bandwidth * 1e12 if device.bandwidth else base.memory_bandwidth,
    )


def _build_accelerator(row: Row, base: Accelerator, device: Device, memory: float | None) -> Accelerator:
    accelerator_kind = _scale_accelerator(base, device) if device.name else base
    if memory is not None and not 0.85 <= memory * GB / accelerator_kind.memory <= 1.15 and memory <= 10_000:
        row.assume(f"{memory:g} GB of device memory, which {accelerator_kind.name} has not by the catalogue")
        accelerator_kind = replace(accelerator_kind, memory=memory * GB)
    return _apply_four_bits(row, accelerator_kind)


_FOUR_BIT_RATES = (("b300|gb300", 3.0), ("b200|gb200", 2.0), ("mi355|mi350", 2.0))
"""Ratio of the dense 4-bit peak to the dense 8-bit peak (data sheets; a B300 has 15 PFLOP/s of NVFP4)."""


def _apply_four_bits(row: Row, base: Accelerator) -> Accelerator:
    """Return an accelerator with its 4-bit peak in the place of its 8-bit peak, for a row that trains in 4 bits."""
    if not re.search(FOUR_BITS, row.text("precision")):
        return base
    words = row.text("accelerator")
    ratio = next((ratio for pattern, ratio in _FOUR_BIT_RATES if re.search(pattern, words)), 1.0)
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
