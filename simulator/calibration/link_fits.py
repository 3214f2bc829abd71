"""Fits of links and communication libraries to published collectives, and errors on rows that were left out.

The steps and bytes of a collective on links inside nodes and on NICs come from the simulator; only figures are fitted.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, log10
from typing import Any, NamedTuple

import numpy as np

from meshwise.simulator.brief import brief
from meshwise.simulator.calibration.collective_rows import CollectiveRow, Timing
from meshwise.simulator.calibration.least_squares import least_squares
from meshwise.simulator.catalog import cluster
from meshwise.simulator.collective import Algorithm, Collective
from meshwise.simulator.collectives.choose import algorithms, candidates, phases
from meshwise.simulator.collectives.traffic import Phase
from meshwise.simulator.interconnect.interconnect import interconnect
from meshwise.simulator.interconnect.routes import FloatArray
from meshwise.simulator.machine.cluster import LOSSLESS, Cluster, Library, Protocol
from meshwise.simulator.machine.topology import Link

_NONE, _UNIT = Link(0.0, inf), Link(1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Figures:
    """The fitted figures: of the link inside nodes, the NIC between them, and the library."""

    link: Link
    nic: Link = _NONE
    library: Library = LOSSLESS


class Term(NamedTuple):
    """One phase of a collective: (steps, bytes per byte of its size) inside nodes and between them.

    ``copy_bytes`` are the bytes inside nodes that `Library.own` multiplies.
    """

    inside: tuple[float, float]
    between: tuple[float, float]
    own: float
    switched: bool
    messages: bool

    def time(self, figures: Figures, size: FloatArray, first: bool) -> FloatArray:
        """Return the seconds of the phase for every size; only the first phase includes one-time costs."""
        library, link, nic = figures.library, figures.link, figures.nic
        launch = max(link.launch if self.inside[1] else 0.0, nic.launch if self.between[1] else 0.0) * first
        waits = self.inside[0] * link.latency, self.between[0] * nic.latency
        steps = max(waits) if self.messages else sum(waits)  # messages are under way together
        inside = (self.inside[1] + self.own * library.own) / link.bandwidth
        moving = max(inside / library.reduction if self.switched else inside, self.between[1] / nic.bandwidth)
        once = library.reduction_launch * (self.switched and first)
        ways = library.ways(launch + steps + once, None if self.switched else launch, self.messages)
        found: FloatArray = np.min([latency + size * (moving * moved) for latency, moved in ways], axis=0)
        return found


Terms = tuple[Term, ...]
"""The phases of a collective by one algorithm."""


class Case(NamedTuple):
    """Rows of the same collective on the same devices: their indices, sizes, and the algorithms to choose from."""

    rows: np.ndarray[tuple[int], np.dtype[np.int64]]
    size: FloatArray
    ways: tuple[Terms, ...]


def cases(rows: Sequence[CollectiveRow]) -> tuple[Case, ...]:
    """Return rows grouped by machine, ranks, collective and algorithm."""
    found: dict[object, list[int]] = {}
    for index, row in enumerate(rows):
        found.setdefault((row.machine, row.nodes, row.ranks, row.collective, row.algorithm), []).append(index)
    return tuple(
        Case(np.array(each), np.array([rows[i].size for i in each]), _ways(rows[each[0]])) for each in found.values()
    )


def predict(found: Sequence[Case], count: int, figures: Figures) -> FloatArray:
    """Return the predicted seconds of all ``count`` rows, each by its fastest algorithm and protocol."""
    seconds = np.zeros(count)
    for case in found:
        every = [
            np.sum([each.time(figures, case.size, not n) for n, each in enumerate(way)], axis=0) for way in case.ways
        ]
        seconds[case.rows] = np.min(every, axis=0)
    return seconds


def _ways(row: CollectiveRow) -> tuple[Terms, ...]:
    machine, group = cluster(row.machine, row.nodes), np.array(row.group)
    able = algorithms(machine, row.collective, group)
    if row.algorithm is not None:
        chosen: tuple[Algorithm, ...] = (row.algorithm,) if row.algorithm in able else able
    else:
        chosen = tuple(each for each in candidates(machine, row.collective) if each in able)
    return tuple(terms(row.machine, row.nodes, row.group, row.collective, each) for each in chosen)


@lru_cache(maxsize=4096)
def terms(name: str, nodes: int, group: tuple[int, ...], collective: Collective, algorithm: Algorithm) -> Terms:
    """Return the terms of a collective's phases, taken from the phases that the simulator builds.

    With unit figures on one kind of link and none on the other, times equal the steps and bytes on that kind.
    """
    inside, own, between = (
        _with(cluster(name, nodes), *links)
        for links in ((_UNIT, _NONE, LOSSLESS), (_UNIT, _NONE, Library(own=1.0)), (_NONE, _UNIT, LOSSLESS))
    )
    parts = [phases(each, collective, algorithm, np.array([group])) for each in (inside, own, between)]
    return tuple(
        Term(
            (float(a.latency[0]), _busiest(inside, a)),
            (float(b.latency[0]), _busiest(between, b)),
            _busiest(own, o) - _busiest(inside, a),
            a.launch is None,
            a.messages,
        )
        for a, o, b in zip(*parts, strict=True)
    )


def _with(machine: Cluster, link: Link, nic: Link, library: Library) -> Cluster:
    # without PCIe, so that no time of the host's wiring mixes with that of the links
    (node, count), *_ = machine.nodes
    node = replace(node, network=replace(node.network, link=link), nic=nic, host=replace(node.host, pcie=None))
    return replace(machine, nodes=((node, count),), library=library)


def _busiest(machine: Cluster, phase: Phase) -> float:
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


class _Knob(NamedTuple):
    """Start and bounds of a parameter."""

    start: float
    low: float
    high: float


_SHARE = _Knob(0.4, 0.02, 1.0)
_LINK = {"latency": _Knob(3e-6, 2e-7, 5e-5), "launch": _Knob(2e-5, 1e-6, 3e-4), "bandwidth": _Knob(0.8, 0.1, 1.0)}
_NIC = {"latency": _Knob(1.4e-5, 2e-7, 1e-3), "launch": _Knob(5e-5, 1e-6, 2e-3), "bandwidth": _Knob(0.8, 0.1, 1.0)}
_LIBRARY = {
    "own": _Knob(0.4, 1e-3, 1.0),
    "ll launch": _SHARE,
    "ll step": _SHARE,
    "ll payload": _Knob(0.1, 0.005, 0.5),
    "ll128 launch": _SHARE,
    "ll128 step": _SHARE,
    "ll128 payload": _Knob(0.6, 0.05, 120 / 128),
}
"""Payloads are bounded by the flags that protocols write: LL reaches half of the wire, LL128 120/128 of it."""
_REDUCTION = {"reduction": _Knob(0.85, 0.5, 1.0), "reduction launch": _Knob(2e-5, 1e-6, 3e-4)}
_SMALL = 4 * 2**20
"""Bytes up to which a host's clock mostly reads overhead outside the collective."""
_DRAWN = {False: 10.0, True: 100.0}
"""Scale of the prior for links inside nodes (False) and between them (True): the log ratio of a parameter to its
relative's, divided by this, counts as the error of one row. Networks differ so much that theirs is almost flat.
"""


