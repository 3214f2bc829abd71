"""Fits of links and communication libraries to published collectives, and errors on rows that were left out.

The steps and bytes of a collective on links inside nodes and on NICs come from the simulator; only figures are fitted.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from itertools import product
from math import inf, log10
from typing import Any, NamedTuple

import numpy as np

from meshwise.simulator.brief import brief_repr
from meshwise.simulator.calibration.collective_rows import CollectiveRow, Timing
from meshwise.simulator.calibration.least_squares import least_squares
from meshwise.simulator.catalog import cluster
from meshwise.simulator.collective import Algorithm, Collective
from meshwise.simulator.collectives.choose import algorithms, candidates, phases
from meshwise.simulator.collectives.traffic import Phase
from meshwise.simulator.interconnect.interconnect import interconnect
from meshwise.simulator.interconnect.routes import FloatArray
from meshwise.simulator.machine.cluster import LOSSLESS, Cluster, CommunicationLibrary, Protocol
from meshwise.simulator.machine.topology import Link

_NONE, _UNIT = Link(0.0, inf), Link(1.0, 1.0)


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """The fitted figures: of the link inside nodes, the NIC between them, and the library."""

    link: Link
    nic: Link = _NONE
    library: CommunicationLibrary = LOSSLESS


class PhaseTerm(NamedTuple):
    """One phase of a collective: (steps, bytes per byte of its size) inside nodes and between them.

    ``copy_bytes`` are the bytes inside nodes that `CommunicationLibrary.own` multiplies. ``repeats_launch`` says that
    every phase pays one-time costs, as those of hierarchical collectives do.
    """

    inside: tuple[float, float]
    between: tuple[float, float]
    copy_bytes: float
    is_switched: bool
    is_messages: bool
    repeats_launch: bool = False

    def time(self, figures: LinkFigures, size: FloatArray, is_first: bool) -> FloatArray:
        """Return the seconds of the phase for every size; only the first phase includes one-time costs, or all."""
        library, link, nic = figures.library, figures.link, figures.nic
        launch = max(link.launch if self.inside[1] else 0.0, nic.launch if self.between[1] else 0.0)
        launch *= is_first or self.repeats_launch
        waits = self.inside[0] * link.latency, self.between[0] * nic.latency
        steps = max(waits) if self.is_messages else sum(waits)  # messages are under way together
        inside = (self.inside[1] + self.copy_bytes * library.own) / link.bandwidth
        transfer_time = max(inside / library.reduction if self.is_switched else inside, self.between[1] / nic.bandwidth)
        reduction_launch = library.reduction_launch * (self.is_switched and is_first)
        protocol_times = library.list_protocol_costs(
            launch + steps + reduction_launch, None if self.is_switched else launch, self.is_messages
        )
        seconds: FloatArray = np.min(
            [latency + size * (transfer_time * volume) for latency, volume in protocol_times], axis=0
        )
        return seconds


Terms = tuple[PhaseTerm, ...]
"""The phases of a collective by one algorithm."""


class CollectiveCase(NamedTuple):
    """Rows of the same collective on the same devices: their indices, sizes, and the algorithms to choose from."""

    rows: np.ndarray[tuple[int], np.dtype[np.int64]]
    size: FloatArray
    algorithm_terms: tuple[Terms, ...]


def group_cases(rows: Sequence[CollectiveRow]) -> tuple[CollectiveCase, ...]:
    """Return rows grouped by machine, ranks, collective and algorithm."""
    row_indices = defaultdict(list)
    for index, row in enumerate(rows):
        row_indices[row.machine, row.nodes, row.ranks, row.collective, row.algorithm].append(index)
    return tuple(
        CollectiveCase(
            np.array(indices),
            np.array([rows[row_index].size for row_index in indices]),
            _list_algorithm_terms(rows[indices[0]]),
        )
        for indices in row_indices.values()
    )


def predict_seconds(all_cases: Sequence[CollectiveCase], count: int, figures: LinkFigures) -> FloatArray:
    """Return the predicted seconds of all ``count`` rows, each by its fastest algorithm and protocol."""
    seconds = np.zeros(count)
    for case in all_cases:
        algorithm_times = [
            np.sum([term.time(figures, case.size, not position) for position, term in enumerate(phase_terms)], axis=0)
            for phase_terms in case.algorithm_terms
        ]
        seconds[case.rows] = np.min(algorithm_times, axis=0)
    return seconds


def _list_algorithm_terms(row: CollectiveRow) -> tuple[Terms, ...]:
    machine, group = cluster(row.machine, row.nodes), np.array(row.group)
    legal_algorithms = algorithms(machine, row.collective, group)
    if row.algorithm is not None:
        selection: tuple[Algorithm, ...] = (row.algorithm,) if row.algorithm in legal_algorithms else legal_algorithms
    else:
        selection = tuple(
            algorithm for algorithm in candidates(machine, row.collective) if algorithm in legal_algorithms
        )
    return tuple(build_terms(row.machine, row.nodes, row.group, row.collective, algorithm) for algorithm in selection)


@lru_cache(maxsize=4096)
def build_terms(name: str, nodes: int, group: tuple[int, ...], collective: Collective, algorithm: Algorithm) -> Terms:
    """Return the terms of a collective's phases on nodes of a machine of the catalogue."""
    return build_cluster_terms(cluster(name, nodes), group, collective, algorithm)


