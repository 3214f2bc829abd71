"""Figures of a machine that only a mistyped unit explains: GB/s for TB/s, Gb/s for GB/s, GFLOP/s for TFLOP/s.

Rates of machines differ by thousands, from a core to a GB300; what they have in common is what a rate is beside the
bandwidth of the device's memory. Where one of these ratios is outside the range of the catalogue, and one figure a
thousandfold, a thousandth or an eighth of itself puts all of them inside, that figure is remarked on.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from math import log
from typing import NamedTuple

from scenarios.cluster_schema import ClusterTable, MixedClusterTable, NodeTypeTable
from scenarios.reader import FieldPath
from simulator.catalog import accelerator, cluster, cluster_names
from simulator.units import format_bandwidth, format_compute_rate

_MEMORY = "memory_bandwidth"
_PEAK, _INSIDE, _BETWEEN = "peak", "intra_node", "inter_node"
_WORDS = {_MEMORY: format_bandwidth, _PEAK: format_compute_rate, _INSIDE: format_bandwidth, _BETWEEN: format_bandwidth}
_SLACK = 4.0
"""How far beyond the catalogue's range a ratio may lie."""
_SLIPS = (1000.0, 1 / 1000.0)
_BITS = 1 / 8
"""A link's Gb/s written as GB/s."""


class Rate(NamedTuple):
    """A figure of a machine in SI units: what it is, and where it stands if it is written out."""

    kind: str
    value: float
    path: FieldPath | None = None


class Slip(NamedTuple):
    """A figure that is unusual and would be usual in another unit."""

    path: FieldPath
    message: str


@lru_cache(maxsize=1)
def _catalogue() -> Mapping[str, tuple[float, float]]:
    """Return the least and most of every kind of figure in the catalogue."""
    rates: dict[str, list[float]] = {}
    for machine in _machines():
        for rate in machine:
            rates.setdefault(rate.kind, []).append(rate.value)
    return {kind: (min(values), max(values)) for kind, values in rates.items()}


@lru_cache(maxsize=1)
def _machines() -> tuple[tuple[Rate, ...], ...]:
    """Return the figures of every machine of the catalogue."""
    nodes = (cluster(name).first for name in cluster_names())
    return tuple(
        (
            Rate(_MEMORY, node.accelerator.memory_bandwidth),
            *(Rate(_PEAK, peak) for _, peak in node.accelerator.peak_flops),
            Rate(_INSIDE, node.network.link.bandwidth),
            Rate(_BETWEEN, node.nic.bandwidth),
        )
        for node in nodes
    )


def _beside_memory(machine: Iterable[Rate]) -> Iterator[tuple[str, float]]:
    """Yield every rate of a machine over the bandwidth of its memory."""
    rates = tuple(machine)
    memory = next(rate.value for rate in rates if rate.kind == _MEMORY)
    return ((rate.kind, rate.value / memory) for rate in rates if rate.kind != _MEMORY)


@lru_cache(maxsize=1)
def _usual_ratios() -> Mapping[str, tuple[float, float]]:
    ratios: dict[str, list[float]] = {}
    for machine in _machines():
        for kind, ratio in _beside_memory(machine):
            ratios.setdefault(kind, []).append(ratio)
    return {kind: (min(values) / _SLACK, max(values) * _SLACK) for kind, values in ratios.items()}


def _plausible(machine: Iterable[Rate]) -> bool:
    usual = _usual_ratios()
    return all(usual[kind][0] <= ratio <= usual[kind][1] for kind, ratio in _beside_memory(machine))


def mistyped_units(table: ClusterTable | MixedClusterTable | NodeTypeTable, path: FieldPath = ()) -> Iterator[Slip]:
    """Yield the figure of each kind of node that is unusual and would be usual in another unit."""
    if isinstance(table, MixedClusterTable):
        for index, kind in enumerate(table.node_types):
            yield from mistyped_units(kind, (*path, "node_types", index))
        return
    machine = tuple(_rates(table, path))
    if _plausible(machine):
        return
    found = [
        (_distance(mended), rate, scale)
        for index, rate in enumerate(machine)
        if rate.path is not None
        for scale in (*_SLIPS, *([_BITS] if rate.kind in (_INSIDE, _BETWEEN) else []))
        if _plausible(mended := (*machine[:index], rate._replace(value=rate.value * scale), *machine[index + 1 :]))
    ]
    if found:
        _, rate, scale = min(found, key=lambda item: item[0])
        assert rate.path is not None
        yield Slip(rate.path, _message(rate, scale))


def _message(rate: Rate, scale: float) -> str:
    words = _WORDS[rate.kind]
    least, most = map(words, _catalogue()[rate.kind])
    bits = f"{rate.value / 1e9:.4g} Gb/s, which are " if scale == _BITS else ""
    return (
        f"is unusual beside the machine's other figures: {words(rate.value)}, the catalogue's machines have {least} "
        f"to {most}; probably {bits}{words(rate.value * scale)}"
    )


def _rates(table: ClusterTable | NodeTypeTable, path: FieldPath) -> Iterator[Rate]:
    device = table.accelerator
    if device.preset is not None:
        known = accelerator(device.preset)
        yield Rate(_MEMORY, known.memory_bandwidth)
    else:
        assert device.memory_bandwidth and device.peak  # the schema asks for them
        yield Rate(_MEMORY, device.memory_bandwidth, (*path, "accelerator", _MEMORY))
        for dtype, peak in device.peak.items():
            yield Rate(_PEAK, peak, (*path, "accelerator", _PEAK, dtype))
    yield Rate(_INSIDE, table.intra_node.bandwidth, (*path, _INSIDE, "bandwidth"))
    yield Rate(_BETWEEN, table.inter_node.bandwidth, (*path, _BETWEEN, "bandwidth"))


def _distance(machine: tuple[Rate, ...]) -> float:
    """Return how far a machine is from the nearest of the catalogue: sum of the logarithms of its figures' ratios."""
    return min(
        sum(min(abs(log(rate.value / other.value)) for other in known if other.kind == rate.kind) for rate in machine)
        for known in _machines()
    )