@dataclass(frozen=True, slots=True)
class LinkFit:
    """Figures of a technology, the rows they were fitted to, and the mean error on these.

    Where ``rows`` is 0 the figures are those of ``relative``, scaled to the data sheet.
    """

    technology: str
    figures: Figures
    rows: int
    sources: tuple[str, ...]
    error: float
    relative: str | None = None

    __repr__ = brief()


@dataclass(frozen=True, slots=True)
class Fits:
    """The fit of every technology, and the seconds that a host's clock reads in addition to a collective."""

    links: Mapping[str, LinkFit]
    host_time: float

    __repr__ = brief()


def fit_links(rows: Sequence[CollectiveRow], leave_out: Collection[str] = ()) -> Fits:
    """Return the figures of all `TECHNOLOGIES`, fitted to the rows of all sources except ``leave_out``.

    Errors are logs of predicted over measured time, beyond 10 % they count linearly, so that no row dominates;
    rows of one source and collective together weigh the root of their number. The overhead that a host's clock
    reads is one time for all sources: the median residual of small sizes against a fit to the other rows.
    """
    kept = [row for row in rows if row.source not in leave_out]
    # the overhead of hosts is measured against a fit to better clocks, then all rows are fitted with it
    first = _fits([row for row in kept if row.timing is not Timing.HOST], 0.0)
    lost = _host_time(kept, first)
    found = _fits(kept, lost)
    return Fits(found, lost)