@lru_cache(maxsize=4096)
def build_cluster_terms(
    machine: Cluster, group: tuple[int, ...], collective: Collective, algorithm: Algorithm
) -> Terms:
    """Return the terms of a collective's phases, taken from the phases that the simulator builds.

    With unit figures on one kind of link and none on the other, times equal the steps and bytes on that kind.
    """
    inside, copying, between = (
        _replace_links(machine, *links)
        for links in ((_UNIT, _NONE, LOSSLESS), (_UNIT, _NONE, CommunicationLibrary(own=1.0)), (_NONE, _UNIT, LOSSLESS))
    )
    parts = [phases(machine, collective, algorithm, np.array([group])) for machine in (inside, copying, between)]
    return tuple(
        PhaseTerm(
            (float(inside_phase.latency[0]), _busiest_time(inside, inside_phase)),
            (float(between_phase.latency[0]), _busiest_time(between, between_phase)),
            _busiest_time(copying, copying_phase) - _busiest_time(inside, inside_phase),
            inside_phase.launch is None,
            inside_phase.messages,
            algorithm is Algorithm.HIERARCHICAL,
        )
        for inside_phase, copying_phase, between_phase in zip(*parts, strict=True)
    )


def _replace_links(machine: Cluster, link: Link, nic: Link, library: CommunicationLibrary) -> Cluster:
    # without PCIe, so that no time of the host's wiring mixes with that of the links
    (node, count), *_ = machine.nodes
    node = replace(node, network=replace(node.network, link=link), nic=nic, host=replace(node.host, pcie=None))
    return replace(machine, nodes=((node, count),), library=library)


def _busiest_time(machine: Cluster, phase: Phase) -> float:
    return float(np.max(phase.load / interconnect(machine).bandwidth[phase.link], initial=0.0))


_CLOCKS = (Timing.DEVICE, Timing.PROFILER, Timing.HOST)
"""Clocks, the most accurate first."""


class Technology(NamedTuple):
    """A kind of link: the machines whose rows fit it, and its data-sheet rate, which no fit exceeds.

    ``inside`` is the technology inside the nodes, for links between nodes. ``relative`` is the technology whose
    figures are the prior of the fit, bandwidths as fractions of the data sheet's; without rows they are the result.
    """

    machines: tuple[str, ...]
    rate: float
    inside: str | None = None
    relative: str | None = None


