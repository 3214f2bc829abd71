"""The accelerator of a row: a catalogue machine's own, or one scaled to a data sheet, by the words that name it.

The known names are in ``vocabulary/aliases.json``. One that is not known is taken for the nearest by name, else for the
nearest by the figures that the row states, else for the commonest. Its figures are of data sheets: NVIDIA, AMD, Google
per chip (jax-ml/scaling-book, tpus.md), Huawei, Intel and Amazon; dense rates with accumulation in fp32.
"""

from difflib import get_close_matches
from math import log
from typing import NamedTuple

from meshwise.scenarios.files.errors import format_value
from meshwise.scenarios.intervals import NOT_UNDERSTOOD
from meshwise.scenarios.published.row import GIGABYTES, MEMORY_RATE, POWER, Row
from meshwise.scenarios.published.vocabulary.reading import load_vocabularies, normalise, read_words


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
    clock
        Clock under the power limit of a run over that under the limit of the data sheet.
    """

    preset: str
    name: str = ""
    peak: float = 0.0
    memory: float = 0.0
    bandwidth: float = 0.0
    link: float = 0.0
    pcie: int = 0
    clock: float = 1.0


POWER_LIMITS = {
    "dgx-a100-40gb": 400.0,
    "dgx-a100-80gb": 400.0,
    "dgx-h100": 700.0,
    "dgx-h200": 700.0,
    "dgx-b200": 1000.0,
    "gb200-nvl72": 1200.0,
    "dgx-b300": 1100.0,
    "gb300-nvl72": 1400.0,
    "mi300x-8": 750.0,
    "mi325x-8": 1000.0,
    "mi355x-8": 1400.0,
}
"""W of an accelerator by the data sheets of NVIDIA's SXM modules and superchips and of AMD's OAM modules."""

_NVLINK_400 = 160.0
"""GB/s in one direction over the 8 NVLinks of export variants, 20 GB/s each as NCCL counts (src/graph/topo.h)."""

_DEVICES: dict[str, Device] = {
    "gb300": Device("gb300-nvl72"),
    "gb200": Device("gb200-nvl72"),
    "b300": Device("dgx-b300"),
    "b200": Device("dgx-b200"),
    "b100": Device("dgx-b200", "B100", 1750, 180, 8.0),
    "gh200": Device("dgx-h100", "GH200 96GB", 989, 96, 4.0),
    "h200 nvl": Device("dgx-h200", "H200 NVL", 835, 141, 4.8, pcie=5),
    "h200": Device("dgx-h200"),
    "h20": Device("dgx-h100", "H20", 148, 96, 4.0),
    "h800": Device("dgx-h100", "H800", link=_NVLINK_400),
    "h100 nvl": Device("dgx-h100", "H100 NVL", 835, 94, 3.9, pcie=5),
    "h100": Device("dgx-h100"),
    "a800": Device("dgx-a100-80gb", "A800", link=_NVLINK_400),
    "a100": Device("dgx-a100-80gb"),
    "a10g": Device("dgx-a100-80gb", "A10G", 70, 24, 0.6, pcie=4),
    "a10": Device("dgx-a100-80gb", "A10", 125, 24, 0.6, pcie=4),
    "a30": Device("dgx-a100-80gb", "A30", 165, 24, 0.933, pcie=4),
    "a40": Device("dgx-a100-80gb", "A40", 149.7, 48, 0.696, pcie=4),
    "a6000": Device("dgx-a100-80gb", "RTX A6000", 154.8, 48, 0.768, pcie=4),
    "a5000": Device("dgx-a100-80gb", "RTX A5000", 111, 24, 0.768, pcie=4),
    "rtx pro 6000": Device("dgx-b200", "RTX PRO 6000", 503.8, 96, 1.79, pcie=5),
    "rtx 6000 ada": Device("dgx-h100", "RTX 6000 Ada", 364, 48, 0.96, pcie=4),
    "l40s": Device("dgx-h100", "L40S", 362, 48, 0.864, pcie=4),
    "l40": Device("dgx-h100", "L40", 181, 48, 0.864, pcie=4),
    "l20": Device("dgx-h100", "L20", 119.5, 48, 0.864, pcie=4),
    "l4": Device("dgx-h100", "L4", 121, 24, 0.3, pcie=4),
    "rtx 5090": Device("dgx-h100", "RTX 5090", 209.5, 32, 1.79, pcie=5),
    "rtx 4090": Device("dgx-h100", "RTX 4090", 165.2, 24, 1.008, pcie=4),
    "rtx 4080": Device("dgx-h100", "RTX 4080", 97.5, 16, 0.717, pcie=4),
    "rtx 3090": Device("dgx-a100-80gb", "RTX 3090", 71, 24, 0.936, pcie=4),
    "rtx 3080": Device("dgx-a100-80gb", "RTX 3080", 59.5, 10, 0.76, pcie=4),
    "v100": Device("dgx-1-v100-32gb"),
    "titan v": Device("dgx-1-v100-16gb", "TITAN V", 110, 12, 0.653, pcie=3),
    "rtx 2080": Device("dgx-1-v100-16gb", "RTX 2080 Ti", 56.9, 11, 0.616, pcie=3),
    "titan rtx": Device("dgx-1-v100-32gb", "TITAN RTX", 130.5, 24, 0.672, pcie=3),
    "t4": Device("dgx-1-v100-16gb", "T4", 65, 16, 0.32, pcie=3),
    "p100": Device("dgx-1-v100-16gb", "P100", 21.2, 16, 0.732),
    "mi355x": Device("mi355x-8"),
    "mi350x": Device("mi355x-8", "MI350X", 2300, 288, 8.0),
    "mi325x": Device("mi325x-8"),
    "mi308x": Device("mi300x-8", "MI308X", 188, 192, 5.3),
    "mi300a": Device("mi300x-8", "MI300A", 981, 128, 5.3),
    "mi300x": Device("mi300x-8"),
    "mi250x": Device("frontier-mi250x"),
    "mi210": Device("frontier-mi250x", "MI210", 181, 64, 1.6),
    "mi100": Device("frontier-mi250x", "MI100", 184.6, 32, 1.23),
    "tpu v7": Device("tpu-v5p", "TPU v7", 2307, 192, 7.37),
    "tpu v6e": Device("tpu-v6e"),
    "tpu v5p": Device("tpu-v5p"),
    "tpu v5e": Device("tpu-v5e"),
    "tpu v4": Device("tpu-v4"),
    "tpu v3": Device("tpu-v4", "TPU v3", 123, 32, 0.9),
    "tpu v2": Device("tpu-v4", "TPU v2", 46, 16, 0.7),
    "ascend 910c": Device("atlas-800t-a2", "Ascend 910C", 708, 128, 3.2),
    "ascend 910b": Device("atlas-800t-a2"),
    "ascend 910": Device("atlas-800-910"),
    "gaudi 3": Device("gaudi2-8", "Gaudi3", 1677, 128, 3.7),
    "gaudi 2": Device("gaudi2-8"),
    "trainium2": Device("aws-trn2"),
    "trainium": Device("aws-trn2", "Trainium1", 190, 32, 0.82),
}

_VARIANTS: dict[tuple[str, str], Device] = {
    ("h100", "pcie"): Device("dgx-h100", "H100 PCIe", 756, 80, 2.0, pcie=5),
    ("h100", "nvl"): _DEVICES["h100 nvl"],
    # torchtitan's benchmarks/llama3_h100_202412_torchtitan.md: 96 GB of HBM2e at 2.4 TB/s
    ("h100", "hbm2e"): Device("dgx-h100", "H100 96GB HBM2e", 989, 96, 2.4),
    ("h200", "nvl"): _DEVICES["h200 nvl"],
    ("gh200", "hbm3e"): Device("dgx-h200", "GH200 141GB"),
    ("a100", "pcie"): Device("dgx-a100-80gb", "A100 PCIe", 312, 80, 1.94, pcie=4),
    ("v100", "pcie"): Device("dgx-1-v100-32gb", "V100 PCIe", 112, 0, 0.9, pcie=3),
}
"""Accelerators that a second word names: the form of their board, or the kind of their memory."""

_MEMORY_KINDS = {
    "hbm2": ("v100", "a100", "p100", "mi100", "a30", "ascend 910"),
    "hbm2e": ("a100", "a800", "h100", "mi210", "mi250x", "ascend 910b"),
    "hbm3": ("h100", "h800", "h20", "gh200", "mi300x", "mi300a", "mi308x"),
    "hbm3e": ("h200", "h200 nvl", "b100", "b200", "b300", "gb200", "gb300", "gh200", "mi325x", "mi350x", "mi355x"),
}
"""Accelerators by the kind of memory that their data sheets name; of the A100, HBM2 is that of 40 GB."""

_BY_FIGURES = (
    ("dgx-1-v100-16gb", 125.0, 16.0),
    ("dgx-1-v100-32gb", 125.0, 32.0),
    ("dgx-a100-40gb", 312.0, 40.0),
    ("dgx-a100-80gb", 312.0, 80.0),
    ("dgx-h100", 989.0, 80.0),
    ("dgx-h200", 989.0, 141.0),
    ("dgx-b200", 2250.0, 180.0),
    ("dgx-b300", 2250.0, 288.0),
)
"""Catalogue machines with the dense 16-bit TFLOP/s and the GB of memory of their accelerators."""
COMMONEST = "dgx-a100-80gb"
"""The machine of most published runs, for an accelerator of which nothing is known."""
NEAR_NAME = 0.75
"""Similarity from which a name that is not known is taken for a known one (``difflib.get_close_matches``)."""


def find_device(row: Row) -> Device:
    """Return the accelerator of a row; one that is not known is the nearest by name or figures, or the commonest."""
    row.note_words("accelerator")
    memory = row.optional_number("accel_mem_gb") or _read_memory(row)
    name = row.reading("accelerator").word or _find_name(row)
    if not name:
        return _guess_device(row, memory)
    device = _find_variant(row, name, memory)
    device = _apply_power(row, _apply_bandwidth(row, name, device))
    if device.name:
        rates = f"{device.peak:g} TFLOP/s, {device.bandwidth:g} TB/s"
        bandwidth = f"{device.bandwidth:g} TB/s" if device.bandwidth else "its own figures"
        figures = rates if device.peak else "its own links" if device.link else bandwidth
        row.assume(f"{device.name}: as the accelerator of {device.preset} with {figures} by data sheet")
    return device


def _apply_power(row: Row, device: Device) -> Device:
    """Return a device with the clock that the power limit among the words of a row's accelerator allows.

    Dynamic power is proportional to frequency and to the square of the voltage, which follows the frequency: a clock
    goes with the cube root of power (Chandrakasan et al. 1992, "Low-power CMOS digital design", section II).
    """
    match, usual_limit = POWER.search(normalise(row.words("accelerator"))), POWER_LIMITS.get(device.preset)
    own_peaks = {preset: peak for preset, peak, _ in _BY_FIGURES}
    # a relative that is scaled to another peak has a limit of its own
    is_relative = device.pcie or device.peak not in (0, own_peaks.get(device.preset))
    if match is None or usual_limit is None or is_relative or not 0.4 <= float(match[1]) / usual_limit < 1:
        return device
    clock = (float(match[1]) / usual_limit) ** (1 / 3)
    row.assume(f"products and attention at {clock:.2f} of their rate: {match[1]} W of {usual_limit:g} W")
    return device._replace(clock=clock)


def _read_memory(row: Row) -> float:
    """Return the GB of memory among the words of an accelerator; 0 without them."""
    sizes = {float(match[1]) for match in GIGABYTES.finditer(normalise(row.words("accelerator")))}
    return sizes.pop() if len(sizes) == 1 and max(sizes, default=0) > 0 else 0.0


def _find_name(row: Row) -> str:
    """Return the known accelerator whose name is nearest to the row's; empty where none is near."""
    vocabulary, words = load_vocabularies()["accelerator"].words, normalise(row.words("accelerator"))[:60]
    candidates = ("".join(words.split()), *(word for word in words.split() if len(word) > 3 and not word.isdigit()))
    near = next((match[0] for item in candidates if (match := get_close_matches(item, vocabulary, 1, NEAR_NAME))), "")
    if not near or not row.reading("accelerator").misread:
        return ""
    row.assume(f"accelerator {format_value(row.words('accelerator'))} taken as {vocabulary[near]}, the nearest by name")
    return vocabulary[near]


