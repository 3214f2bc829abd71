"""A Markdown page with the errors of the model of communication on published collectives.

It also states how far the sources are from each other.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence

from meshwise.simulator.calibration.collective_rows import CollectiveRow, Skipped
from meshwise.simulator.calibration.link_fits import (
    SIZES,
    TECHNOLOGIES,
    Disagreement,
    Error,
    Fits,
    LinkFit,
    deviations,
    disagreements,
    errors,
    fit_links,
    held_out,
    technology_of,
)
from meshwise.simulator.calibration.noise import ITSELF, Floor, Sizes, Times, floor, repeats
from meshwise.simulator.machine.topology import Link


def collective_floors(rows: Sequence[CollectiveRow]) -> tuple[Floor, ...]:
    """Return the distances of each source from every other on the same links, and from itself, beside the model's."""
    sources: dict[str, list[CollectiveRow]] = defaultdict(list)
    for row in rows:
        sources[row.source].append(row)
    times = {name: Times((*_what(row), row.seconds) for row in own) for name, own in sources.items()}
    return tuple(each for name, own in sources.items() for each in _floors(name, own, rows, times))


def _floors(
    name: str, own: Sequence[CollectiveRow], rows: Sequence[CollectiveRow], times: Mapping[str, Times]
) -> list[Floor]:
    off = deviations(own, fit_links(rows, (name,))).tolist()
    found = []
    for other, known in times.items():
        links = defaultdict(list)
        for row, error in zip(own, off, strict=True):
            compared = known.compared(*_what(row), row.seconds, row.seconds * (1.0 + error)) if other != name else None
            if compared is not None:
                links[str(technology_of(row))].append(compared)
        found += [floor(link, "collectives", name, other, each) for link, each in links.items()]
    several = defaultdict(list)
    for row in own:
        several[str(technology_of(row))].append((*_what(row), row.seconds))
    again = {link: repeats(each) for link, each in several.items()}
    return found + [floor(link, "collectives", name, ITSELF, each) for link, each in again.items() if each]


def _what(row: CollectiveRow) -> tuple[Hashable, Sizes]:
    return (technology_of(row), row.nodes, row.ranks, row.collective, row.algorithm), (row.size,)


_HEAD = """# Collectives: predicted against measured

`meshwise.simulator.calibration` holds the model of communication against published collectives; `report` of
`simulator/calibration/collective_report.py` makes this page. No training run is fitted.

Errors are |predicted / measured - 1|, their mean and in brackets their median. Small is below 64 KiB, large
above 16 MiB.
"""
_HELD_OUT = """
## Whole sources left out

Each row is a source that gave nothing to the figures that predict it: they come from the other sources of
the same links, and from a relative where there are none (NICs with one source each; their floors differ by a
factor of 17 between networks, so that nothing predicts one from another). `all` leaves nothing out.
"""
_RATIOS = """
## Where publishers differ

Times of two sources for the same collective, number of ranks, links and size (to 15 %, by bytes a second):
the first over the second. Where this is far from 1 no one model meets both. Hosts' clocks read launch and
synchronisation; a profiled kernel of one rank waits for the last; and collectives of torch.distributed on
lists of tensors copy them once more.
"""
_FLOOR = """
## What no model can beat

For each source left out, how far another's times of the same collectives are from it: their mean error as
predictions, *raw*, and after division by one factor for all of them. Between two sizes of the other source, at most
4 times apart, its time is interpolated along logarithms; *same* are those that need it not. A model that knows the
other source without error makes the raw error; *model* is that of the model without the source, on the same rows.
*itself* are repeats of the same collective within a source, against their median.

Networks between nodes have one source each, or two that timed different collectives, and so no floor but their repeats.
A priori, nothing fitted but the other networks, large sizes are met within 14 to 24 %, as NICs reach 0.76 or 0.77 of
the data sheet in three of four; smaller ones are not, as the same two nodes take 54 us (RoCE), 69 us (EFA of 3200
Gb/s), 161 us (EFA of 400) and 940 us (TCPX) for the fewest bytes, which no figure of a data sheet says.
"""
_FIGURES = """
## Figures

What all rows fit, by the best clock that a link's rows were timed by; a link without such rows has its
relative's. Beside a collective a host's clock reads {host:.0f} us. Figures are those of NCCL's Simple protocol.
"""
_LIBRARIES = """
Of LL and LL128 the parts of launch, latency and bandwidth; `own` as in
`meshwise.simulator.machine.cluster.Library`; the part of a port that collectives in switches reach (NCCL's tuner
has 0.85 for Hopper and 0.74 for Blackwell). NVLink 2 and 3 have no such switches: theirs are not used.
"""


