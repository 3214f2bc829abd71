"""A Markdown page with the errors of the model of communication on published collectives.

It also states how far the sources are from each other.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence

from meshwise.simulator.calibration.collective_rows import CollectiveRow, Skipped
from meshwise.simulator.calibration.link_fits import (
    SIZE_RANGES,
    TECHNOLOGIES,
    Disagreement,
    LinkError,
    LinkFit,
    LinkFits,
    find_disagreements,
    find_technology,
    fit_links,
    measure_errors,
    measure_held_out,
    relative_deviations,
)
from meshwise.simulator.calibration.noise import NoiseFloor, PublisherTimes, Sizes, TimedWork, measure_floors


def collective_floors(rows: Sequence[CollectiveRow]) -> tuple[NoiseFloor, ...]:
    """Return the distances of each source from every other on the same links, and from itself, beside the model's."""
    sources: dict[str, list[CollectiveRow]] = defaultdict(list)
    for row in rows:
        sources[row.source].append(row)
    times = {
        name: PublisherTimes((*_comparison_key(row), row.seconds) for row in source_rows)
        for name, source_rows in sources.items()
    }
    floors: list[NoiseFloor] = []
    for name, source_rows in sources.items():
        deviations = relative_deviations(source_rows, fit_links(rows, (name,))).tolist()
        work = [
            TimedWork(
                str(find_technology(row)),
                "collectives",
                *_comparison_key(row),
                row.seconds,
                row.seconds * (1.0 + deviation),
            )
            for row, deviation in zip(source_rows, deviations, strict=True)
        ]
        references = {reference: reference_times for reference, reference_times in times.items() if reference != name}
        floors += measure_floors(name, work, references)
    return tuple(floors)


def _comparison_key(row: CollectiveRow) -> tuple[Hashable, Sizes]:
    return (find_technology(row), row.nodes, row.ranks, row.collective, row.algorithm), (row.size,)


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
A priori, nothing fitted but the other networks, large sizes are met within 6 to 25 %, as NICs reach 0.76 or 0.77 of
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
`meshwise.simulator.machine.cluster.CommunicationLibrary`; the part of a port that collectives in switches reach
(NCCL's tuner has 0.85 for Hopper and 0.74 for Blackwell). NVLink 2 and 3 have no such switches: theirs are not used.
"""


def report(rows: Sequence[CollectiveRow], skipped: Sequence[Skipped]) -> str:
    """Return the page; all rows are fitted once, and once more without each source (half a minute)."""
    fits = fit_links(rows)
    clocks = {row.source: str(row.timing) for row in rows}
    fitted, held_out = (
        {error[:3]: error for error in errors} for errors in (measure_errors(rows, fits), measure_held_out(rows))
    )
    sizes, collectives = [name for name, _ in SIZE_RANGES], sorted({row.collective for row in rows})
    by_size = (
        [source, clock, _format_error(fitted[source, "*", "*"])]
        + [_format_error(held_out.get((source, "*", size))) for size in ("*", *sizes)]
        for source, clock in clocks.items()
    )
    by_collective = (
        [source, *(_format_error(held_out.get((source, collective, "*"))) for collective in collectives)]
        for source in clocks
    )
    reasons = Counter(skipped_row.reason for skipped_row in skipped).most_common()
    parts: list[tuple[str, str, Iterable[Sequence[str]]]] = [
        (_HEAD + _HELD_OUT, " | ".join(["source | clock | all | left out", *sizes]), by_size),
        ("", " | ".join(["source", *collectives]), by_collective),
        (_RATIOS, "first | second | sizes | pairs | ratio | range", map(_ratio_cells, find_disagreements(rows))),
        (
            _FLOOR,
            "link | left out | other | number | same | factor | raw | without factor | model",
            map(_floor_cells, collective_floors(rows)),
        ),
        (
            _FIGURES.format(host=fits.host_time * 1e6),
            "link | latency | launch | bandwidth | of the data sheet | rows | error | sources",
            map(_link_cells, fits.links.values()),
        ),
        (_LIBRARIES, "link | LL | LL128 | own | in switches | launch there", _library_rows(fits)),
        (
            "\n## Rows that are not used\n",
            "rows | reason",
            ((str(count), reason) for reason, count in reasons),
        ),
    ]
    return "".join(text + _format_table(head.split(" | "), table) for text, head, table in parts)


def _format_error(error: LinkError | None) -> str:
    return "-" if error is None else f"{error.mean:.1%} ({error.median:.1%})"


def _ratio_cells(disagreement: Disagreement) -> list[str]:
    *names, rows, ratio, low, high = disagreement
    return [*names, str(rows), f"{ratio:.2f}", f"{low:.2f} - {high:.2f}"]


def _floor_cells(floor: NoiseFloor) -> list[str]:
    names = [floor.hardware, floor.predicted_publisher, floor.reference_publisher]
    counts = [str(floor.num_pairs), str(floor.num_same_sizes), f"{floor.factor:.2f}"]
    errors = (floor.raw_error, floor.scaled_error, floor.model_error)
    return [*names, *counts, *("-" if error is None else f"{error:.1%}" for error in errors)]


def _link_cells(fit: LinkFit) -> list[str]:
    technology = TECHNOLOGIES[fit.technology]
    link = fit.figures.nic if technology.inside else fit.figures.link
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


def _library_rows(fits: LinkFits) -> Iterable[list[str]]:
    for name, fit in fits.links.items():
        if TECHNOLOGIES[name].inside is None:
            library = fit.figures.library
            protocols = [f"{part.launch:.2f}, {part.step:.2f}, {part.payload:.2f}" for part in library.protocols]
            launch = f"{library.reduction_launch * 1e6:.0f} us"
            yield [name, *protocols, f"{library.own:.2f}", f"{library.reduction:.2f}", launch]


def _format_table(head: list[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)