def _fits(rows: Sequence[CollectiveRow], lost: float) -> dict[str, LinkFit]:
    found: dict[str, LinkFit] = {}
    for name in TECHNOLOGIES:
        found[name] = _fit(name, _best_timed(_rows_of(TECHNOLOGIES[name], rows)), found, lost)
    return found


def _host_time(rows: Sequence[CollectiveRow], found: Mapping[str, LinkFit]) -> float:
    beside: list[float] = []
    for name, fit in found.items():
        chosen = [row for row in _rows_of(TECHNOLOGIES[name], rows) if row.timing is Timing.HOST and row.size <= _SMALL]
        if chosen:
            seconds = predict(cases(chosen), len(chosen), fit.figures)
            beside += [row.seconds - each for row, each in zip(chosen, seconds.tolist(), strict=True)]
    return max(float(np.median(beside)), 0.0) if beside else 0.0


def _rows_of(technology: Technology, rows: Iterable[CollectiveRow]) -> list[CollectiveRow]:
    between = technology.inside is not None
    return [row for row in rows if row.machine in technology.machines and (row.nodes > 1) == between]


def _best_timed(rows: list[CollectiveRow]) -> list[CollectiveRow]:
    """Return for every decade of sizes the rows that were timed by the most accurate clock used in that decade."""
    best: dict[int, int] = {}
    for row in rows:
        decade, clock = int(log10(row.size)), _CLOCKS.index(row.timing)
        best[decade] = min(best.get(decade, clock), clock)
    return [row for row in rows if row.timing is _CLOCKS[best[int(log10(row.size))]]]


def _fit(name: str, rows: list[CollectiveRow], found: Mapping[str, LinkFit], lost: float) -> LinkFit:
    technology = TECHNOLOGIES[name]
    knobs = _NIC if technology.inside else _LINK | _LIBRARY | _REDUCTION
    # the fit is in logarithms: parameters are positive and spread over decades
    drawn = np.log([_origin(technology, found, each) for each in knobs])
    weight = np.concatenate([_weights(rows), np.ones(len(knobs))])
    held, measured = cases(rows), np.array([row.seconds for row in rows])
    beside = _beside(rows, lost)
    inside = found[technology.inside].figures if technology.inside else None

    def figures(values: FloatArray) -> Figures:
        return _figures(dict(zip(knobs, np.exp(values).tolist(), strict=True)), technology.rate, inside)

    def residuals(values: FloatArray) -> FloatArray:
        seconds = predict(held, len(rows), figures(values)) + beside
        return np.concatenate([np.log(seconds / measured), (values - drawn) / _DRAWN[inside is not None]])

    best = _search(residuals, drawn, list(knobs.values()), weight)
    error = float(np.mean(np.abs(np.expm1(residuals(best)[: len(rows)])))) if rows else 0.0
    sources = tuple(dict.fromkeys(row.source for row in rows))
    return LinkFit(name, _rounded(figures(best)), len(rows), sources, error, None if rows else technology.relative)


