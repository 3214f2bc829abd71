"""The machine of a row: as many nodes of a catalogue machine as it has devices, with its own links."""

import re
from dataclasses import replace
from functools import lru_cache

from scenarios.rows.devices import GBYTE, Device, device
from scenarios.rows.frameworks import host_launch, on_stack
from scenarios.rows.row import Row, Skip
from scenarios.rows.training import FOUR_BITS
from scenarios.rows.wires import nic_rate, pcie_generation
from scenarios.schema import MAX_DEVICES
from simulator.accelerator import Accelerator
from simulator.catalog import cluster
from simulator.cluster import Cluster, Node
from simulator.interconnect.kinds import Switch, Torus
from simulator.link import Link
from strategies.divisors import divisors

NCCL_SHARE = 0.96
"""Of a NIC's line rate that NCCL counts on: 12.0 GB/s for 100 Gb/s (src/graph/topo.h)."""
PCIE_RATE = {2: 6 * GBYTE, 3: 12 * GBYTE, 4: 24 * GBYTE, 5: 48 * GBYTE, 6: 96 * GBYTE}
"""Bytes/s of 16 lanes by generation, as NCCL counts them (src/graph/topo.h, PCI_BW 12.0 for generation 3)."""


def machine(row: Row, devices: int) -> Cluster:
    """Return the machine of a row with ``devices`` devices in use."""
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
    """Return a slice of a torus, or several slices that a network of hosts joins."""
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
    """Return an accelerator at the data-sheet figures of a relative: everything in proportion to its 16-bit peak."""
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
"""Dense peak of 4-bit over that of 8-bit products (data sheets; the B300's has 15 PFLOP/s of NVFP4)."""


def _at_four_bits(row: Row, base: Accelerator) -> Accelerator:
    """Return an accelerator that multiplies 8 bits as fast as 4, for a row that trains in 4 bits."""
    if not re.search(FOUR_BITS, row.text("precision")):
        return base
    words = row.text("accelerator")
    ratio = next((ratio for pattern, ratio in _FOUR_BIT_RATES if re.search(pattern, words)), 1.0)
    rates = tuple((dtype, rate * ratio if dtype == "fp8" else rate) for dtype, rate in base.peak_flops)
    return replace(base, peak_flops=rates)


def _wired(row: Row, kind: Device, node: Node, count: int) -> Node:
    """Return a node with the links that the row states in the place of the catalogue's."""
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
    if 0.9 <= total / own <= 1.1:
        return node
    row.assume(f"NICs of {rate * 8 / GBYTE:.4g} Gb/s a node in all, as the row states")
    return replace(node, nic=replace(node.nic, bandwidth=total / node.nics))


def _latency(node: Node) -> float:
    pcie = node.host.pcie
    return pcie.link.latency if pcie is not None else node.nic.latency