def report(rows: Sequence[CollectiveRow], skipped: Sequence[Skipped]) -> str:
    """Return the page; all rows are fitted once, and once more without each source (half a minute)."""
    fits, without = fit_links(rows), held_out(rows)
    clock = {row.source: row.timing for row in rows}
    seen = {(each.source, each.collective, each.size): each for each in errors(rows, fits)}
    sizes = [name for name, _ in SIZES]
    by_size = [
        [source, str(clock[source]), _shown(seen[source, "*", "*"])]
        + [_shown(_of(without, source, "*", size)) for size in ("*", *sizes)]
        for source in clock
    ]
    collectives = sorted({row.collective for row in rows})
    by_collective = [
        [source, *(_shown(_of(without, source, collective, "*")) for collective in collectives)] for source in clock
    ]
    return "".join(
        [
            _HEAD,
            _HELD_OUT,
            _table(["source", "clock", "all", "left out", *sizes], by_size),
            _table(["source", *collectives], by_collective),
            _RATIOS,
            _table(["first", "second", "sizes", "pairs", "ratio", "range"], map(_ratio, disagreements(rows))),
            _FLOOR,
            _table(
                ["link", "left out", "other", "number", "same", "factor", "raw", "without factor", "model"],
                map(_floor, collective_floors(rows)),
            ),
            _FIGURES.format(host=fits.host_time * 1e6),
            _table(
                ["link", "latency", "launch", "bandwidth", "of the data sheet", "rows", "error", "sources"],
                map(_link, fits.links.values()),
            ),
            _LIBRARIES,
            _table(["link", "LL", "LL128", "own", "in switches", "launch there"], _libraries(fits)),
            "\n## Rows that are not used\n",
            _table(["rows", "reason"], [[str(n), why] for why, n in Counter(x.reason for x in skipped).most_common()]),
        ]
    )


def _of(found: Iterable[Error], *key: str) -> Error | None:
    return next((each for each in found if (each.source, each.collective, each.size) == key), None)


def _shown(error: Error | None) -> str:
    return "-" if error is None else f"{error.mean:.1%} ({error.median:.1%})"


def _ratio(found: Disagreement) -> list[str]:
    spread = f"{found.least:.2f} - {found.most:.2f}"
    return [found.first, found.second, found.size, str(found.rows), f"{found.ratio:.2f}", spread]


def _floor(found: Floor) -> list[str]:
    errors_of = ["-" if each is None else f"{each:.1%}" for each in (found.raw, found.scatter, found.model)]
    counts = [str(found.number), str(found.same), f"{found.factor:.2f}"]
    return [found.on, found.left_out, found.other, *counts, *errors_of]


def _link(fit: LinkFit) -> list[str]:
    technology = TECHNOLOGIES[fit.technology]
    link: Link = fit.figures.nic if technology.inside else fit.figures.link
    return [
        fit.technology,
        f"{link.latency * 1e6:.3g} us",
        f"{link.launch * 1e6:.3g} us",
        f"{link.bandwidth * 1e-9:.3g} GB/s",
        f"{link.bandwidth / technology.rate:.0%}",
        str(fit.rows),
        f"{fit.error:.1%}",
        ", ".join(fit.sources),
    ]


def _libraries(fits: Fits) -> Iterable[list[str]]:
    for name, fit in fits.links.items():
        library = fit.figures.library
        if TECHNOLOGIES[name].inside is None:
            protocols = [f"{each.launch:.2f}, {each.step:.2f}, {each.payload:.2f}" for each in library.protocols]
            switched = [f"{library.own:.2f}", f"{library.reduction:.2f}", f"{library.reduction_launch * 1e6:.0f} us"]
            yield [name, *protocols, *switched]


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)