TECHNOLOGIES = {
    "nvlink4": Technology(("dgx-h100", "dgx-h200"), 450e9),
    "nvlink3": Technology(("dgx-a100-80gb",), 300e9, relative="nvlink4"),
    "nvlink5": Technology(("dgx-b200", "gb200-nvl72"), 900e9, relative="nvlink4"),
    "nvlink2": Technology(("dgx-1-v100-16gb",), 25e9, relative="nvlink3"),
    "roce-400g": Technology(("gcp-a3-ultra",), 50e9, "nvlink4"),
    "efa-3200g": Technology(("aws-p5",), 50e9, "nvlink4", relative="roce-400g"),
    "efa-400g": Technology(("aws-p4de",), 12.5e9, "nvlink3", relative="roce-400g"),
    "tcpx-200g": Technology(("gcp-a3-high",), 25e9, "nvlink4", relative="roce-400g"),
}
"""Links with rows, relatives first. Rates are of one NIC of a node, of all NVLinks of a device, or of one in a mesh."""


class _ParameterRange(NamedTuple):
    """Start and bounds of a parameter."""

    start: float
    low: float
    high: float


_SHARE_RANGE = _ParameterRange(0.4, 0.02, 1.0)
_NIC_RANGES = {
    "latency": _ParameterRange(1.4e-5, 2e-7, 1e-3),
    "launch": _ParameterRange(5e-5, 1e-6, 2e-3),
    "bandwidth": _ParameterRange(0.8, 0.1, 1.0),
}
_LINK_RANGES = {
    "latency": _ParameterRange(3e-6, 2e-7, 5e-5),
    "launch": _ParameterRange(2e-5, 1e-6, 3e-4),
    "bandwidth": _ParameterRange(0.8, 0.1, 1.0),
    "own": _ParameterRange(0.4, 1e-3, 1.0),
    "ll launch": _SHARE_RANGE,
    "ll step": _SHARE_RANGE,
    "ll payload": _ParameterRange(0.1, 0.005, 0.5),
    "ll128 launch": _SHARE_RANGE,
    "ll128 step": _SHARE_RANGE,
    "ll128 payload": _ParameterRange(0.6, 0.05, 120 / 128),
    "reduction": _ParameterRange(0.85, 0.5, 1.0),
    "reduction launch": _ParameterRange(2e-5, 1e-6, 3e-4),
}
"""Payloads are bounded by the flags that protocols write: LL reaches half of the wire, LL128 120/128 of it."""
_MAX_SMALL_SIZE = 4 * 2**20
"""Bytes up to which a host's clock mostly reads overhead outside the collective."""
_PRIOR_SCALE = {False: 10.0, True: 100.0}
"""Scale of the prior for links inside nodes (False) and between them (True): the log ratio of a parameter to its
relative's, divided by this, counts as the error of one row. Networks differ so much that theirs is almost flat.
"""


@dataclass(frozen=True, slots=True)
class LinkFit:
    """Figures of a technology, the rows they were fitted to, and the mean error on these.

    Where ``rows`` is 0 the figures are those of ``relative``, scaled to the data sheet.
    """

    technology: str
    figures: LinkFigures
    rows: int
    sources: tuple[str, ...]
    error: float
    relative: str | None = None

    __repr__ = brief_repr()


@dataclass(frozen=True, slots=True)
class LinkFits:
    """The fit of every technology, and the seconds that a host's clock reads in addition to a collective."""

    links: Mapping[str, LinkFit]
    host_time: float

    __repr__ = brief_repr()


def fit_links(rows: Sequence[CollectiveRow], leave_out: Collection[str] = ()) -> LinkFits:
    """Return the figures of all `TECHNOLOGIES`, fitted to the rows of all sources except ``leave_out``.

    Errors are logs of predicted over measured time, beyond 10 % they count linearly, so that no row dominates;
    rows of one source and collective together weigh the root of their number. The overhead that a host's clock
    reads is one time for all sources: the median residual of small sizes against a fit to the other rows.
    """
    included = [row for row in rows if row.source not in leave_out]
    # the overhead of hosts is measured against a fit to better clocks, then all rows are fitted with it
    device_fits = _fit_technologies([row for row in included if row.timing is not Timing.HOST], 0.0)
    host_time = _fit_host_time(included, device_fits)
    links = _fit_technologies(included, host_time)
    return LinkFits(links, host_time)


