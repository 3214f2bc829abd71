"""Accelerators by what publishers call them: machines of the catalogue, and relatives by data sheet."""

import re
from typing import NamedTuple

from scenarios.errors import shown
from scenarios.rows.row import Row, Skip

GBYTE = 1e9


class Device(NamedTuple):
    """An accelerator: the machine of the catalogue that it is, or that it is a relative of.

    Parameters
    ----------
    preset
        Machine of the catalogue.
    name
        What it is called; empty where it is the machine's own accelerator.
    peak
        Dense TFLOP/s in 16 bit; 0 for the machine's own.
    memory, bandwidth
        GB and TB/s of device memory; 0 for the machine's own.
    link
        GB/s of one direction into the node's switch; 0 for the machine's own network.
    pcie
        Generation of the PCIe slots that devices of a node reach each other by; 0 where it is another network.
    """

    preset: str
    name: str = ""
    peak: float = 0.0
    memory: float = 0.0
    bandwidth: float = 0.0
    link: float = 0.0
    pcie: int = 0


_NVLINK_400 = 160.0
"""GB/s one way of 8 NVLinks at the 20 GB/s that NCCL counts for each (src/graph/topo.h); export variants have 8."""

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
_TABLE = tuple((re.compile(pattern), device) for pattern, device in _DEVICES)
"""First match of the accelerator's name without spaces and signs."""

_BY_PEAK = (("dgx-1-v100-32gb", 125.0), ("dgx-a100-80gb", 312.0), ("dgx-h100", 989.0), ("dgx-b200", 2250.0))


def device(row: Row) -> Device:
    """Return the accelerator of a row; raises `Skip` for one of which nothing is known."""
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
    """Return the variant that the memory and the precision of a row tell apart."""
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
