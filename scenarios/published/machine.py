"""The machine of a row: nodes of a catalogue machine, as many as the row's devices need, with the row's own links.

The accelerator's published name selects a catalogue machine, or scales a related one by its data sheet. The words of a
row for its links tell what NICs a node has, and whether its devices are connected by PCIe.
"""

import re
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from meshwise.scenarios.files.errors import shown
from meshwise.scenarios.published.frameworks import host_launch, on_stack
from meshwise.scenarios.published.row import Row, Skip
from meshwise.scenarios.published.training import FOUR_BITS
from meshwise.scenarios.schema.cluster import MAX_DEVICES
from meshwise.simulator.catalog import cluster
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster, Node
from meshwise.simulator.machine.topology import Link, Switch, Torus
from meshwise.strategies.plan.mesh import divisors

GBYTE = 1e9


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


def device(row: Row) -> Device:
    """Return the accelerator of a row; raise `Skip` where neither its name nor a peak rate is known."""
    words = re.sub(r"[^a-z0-9_]", "", row.text("accelerator"))
    if not words:
        raise Skip("accelerator is not stated")
    memory = row.optional_number("accel_mem_gb") or 0.0
    found = next((known for pattern, known in _TABLE if pattern.search(words)), None)
    if found is None:
        return _unknown(row, memory)
    found = _variant(row, found, words, memory)
    if found.name:
        figures = f"{found.peak:g} TFLOP/s, {found.bandwidth:g} TB/s" if found.peak else "its own links"
        row.assume(f"{found.name}: as the accelerator of {found.preset} with {figures} by data sheet")
    return found


def _unknown(row: Row, memory: float) -> Device:
    peak = row.number("peak_tflops_used")
    if peak is None or not 1 <= peak <= 1e5:
        raise Skip(f"accelerator {shown(row.fields.get('accelerator'))} is not in the catalogue, and no peak is stated")
    preset, own = min(_BY_PEAK, key=lambda each: abs(each[1] - peak))
    name = row.text("accelerator")[:40]
    row.assume(f"accelerator {name}: as that of {preset} at {peak / own:.2f} of its speed, from peak_tflops_used")
    return Device(preset, name, peak, memory)


def _variant(row: Row, found: Device, words: str, memory: float) -> Device:
    """Return the variant of an accelerator that matches the memory and the precision of a row."""
    if not memory and found.preset in ("dgx-a100-80gb", "dgx-1-v100-32gb") and not found.memory:
        written = re.search(r"(\d\d)gi?b?$", words)
        memory = float(written[1]) if written else 0.0
        if not memory:
            row.assume("accel_mem_gb of the larger variant (not stated)")
    if found.preset == "dgx-a100-80gb" and not found.peak and 0 < memory <= 45:
        return found._replace(preset="dgx-a100-40gb")
    if found.preset == "dgx-1-v100-32gb" and 0 < memory <= 17:
        return found._replace(preset="dgx-1-v100-16gb")
    if found.preset == "dgx-1-v100-32gb" and (row.optional("devices_per_node") or 0) > 8 and not found.name:
        return found._replace(preset="dgx-2-v100-32gb")
    if found.preset == "frontier-mi250x" and memory > 100:
        return Device(found.preset, "MI250X, both dies as one device", 383, 128, 3.28)
    if found.preset == "atlas-800-910" and (memory > 40 or re.search("bf16|bfloat16", row.text("precision"))):
        row.assume("Ascend 910B, for the first 910 has no bf16 and 32 GB")
        return found._replace(preset="atlas-800t-a2")
    return found


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

_COUNTED = re.compile(
    r"(\d+)\s*(?:nics?|hcas?|ports?|rails?)?\s*(?:x|\*|of)\s*(\d+(?:\.\d+)?)\s*-?\s*(tb|gb|g)(?:it)?(?:/s|ps|be|e)?\b"
)
_TIMES = re.compile(r"(\d+(?:\.\d+)?)\s*-?\s*(tb|gb|g)(?:it)?(?:/s|ps|be|e)?\s*(?:x|\*)\s*(\d+)\b")
"""A rate followed by a count: ``400 Gb/s x 8``."""
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*-?\s*([TtGg])(b|B|[Bb]its?)?(?:/s|ps|E|e)?\b")
_BIT = 1e9 / 8
_MOST = 100_000.0
"""Gb/s of a node above which a stated rate cannot be that of its NICs."""