def _fit_technologies(rows: Sequence[CollectiveRow], host_time: float) -> dict[str, LinkFit]:
    fits: dict[str, LinkFit] = {}
    for name, technology in TECHNOLOGIES.items():
        fits[name] = _fit_technology(name, _select_best_timed(_select_rows(technology, rows)), fits, host_time)
    return fits


def _fit_host_time(rows: Sequence[CollectiveRow], fits: Mapping[str, LinkFit]) -> float:
    host_times: list[float] = []
    for name, fit in fits.items():
        host_rows = [
            row
            for row in _select_rows(TECHNOLOGIES[name], rows)
            if row.timing is Timing.HOST and row.size <= _MAX_SMALL_SIZE
        ]
        if host_rows:
            seconds = predict_seconds(group_cases(host_rows), len(host_rows), fit.figures)
            host_times += [row.seconds - predicted for row, predicted in zip(host_rows, seconds.tolist(), strict=True)]
    return max(float(np.median(host_times)), 0.0) if host_times else 0.0


def _select_rows(technology: Technology, rows: Iterable[CollectiveRow]) -> list[CollectiveRow]:
    is_between = technology.inside is not None
    return [row for row in rows if row.machine in technology.machines and (row.nodes > 1) == is_between]


def _select_best_timed(rows: list[CollectiveRow]) -> list[CollectiveRow]:
    """Return for every decade of sizes the rows that were timed by the most accurate clock used in that decade."""
    best: dict[int, int] = {}
    for row in rows:
        decade, clock = int(log10(row.size)), _CLOCKS.index(row.timing)
        best[decade] = min(best.get(decade, clock), clock)
    return [row for row in rows if row.timing is _CLOCKS[best[int(log10(row.size))]]]


def _fit_technology(name: str, rows: list[CollectiveRow], fits: Mapping[str, LinkFit], host_time: float) -> LinkFit:
    technology = TECHNOLOGIES[name]
    ranges = _NIC_RANGES if technology.inside else _LINK_RANGES
    # the fit is in logarithms: parameters are positive and spread over decades
    prior_values = _prior_values(technology, fits)
    prior = np.log([prior_values[parameter] for parameter in ranges])
    weight = np.concatenate([_row_weights(rows), np.ones(len(ranges))])
    grouped_cases, measured = group_cases(rows), np.array([row.seconds for row in rows])
    host_seconds = _host_times(rows, host_time)
    inside = fits[technology.inside].figures if technology.inside else None

    def figures(values: FloatArray) -> LinkFigures:
        return _to_figures(dict(zip(ranges, np.exp(values).tolist(), strict=True)), technology.rate, inside)

    def residuals(values: FloatArray) -> FloatArray:
        seconds = predict_seconds(grouped_cases, len(rows), figures(values)) + host_seconds
        return np.concatenate([np.log(seconds / measured), (values - prior) / _PRIOR_SCALE[inside is not None]])

    best = _search_values(residuals, prior, list(ranges.values()), weight)
    error = float(np.mean(np.abs(np.expm1(residuals(best)[: len(rows)])))) if rows else 0.0
    sources = tuple(dict.fromkeys(row.source for row in rows))
    return LinkFit(
        name, _round_figures(figures(best)), len(rows), sources, error, None if rows else technology.relative
    )


def _prior_values(technology: Technology, fits: Mapping[str, LinkFit]) -> Mapping[str, float]:
    """Return the prior values of parameters: the relative's, or the usual start where there is no relative."""
    if technology.relative is None:
        ranges = _NIC_RANGES if technology.inside else _LINK_RANGES
        return {name: value_range.start for name, value_range in ranges.items()}
    figures = fits[technology.relative].figures
    link = figures.nic if technology.inside else figures.link
    return _to_values(figures, link, TECHNOLOGIES[technology.relative].rate)