def _origin(technology: Technology, found: Mapping[str, LinkFit], name: str) -> float:
    """Return the prior value of a parameter: the relative's, or the usual start where there is no relative."""
    if technology.relative is None:
        return (_NIC if technology.inside else _LINK | _LIBRARY | _REDUCTION)[name].start
    other = found[technology.relative].figures
    return _values(other, other.nic if technology.inside else other.link, TECHNOLOGIES[technology.relative].rate)[name]


def _values(figures: Figures, link: Link, rate: float) -> Mapping[str, float]:
    """Return the parameters of figures by name; the inverse of `_to_figures`."""
    library = figures.library
    found = {"latency": link.latency, "launch": link.launch, "bandwidth": link.bandwidth / rate, "own": library.own}
    for each in library.protocols:
        parts = {"launch": each.launch, "step": each.step, "payload": each.payload}
        found |= {f"{each.name} {part}": value for part, value in parts.items()}
    return found | {"reduction": library.reduction, "reduction launch": library.reduction_launch}


def _search(
    residuals: Callable[[FloatArray], FloatArray], drawn: FloatArray, knobs: list[_Knob], weight: FloatArray
) -> FloatArray:
    """Return the better of two fits, one from the relative's parameters and one from the usual start.

    Times are minima over algorithms and protocols, so that the cost has several local minima.
    """
    start, low, high = (np.log([getattr(knob, each) for knob in knobs]) for each in ("start", "low", "high"))
    ends = [least_squares(residuals, each, (low, high), weight) for each in (drawn, start)]
    return min(ends, key=lambda end: end[1])[0]


def _figures(values: Mapping[str, float], rate: float, inside: Figures | None) -> Figures:
    link = Link(values["latency"], values["bandwidth"] * rate, values["launch"])
    if inside is not None:
        return replace(inside, nic=link)
    protocols = tuple(
        Protocol(name, values[f"{name} launch"], values[f"{name} step"], values[f"{name} payload"], name == "ll")
        for name in ("ll", "ll128")
    )
    library = Library(protocols, values["own"], values["reduction"], values["reduction launch"])
    return Figures(link, library=library)


def _weights(rows: Sequence[CollectiveRow]) -> FloatArray:
    count: dict[object, int] = {}
    for row in rows:
        count[row.source, row.collective] = count.get((row.source, row.collective), 0) + 1
    return np.array([1.0 / count[row.source, row.collective] ** 0.5 for row in rows])


def _beside(rows: Sequence[CollectiveRow], lost: float) -> FloatArray:
    return np.array([lost * (row.timing is Timing.HOST) for row in rows])


def _rounded(figures: Figures) -> Figures:
    """Return figures rounded to three digits, as they are written."""

    def link(each: Link) -> Link:
        return Link(_three(each.latency), _three(each.bandwidth), _three(each.launch))

    library = figures.library
    protocols = tuple(
        replace(each, launch=_three(each.launch), step=_three(each.step), payload=_three(each.payload))
        for each in library.protocols
    )
    switched = _three(library.reduction), _three(library.reduction_launch)
    return Figures(link(figures.link), link(figures.nic), Library(protocols, _three(library.own), *switched))


def _three(value: float) -> float:
    return float(f"{value:.3g}")


class Error(NamedTuple):
    """Errors on some rows of a source, relative to the measured time: mean and median size, and median as bias."""

    source: str
    collective: str
    size: str
    rows: int
    mean: float
    median: float
    bias: float


SIZES = (("small", 64 * 2**10), ("mid", 16 * 2**20), ("large", float("inf")))
"""Ranges of sizes, and the bytes below which they lie; ``mid`` includes its end."""