def nic_rate(row: Row, devices: int) -> float | None:
    """Return the total NIC bandwidth of a node with ``devices`` devices, in bytes/s; None where it is not stated."""
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
    """Return a node's bytes/s from one rate in Gb/s, which the words give per node, per device or per NIC."""
    if re.search(r"per (gpu|device|accelerator|chip|npu)|/gpu|a gpu|each gpu|rail", words):
        return _checked(rate * devices)
    if re.search(r"per node|node-node|node to node|/node|a node|aggregate|total|efa", words) or rate > 800:
        return _checked(rate)
    if re.search(r"infiniband|\bib\b|hdr|ndr|edr|xdr|roce|rdma|spectrum|connectx|\bcx-?\d|slingshot", words):
        return _by_generation(row, rate, devices)
    row.assume(f"one NIC of {rate:g} Gb/s a node, from {words[:60]!r}")
    return _checked(rate)


def _by_generation(row: Row, rate: float, devices: int) -> float | None:
    """Return a node's bytes/s over InfiniBand or RoCE: one NIC per device from 200 Gb/s on, one per node below."""
    if rate >= 200:
        row.assume(f"one NIC of {rate:g} Gb/s a device (number not stated)")
        return _checked(rate * devices)
    row.assume(f"one NIC of {rate:g} Gb/s a node (number not stated)")
    return _checked(rate)


def pcie_generation(row: Row) -> int | None:
    """Return the PCIe generation that connects the devices of a node; None for another network."""
    words = row.text("intra_node_link")
    if "pci" not in words or re.search(r"nvlink|nvswitch|xgmi|infinity|hccs|ici\b", re.sub(r"no nvlink", "", words)):
        return None
    found = re.search(r"(?:gen|pcie|pci-e)\s*-?([2-6])", words)
    if found is None:
        row.assume("PCIe 4.0 inside a node (generation not stated)")
    return int(found[1]) if found else 4


NCCL_SHARE = 0.96
"""Fraction of a NIC's line rate that NCCL assumes: 12.0 GB/s for 100 Gb/s (src/graph/topo.h)."""
PCIE_RATE = {2: 6 * GBYTE, 3: 12 * GBYTE, 4: 24 * GBYTE, 5: 48 * GBYTE, 6: 96 * GBYTE}
"""Bytes/s of 16 PCIe lanes by generation, as NCCL assumes (src/graph/topo.h, PCI_BW 12.0 for generation 3)."""


def machine(row: Row, devices: int) -> Cluster:
    """Return the cluster of a row, of which the run uses ``devices`` devices."""
    if devices > MAX_DEVICES:
        raise Skip(f"n_devices is at most {MAX_DEVICES}, met {devices}")
    kind = device(row)
    full = _catalogued(kind.preset, 1, None)
    if isinstance(full.fabric, Torus) or kind.preset.startswith("tpu"):
        found = _torus(row, kind, devices)
    else:
        found = _nodes(row, kind, devices, full.first.devices)
    ((node, count),) = found.nodes
    memory = row.optional_number("accel_mem_gb")
    accelerator = _accelerator(row, node.accelerator, kind, memory)
    node = replace(node, accelerator=on_stack(row, accelerator))
    if not kind.preset.startswith("tpu"):
        node = _wired(row, kind, node, count)
    node = replace(node, host=replace(node.host, launch=host_launch(row)))
    row.assume(f"hosts, links and fabric of {kind.preset} where the row states none")
    return replace(found, nodes=((node, count),))


@lru_cache(maxsize=256)
def _catalogued(preset: str, nodes: int, devices: int | None) -> Cluster:
    return cluster(preset, nodes, devices)