def _guess_device(row: Row, memory: float) -> Device:
    """Return the machine nearest by the stated peak and memory, scaled to them; the commonest without either."""
    peak = row.optional_number("peak_tflops_used")
    peak = peak if peak is not None and 1 <= peak <= 1e5 else None
    name = row.words("accelerator")[:40].lower() or "of no name"
    memory = memory if 1 <= memory <= 10_000 else 0.0
    if peak is None and not memory:
        row.assume(f"accelerator as that of {COMMONEST}: what is stated of it {NOT_UNDERSTOOD}")
        return Device(COMMONEST)

    def distance(candidate: tuple[str, float, float]) -> float:
        by_peak = abs(log(candidate[1] / peak)) if peak else 0.0
        return by_peak + (abs(log(candidate[2] / memory)) if memory and not peak else 0.0)

    preset, preset_peak, _ = min(_BY_FIGURES if peak is None else _BY_PEAK, key=distance)
    if peak is None:
        row.assume(f"accelerator as that of {preset}, the nearest by memory: its name {NOT_UNDERSTOOD}")
        return Device(preset)
    row.assume(
        f"accelerator as that of {preset} at {peak / preset_peak:.2f} of its speed, from peak_tflops_used: its name "
        f"{name} {NOT_UNDERSTOOD}"
    )
    return Device(preset, name, peak, memory)