def _to_values(figures: LinkFigures, link: Link, rate: float) -> Mapping[str, float]:
    """Return the parameters of figures by name; the inverse of `_to_figures`."""
    library = figures.library
    values = {"latency": link.latency, "launch": link.launch, "bandwidth": link.bandwidth / rate, "own": library.own}
    for protocol in library.protocols:
        parts = {"launch": protocol.launch, "step": protocol.step, "payload": protocol.payload}
        values |= {f"{protocol.name} {part}": value for part, value in parts.items()}
    return values | {"reduction": library.reduction, "reduction launch": library.reduction_launch}


def _search_values(
    residuals: Callable[[FloatArray], FloatArray], prior: FloatArray, ranges: list[_ParameterRange], weight: FloatArray
) -> FloatArray:
    """Return the better of two fits, one from the relative's parameters and one from the usual start.

    Times are minima over algorithms and protocols, so that the cost has several local minima.
    """
    start, low, high = (
        np.log([getattr(value_range, point_name) for value_range in ranges]) for point_name in ("start", "low", "high")
    )
    ends = [least_squares(residuals, point_name, (low, high), weight) for point_name in (prior, start)]
    return min(ends, key=lambda end: end[1])[0]


def _to_figures(values: Mapping[str, float], rate: float, inside: LinkFigures | None) -> LinkFigures:
    link = Link(values["latency"], values["bandwidth"] * rate, values["launch"])
    if inside is not None:
        return replace(inside, nic=link)
    protocols = tuple(
        Protocol(name, values[f"{name} launch"], values[f"{name} step"], values[f"{name} payload"], name == "ll")
        for name in ("ll", "ll128")
    )
    library = CommunicationLibrary(protocols, values["own"], values["reduction"], values["reduction launch"])
    return LinkFigures(link, library=library)


def _row_weights(rows: Sequence[CollectiveRow]) -> FloatArray:
    count = Counter((row.source, row.collective) for row in rows)
    return np.array([1.0 / count[row.source, row.collective] ** 0.5 for row in rows])


def _host_times(rows: Sequence[CollectiveRow], host_time: float) -> FloatArray:
    return np.array([host_time * (row.timing is Timing.HOST) for row in rows])


def _round_figures(value: Any) -> Any:
    """Return a value with all its numbers rounded to three digits, as they are written."""
    if isinstance(value, float):
        return float(f"{value:.3g}")
    if isinstance(value, tuple):
        return tuple(map(_round_figures, value))
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{field.name: _round_figures(getattr(value, field.name)) for field in fields(value)})


class LinkError(NamedTuple):
    """Errors on some rows of a source, relative to the measured time: mean and median size, and median as bias."""

    source: str
    collective: str
    size: str
    rows: int
    mean: float
    median: float
    bias: float


SIZE_RANGES = (("small", 64 * 2**10), ("mid", 16 * 2**20), ("large", float("inf")))
"""Ranges of sizes, and the bytes below which they lie; ``mid`` includes its end."""


def measure_errors(rows: Sequence[CollectiveRow], fits: LinkFits) -> tuple[LinkError, ...]:
    """Return the errors of rows by source, collective and range of sizes; ``*`` stands for all."""
    values_by_key: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row, error in zip(rows, relative_deviations(rows, fits).tolist(), strict=True):
        for collective, size in (("*", "*"), (row.collective, "*"), ("*", _size_range(row.size))):
            values_by_key[row.source, collective, size].append(error)
    return tuple(_summarize_errors(key, np.array(values)) for key, values in sorted(values_by_key.items()))


def measure_held_out(rows: Sequence[CollectiveRow]) -> tuple[LinkError, ...]:
    """Return the errors of every source against figures that were fitted without it."""
    held_out_errors: list[LinkError] = []
    for source in sorted({row.source for row in rows}):
        source_rows = [row for row in rows if row.source == source]
        held_out_errors += measure_errors(source_rows, fit_links(rows, (source,)))
    return tuple(held_out_errors)