def _nodes(row: Row, kind: Device, devices: int, full: int) -> Cluster:
    stated = row.optional("devices_per_node", 4096)
    if stated is None and devices > full:
        row.assume(f"devices_per_node {full} (not stated)")
    a_node = stated or full
    # publishers count the trays of an NVL72 rack as nodes, though NVLink connects the whole rack
    if full >= 36 and a_node < full and not re.search(r"nvl ?(4|8|16)\b", row.text("intra_node_link")):
        row.assume(f"devices of a rack of {full} reach each other by NVLink")
        a_node = full
    most = min(a_node, devices)
    used = next(count for count in reversed(divisors(devices)) if count <= most)
    if used != most and devices > used:
        row.assume(f"{devices // used} nodes with {used} devices in use each, for {most} do not divide {devices}")
    if used > full and not isinstance(_catalogued(kind.preset, 1, None).first.network, Switch):
        row.assume(f"devices_per_node {full}: {kind.preset} has no more")
        used = next(count for count in reversed(divisors(devices)) if count <= full)
    return _catalogued(kind.preset, devices // used, used)


def _torus(row: Row, kind: Device, devices: int) -> Cluster:
    """Return one slice of a torus, or several slices that the hosts' network connects."""
    slices = _slices(row, devices)
    if slices > 1 and kind.preset != "tpu-v6e":
        return _catalogued(f"{kind.preset}-slices", slices, devices // slices)
    full = _catalogued(kind.preset, 1, None).first.devices
    used = next(count for count in reversed(divisors(devices)) if count <= full)
    return _catalogued(kind.preset, devices // used, used)


def _slices(row: Row, devices: int) -> int:
    named = re.search(r"\b(\d+) ?x? ?slices?\b|\b(\d+) slice", row.text("plan_note", "intra_node_link"))
    count = int(named[1] or named[2]) if named else 1
    shards = row.optional("fsdp_shards") or devices
    if not named and "dcn" in row.text("inter_node_link") and 1 < shards < devices and devices % shards == 0:
        count = devices // shards
        row.assume(f"{count} slices of {shards}, the devices that share parameters (slices not stated)")
    return count if 0 < count < devices and devices % count == 0 else 1


@lru_cache(maxsize=256)
def _relative(base: Accelerator, kind: Device) -> Accelerator:
    """Return an accelerator scaled to a related device's data sheet: all rates in proportion to its 16-bit peak."""
    own = dict(base.peak_flops)
    ratio = kind.peak * 1e12 / own.get("bf16", own.get("fp16", kind.peak * 1e12)) if kind.peak else 1.0
    return replace(
        base,
        name=kind.name,
        peak_flops=tuple((dtype, rate * ratio) for dtype, rate in base.peak_flops),
        memory=kind.memory * GBYTE if kind.memory else base.memory,
        memory_bandwidth=kind.bandwidth * 1e12 if kind.bandwidth else base.memory_bandwidth,
    )


def _accelerator(row: Row, base: Accelerator, kind: Device, memory: float | None) -> Accelerator:
    found = _relative(base, kind) if kind.name else base
    if memory is not None and not 0.85 <= memory * GBYTE / found.memory <= 1.15 and memory <= 10_000:
        row.assume(f"{memory:g} GB of device memory, which {found.name} has not by the catalogue")
        found = replace(found, memory=memory * GBYTE)
    return _at_four_bits(row, found)


_FOUR_BIT_RATES = (("b300|gb300", 3.0), ("b200|gb200", 2.0), ("mi355|mi350", 2.0))
"""Ratio of the dense 4-bit peak to the dense 8-bit peak (data sheets; a B300 has 15 PFLOP/s of NVFP4)."""


def _at_four_bits(row: Row, base: Accelerator) -> Accelerator:
    """Return an accelerator with its 4-bit peak in the place of its 8-bit peak, for a row that trains in 4 bits."""
    if not re.search(FOUR_BITS, row.text("precision")):
        return base
    words = row.text("accelerator")
    ratio = next((ratio for pattern, ratio in _FOUR_BIT_RATES if re.search(pattern, words)), 1.0)
    rates = tuple((dtype, rate * ratio if dtype == "fp8" else rate) for dtype, rate in base.peak_flops)
    return replace(base, peak_flops=rates)


def _wired(row: Row, kind: Device, node: Node, count: int) -> Node:
    """Return a node with the row's stated links instead of the catalogue's."""
    generation = pcie_generation(row) or kind.pcie
    if generation and node.devices > 1:
        link = Link(_latency(node), PCIE_RATE[generation])
        node = replace(node, network=Switch(link))
        row.assume(f"devices of a node reach each other by PCIe {generation}.0 x16 through an ideal switch")
    elif kind.link and isinstance(node.network, Switch):
        node = replace(
            node, network=replace(node.network, link=replace(node.network.link, bandwidth=kind.link * GBYTE))
        )
    if count == 1:
        return node
    rate = nic_rate(row, node.devices)
    if rate is None:
        return node
    total = rate * NCCL_SHARE
    own = node.nics * node.nic.bandwidth
    # within 10 % a stated rate is the catalogue's, rounded
    if 0.9 <= total / own <= 1.1:
        return node
    row.assume(f"NICs of {rate * 8 / GBYTE:.4g} Gb/s a node in all, as the row states")
    return replace(node, nic=replace(node.nic, bandwidth=total / node.nics))


def _latency(node: Node) -> float:
    pcie = node.host.pcie
    return pcie.link.latency if pcie is not None else node.nic.latency