def errors(rows: Sequence[CollectiveRow], fits: Fits) -> tuple[Error, ...]:
    """Return the errors of rows by source, collective and range of sizes; ``*`` stands for all."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for row, error in zip(rows, deviations(rows, fits).tolist(), strict=True):
        for key in ((row.source, "*", "*"), (row.source, row.collective, "*"), (row.source, "*", _range(row.size))):
            found.setdefault(key, []).append(error)
    return tuple(_error(key, np.array(values)) for key, values in sorted(found.items()))


def held_out(rows: Sequence[CollectiveRow]) -> tuple[Error, ...]:
    """Return the errors of every source against figures that were fitted without it."""
    found: list[Error] = []
    for source in sorted({row.source for row in rows}):
        own = [row for row in rows if row.source == source]
        found += errors(own, fit_links(rows, (source,)))
    return tuple(found)


def deviations(rows: Sequence[CollectiveRow], fits: Fits) -> FloatArray:
    """Return the relative error of every row: predicted over measured time, minus 1."""
    result = np.zeros(len(rows))
    for name, technology in TECHNOLOGIES.items():
        chosen = [i for i, row in enumerate(rows) if row in _rows_of(technology, (row,))]
        if chosen:
            own = [rows[i] for i in chosen]
            seconds = predict(cases(own), len(own), fits.links[name].figures) + _beside(own, fits.host_time)
            result[chosen] = seconds / np.array([row.seconds for row in own]) - 1.0
    return result


def _range(size: float) -> str:
    return next(name for name, end in SIZES if size < end or (name == "mid" and size == end))


def _error(key: tuple[str, str, str], values: FloatArray) -> Error:
    size = np.abs(values)
    return Error(*key, len(values), float(np.mean(size)), float(np.median(size)), float(np.median(values)))


def dump(fits: Fits) -> str:
    """Return the fits as the JSON text that the catalogue ships."""
    return json.dumps({name: _entry(fit) for name, fit in fits.links.items()}, indent=2) + "\n"


def _entry(fit: LinkFit) -> dict[str, Any]:
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
                {"name": each.name, "launch": each.launch, "step": each.step, "payload": each.payload}
                | ({"messages": True} if each.messages else {})
                for each in library.protocols
            ],
            "own": library.own,
            "reduction": library.reduction,
            "reduction_launch": f"{library.reduction_launch * 1e6:.3g} us",
        }
    fitted = {"rows": fit.rows, "sources": list(fit.sources), "error": round(fit.error, 3)}
    return entry | {"fit": fitted | ({"relative": fit.relative} if fit.relative else {})}


class Disagreement(NamedTuple):
    """Ratios of two sources' times for the same collective, machine, ranks and size: median and range."""

    first: str
    second: str
    size: str
    rows: int
    ratio: float
    least: float
    most: float


_SAME_SIZE = 1.15
"""Largest ratio of two sizes that count as the same."""


def disagreements(rows: Sequence[CollectiveRow]) -> tuple[Disagreement, ...]:
    """Return the ratios of times for every two sources, the alphabetically first over the second."""
    places: dict[object, list[CollectiveRow]] = {}
    for row in rows:
        places.setdefault((technology_of(row), row.nodes, row.ranks, row.collective, row.algorithm), []).append(row)
    found: dict[tuple[str, str, str], list[float]] = {}
    for alike in places.values():
        for first in alike:
            others = (row for row in alike if first.source < row.source)
            for second in others:
                if 1 / _SAME_SIZE <= first.size / second.size <= _SAME_SIZE:
                    rate = first.seconds / first.size * second.size / second.seconds
                    found.setdefault((first.source, second.source, _range(first.size)), []).append(rate)
    return tuple(
        Disagreement(*key, len(ratios), float(np.median(ratios)), min(ratios), max(ratios))
        for key, ratios in sorted(found.items())
    )


def technology_of(row: CollectiveRow) -> str | None:
    """Return the name of the technology whose figures predict a row, ``None`` where there is none."""
    return next((name for name, technology in TECHNOLOGIES.items() if _rows_of(technology, (row,))), None)
