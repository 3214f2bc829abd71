"""A Markdown page with the errors of the model of communication on published collectives.

It also states how far the sources are from each other.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence

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
from meshwise.simulator.calibration.noise import REPEATS, NoiseFloor, PublisherTimes, Sizes, measure_floor, pair_repeats
from meshwise.simulator.machine.topology import Link


def collective_floors(rows: Sequence[CollectiveRow]) -> tuple[NoiseFloor, ...]:
    """Return the distances of each source from every other on the same links, and from itself, beside the model's."""
    sources: dict[str, list[CollectiveRow]] = defaultdict(list)
    for row in rows:
        sources[row.source].append(row)
    times = {
        name: PublisherTimes((*_comparison_key(row), row.seconds) for row in source_rows)
        for name, source_rows in sources.items()
    }
    return tuple(
        noise_floor
        for name, source_rows in sources.items()
        for noise_floor in _source_floors(name, source_rows, rows, times)
    )


def _source_floors(
    name: str, source_rows: Sequence[CollectiveRow], rows: Sequence[CollectiveRow], times: Mapping[str, PublisherTimes]
) -> list[NoiseFloor]:
    deviation_values = relative_deviations(source_rows, fit_links(rows, (name,))).tolist()
    noise_floors = []
    for other_name, other_times in times.items():
        links = defaultdict(list)
        for row, error in zip(source_rows, deviation_values, strict=True):
            compared = (
                other_times.pair_time(*_comparison_key(row), row.seconds, row.seconds * (1.0 + error))
                if other_name != name
                else None
            )
            if compared is not None:
                links[str(find_technology(row))].append(compared)
        noise_floors += [
            measure_floor(link, "collectives", name, other_name, comparisons) for link, comparisons in links.items()
        ]
    repeated = defaultdict(list)
    for row in source_rows:
        repeated[str(find_technology(row))].append((*_comparison_key(row), row.seconds))
    repeats_by_link = {link: pair_repeats(comparisons) for link, comparisons in repeated.items()}
    return noise_floors + [
        measure_floor(link, "collectives", name, REPEATS, comparisons)
        for link, comparisons in repeats_by_link.items()
        if comparisons
    ]


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
`meshwise.simulator.machine.cluster.CommunicationLibrary`; the part of a port that collectives in switches reach
(NCCL's tuner has 0.85 for Hopper and 0.74 for Blackwell). NVLink 2 and 3 have no such switches: theirs are not used.
"""


def report(rows: Sequence[CollectiveRow], skipped: Sequence[Skipped]) -> str:
    """Return the page; all rows are fitted once, and once more without each source (half a minute)."""
    fits, held_out_errors = fit_links(rows), measure_held_out(rows)
    clocks = {row.source: row.timing for row in rows}
    fitted_errors = {(error.source, error.collective, error.size): error for error in measure_errors(rows, fits)}
    sizes = [name for name, _ in SIZE_RANGES]
    by_size = [
        [source, str(clocks[source]), _format_error(fitted_errors[source, "*", "*"])]
        + [_format_error(_find_error(held_out_errors, source, "*", size)) for size in ("*", *sizes)]
        for source in clocks
    ]
    collectives = sorted({row.collective for row in rows})
    by_collective = [
        [source, *(_format_error(_find_error(held_out_errors, source, collective, "*")) for collective in collectives)]
        for source in clocks
    ]
    return "".join(
        [
            _HEAD,
            _HELD_OUT,
            _format_table(["source", "clock", "all", "left out", *sizes], by_size),
            _format_table(["source", *collectives], by_collective),
            _RATIOS,
            _format_table(
                ["first", "second", "sizes", "pairs", "ratio", "range"], map(_ratio_cells, find_disagreements(rows))
            ),
            _FLOOR,
            _format_table(
                ["link", "left out", "other", "number", "same", "factor", "raw", "without factor", "model"],
                map(_floor_cells, collective_floors(rows)),
            ),
            _FIGURES.format(host=fits.host_time * 1e6),
            _format_table(
                ["link", "latency", "launch", "bandwidth", "of the data sheet", "rows", "error", "sources"],
                map(_link_cells, fits.links.values()),
            ),
            _LIBRARIES,
            _format_table(["link", "LL", "LL128", "own", "in switches", "launch there"], _library_rows(fits)),
            "\n## Rows that are not used\n",
            _format_table(
                ["rows", "reason"],
                [
                    [str(count), reason]
                    for reason, count in Counter(skipped_row.reason for skipped_row in skipped).most_common()
                ],
            ),
        ]
    )


def _find_error(candidates: Iterable[LinkError], *key: str) -> LinkError | None:
    return next(
        (candidate for candidate in candidates if (candidate.source, candidate.collective, candidate.size) == key), None
    )


def _format_error(error: LinkError | None) -> str:
    return "-" if error is None else f"{error.mean:.1%} ({error.median:.1%})"


def _ratio_cells(disagreement: Disagreement) -> list[str]:
    spread = f"{disagreement.min_ratio:.2f} - {disagreement.max_ratio:.2f}"
    return [
        disagreement.source,
        disagreement.other_source,
        disagreement.size,
        str(disagreement.rows),
        f"{disagreement.ratio:.2f}",
        spread,
    ]


def _floor_cells(noise_floor: NoiseFloor) -> list[str]:
    error_cells = [
        "-" if error is None else f"{error:.1%}"
        for error in (noise_floor.raw_error, noise_floor.scaled_error, noise_floor.model_error)
    ]
    counts = [str(noise_floor.num_pairs), str(noise_floor.num_same_sizes), f"{noise_floor.factor:.2f}"]
    return [
        noise_floor.hardware,
        noise_floor.predicted_publisher,
        noise_floor.reference_publisher,
        *counts,
        *error_cells,
    ]


def _link_cells(fit: LinkFit) -> list[str]:
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


def _library_rows(fits: LinkFits) -> Iterable[list[str]]:
    for name, fit in fits.links.items():
        library = fit.figures.library
        if TECHNOLOGIES[name].inside is None:
            protocols = [
                f"{protocol.launch:.2f}, {protocol.step:.2f}, {protocol.payload:.2f}" for protocol in library.protocols
            ]
            switch_cells = [
                f"{library.own:.2f}",
                f"{library.reduction:.2f}",
                f"{library.reduction_launch * 1e6:.0f} us",
            ]
            yield [name, *protocols, *switch_cells]


def _format_table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)