def relative_deviations(rows: Sequence[CollectiveRow], fits: LinkFits) -> FloatArray:
    """Return the relative error of every row: predicted over measured time, minus 1."""
    result = np.zeros(len(rows))
    for name, technology in TECHNOLOGIES.items():
        indices = [index for index, row in enumerate(rows) if row in _select_rows(technology, (row,))]
        if indices:
            technology_rows = [rows[index] for index in indices]
            seconds = predict_seconds(
                group_cases(technology_rows), len(technology_rows), fits.links[name].figures
            ) + _host_times(technology_rows, fits.host_time)
            result[indices] = seconds / np.array([row.seconds for row in technology_rows]) - 1.0
    return result


def _size_range(size: float) -> str:
    return next(name for name, end in SIZE_RANGES if size < end or (name == "mid" and size == end))


def _summarize_errors(key: tuple[str, str, str], values: FloatArray) -> LinkError:
    size = np.abs(values)
    return LinkError(*key, len(values), float(np.mean(size)), float(np.median(size)), float(np.median(values)))


def to_json_text(fits: LinkFits) -> str:
    """Return the fits as the JSON text that the catalogue ships."""
    return json.dumps({name: _fit_document(fit) for name, fit in fits.links.items()}, indent=2) + "\n"


def _fit_document(fit: LinkFit) -> dict[str, Any]:
    technology, library = TECHNOLOGIES[fit.technology], fit.figures.library
    link = fit.figures.nic if technology.inside else fit.figures.link
    entry: dict[str, Any] = {
        "latency": f"{link.latency * 1e6:.3g} us",
        "bandwidth": f"{link.bandwidth * 1e-9:.3g} GB/s",
        "launch": f"{link.launch * 1e6:.3g} us",
    }
    if technology.inside is None:
        entry["library"] = {
            "protocols": [
                {"name": protocol.name, "launch": protocol.launch, "step": protocol.step, "payload": protocol.payload}
                | ({"messages": True} if protocol.messages else {})
                for protocol in library.protocols
            ],
            "own": library.own,
            "reduction": library.reduction,
            "reduction_launch": f"{library.reduction_launch * 1e6:.3g} us",
        }
    fit_summary = {"rows": fit.rows, "sources": list(fit.sources), "error": round(fit.error, 3)}
    return entry | {"fit": fit_summary | ({"relative": fit.relative} if fit.relative else {})}


class Disagreement(NamedTuple):
    """Ratios of two sources' times for the same collective, machine, ranks and size: median and range."""

    source: str
    other_source: str
    size: str
    rows: int
    ratio: float
    min_ratio: float
    max_ratio: float


_SAME_SIZE = 1.15
"""Largest ratio of two sizes that count as the same."""


def find_disagreements(rows: Sequence[CollectiveRow]) -> tuple[Disagreement, ...]:
    """Return the ratios of times for every two sources, the alphabetically first over the second."""
    rows_by_place = defaultdict(list)
    for row in rows:
        rows_by_place[find_technology(row), row.nodes, row.ranks, row.collective, row.algorithm].append(row)
    ratios_by_key = defaultdict(list)
    for comparable_rows in rows_by_place.values():
        for first, second in product(comparable_rows, repeat=2):
            if first.source < second.source and 1 / _SAME_SIZE <= first.size / second.size <= _SAME_SIZE:
                ratio = first.seconds / first.size * second.size / second.seconds
                ratios_by_key[first.source, second.source, _size_range(first.size)].append(ratio)
    return tuple(
        Disagreement(*key, len(ratios), float(np.median(ratios)), min(ratios), max(ratios))
        for key, ratios in sorted(ratios_by_key.items())
    )


def find_technology(row: CollectiveRow) -> str | None:
    """Return the name of the technology whose figures predict a row, ``None`` where there is none."""
    return next((name for name, technology in TECHNOLOGIES.items() if _select_rows(technology, (row,))), None)