_BY_PEAK = tuple(
    entry for entry in _BY_FIGURES if entry[0] in ("dgx-1-v100-32gb", "dgx-a100-80gb", "dgx-h100", "dgx-b200")
)


def _find_variant(row: Row, name: str, memory: float) -> Device:
    """Return the variant of an accelerator that matches the words, the memory and the precision of a row."""
    device = _DEVICES[name]
    words = row.words("accelerator")
    kinds = [read_words(field, words).word for field in ("accelerator_form", "accelerator_memory")]
    if name == "gh200" and memory > 120:
        kinds.append("hbm3e")
    for kind in kinds:
        if (name, kind) in _VARIANTS and not (kind == "hbm2e" and 0 < memory <= 80):
            device = _VARIANTS[name, kind]
            break
    kind = kinds[1]
    if kind and (name, kind) not in _VARIANTS and name not in _MEMORY_KINDS.get(kind, ()):
        row.assume(f"accelerator words not used: {kind!r}, which {name} has not by its data sheet")
    return _find_size(row, name, device, memory, kind)


def _find_size(row: Row, name: str, device: Device, memory: float, kind: str) -> Device:
    if name == "a100" and kind == "hbm2" and not memory:
        memory = 40.0
    if not memory and name in ("a100", "v100") and not device.memory:
        row.assume("accel_mem_gb of the larger variant (not stated)")
    if name == "a100" and 0 < memory <= 45:
        pcie = device.pcie
        return Device("dgx-a100-40gb", "A100 PCIe 40GB" if pcie else "", pcie=pcie)
    if device.preset == "dgx-1-v100-32gb" and 0 < memory <= 17:
        return device._replace(preset="dgx-1-v100-16gb")
    if name == "v100" and (row.optional_count("devices_per_node") or 0) > 8 and not device.name:
        return device._replace(preset="dgx-2-v100-32gb")
    if name == "mi250x" and memory > 100:
        return Device(device.preset, "MI250X, both dies as one device", 383, 128, 3.28)
    if name == "ascend 910" and (memory > 40 or row.reading("precision").word == "bf16"):
        row.assume("Ascend 910B, for the first 910 has no bf16 and 32 GB")
        return device._replace(preset="atlas-800t-a2")
    return device


def _apply_bandwidth(row: Row, name: str, device: Device) -> Device:
    """Return a device with the bandwidth of memory among the words of a row's accelerator, where there is one."""
    match = MEMORY_RATE.search(normalise(row.words("accelerator")))
    if match is None:
        return device
    bandwidth = float(match[1]) * {"t": 1.0, "g": 1e-3}[match[2]]
    if not 0.05 <= bandwidth <= 50 or bandwidth == device.bandwidth:
        return device
    return device._replace(name=device.name or name.upper(), bandwidth=bandwidth)
