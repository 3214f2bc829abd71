"""A page on the errors of predictions: by source, size and technique, with intervals and what was fitted to what.

Run ``python -m tests.studies.accuracy_page ROWS.jsonl FOLDER`` to write ``README.md`` and its pictures
into a folder; the project's own is ``reports/accuracy``. The pictures show every run, the errors by class, and the
intervals.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import exp
from pathlib import Path
from statistics import fmean
from typing import Any

from meshwise.reports.document import Section, to_markdown
from meshwise.scenarios.console import BAD_INPUT, Ticker, note
from meshwise.scenarios.files.results import make_folder, write
from meshwise.scenarios.intervals import Category
from meshwise.scenarios.published.accuracy import (
    TECHNIQUES,
    Prediction,
    draw_pictures,
    load_runs,
    predict_all,
    select_split,
    size_classes,
    summarize,
)
from meshwise.simulator.catalog import accelerator
from meshwise.strategies.plan.framework import ENTRIES

from .interval_calibration import (
    COVERAGE,
    Coverage,
    HeldOutRun,
    fit_figures,
    group_coverage,
    leave_out,
    measure_coverage,
    network_of,
    select_judged,
    source_of,
)
from .interval_picture import IntervalRow, draw_intervals

TITLE = "Predicted against measured"
Table = tuple[tuple[str, ...], ...]

KORTHIKANTI, SC21 = "korthikanti_tab5", "megatron_sc21"
RIVALS = (
    ("Calculon", 0.045, 0.115, 0.102, 0.178),
    ("SimuMax", 0.054, 0.100, 0.066, 0.168),
    ("llm-analysis", 0.44, 1.89, 0.46, 1.37),
    ("closed form with 10 parameters, fitted to these rows", 0.031, 0.056, 0.028, 0.062),
)
"""Mean and largest error of public tools, and of a fit, on table 5 of Korthikanti et al. 2022 and on table 1 of
Narayanan et al. 2021, measured on the same rows in 2026."""

_CATEGORIES = {
    Category.STATED: "kernels of the accelerator, or of its nearest relative, were timed; the row states the plan",
    Category.OPEN: "the same, but the row states no recompute or microbatch: the first that fits is taken",
    Category.UNTIMED: "no kernel of the accelerator was timed: TPU, Ascend, AMD, Gaudi, Trainium",
}


def format_page(predictions: Sequence[Prediction]) -> str:
    """Return the page as Markdown; the pictures of `draw_pictures` and ``intervals.png`` lie beside it.

    Raises
    ------
    ValueError
        Where fewer than two sources have measured step times, or none has measured memory.
    """
    return to_markdown(TITLE, tuple(_build_sections(predictions)))


def _build_sections(predictions: Sequence[Prediction]) -> Iterator[Section]:
    result = summarize(predictions)
    yield _build_introduction(result)
    yield Section(
        "By who measured",
        (
            "An error is predicted over measured step time, minus 1. Interval: how many runs the 90 % intervals hold "
            "that are fitted to all sources, this one too; regret and tau are means over groups of plans.",
        ),
        _build_source_table(result),
        "error-by-source.png",
        "Error of every run, by who measured it",
    )
    yield Section("Every run", image="predicted-measured.png", caption="Predicted against measured step time")
    yield from _build_intervals(predictions)
    yield _build_memory(predictions, result)
    yield _build_orders(result)
    yield _build_classes(
        "By technique", "technique", {TECHNIQUES.get(n, n): e for n, e in result["techniques"].items()}
    )
    sizes = {name: result["devices"][name] for name in size_classes() if name in result["devices"]}
    yield _build_classes("By number of devices", "devices", sizes)
    yield from _list_calibrated(result)
    if {KORTHIKANTI, SC21} <= set(result["sources"]):
        yield _build_rivals(result["sources"])
    yield _build_skipped(result)


def _build_introduction(result: Mapping[str, Any]) -> Section:
    all_sources = result["all"]
    error = all_sources["step_time"]
    return Section(
        "What this is",
        (
            f"{all_sources['rows']} published training runs of {len(result['sources'])} sources, of which "
            f"{all_sources['predicted']} are predicted: mean error {_format_percent(error['mape'])}, median "
            f"{_format_percent(error['median'])}, largest {_format_percent(error['max'])}, "
            f"bias {_format_signed(error['bias'])}. Written by python -m tests.studies.accuracy_page.",
            "How far this can be trusted: only parameters are held out, structure is not. These rows were looked at "
            "while the model was built: what is modelled, and how words of a framework are read, was chosen with "
            "their errors in view. Runs of a publisher, framework or accelerator that is not here can be further off "
            "than the table says; publishers.md in this folder says how far, by runs that had no part.",
        ),
    )


def _build_source_table(result: Mapping[str, Any]) -> Table:
    head = ("source", "rows", "predicted", "skipped", "mean", "median", "largest", "bias", "interval", "regret", "tau")
    orders = _average_orders(result["groups"])
    rows = [
        _build_source_line(name, row, orders.get(name))
        for name, row in (*result["sources"].items(), ("all", result["all"]))
    ]
    return (head, *rows)


def _build_source_line(
    name: str, row: Mapping[str, Any], order: tuple[int, float, float, float] | None
) -> tuple[str, ...]:
    counts = (row["rows"], row["predicted"], len(row["skipped"]))
    error, inside = row["step_time"], row["step_time_interval"]["inside"]
    ordered = (_format_percent(order[1]), f"{order[3]:.2f}") if order else ("-", "-")
    return (
        name,
        *map(str, counts),
        *_format_errors(error),
        "-" if inside is None else _format_percent(inside),
        *ordered,
    )


def _format_errors(error: Mapping[str, Any]) -> tuple[str, ...]:
    if not error["count"]:
        return ("-",) * 4
    return (*(_format_percent(error[name]) for name in ("mape", "median", "max")), _format_signed(error["bias"]))


def _format_percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


def _format_signed(fraction: float) -> str:
    return f"{100 * fraction:+.1f} %"


def _average_orders(groups: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, float, float, float]]:
    """Return number of groups, mean and largest regret, and mean tau, by source and for ``all``."""
    members: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for group in groups:
        members[group["source"]].append(group)
        members["all"].append(group)
    return {
        name: (
            len(orders),
            fmean(source_order["regret"] for source_order in orders),
            max(source_order["regret"] for source_order in orders),
            fmean(source_order["tau"] for source_order in orders),
        )
        for name, orders in members.items()
    }


def _build_intervals(predictions: Sequence[Prediction]) -> Iterator[Section]:
    figures = fit_figures(predictions, "")
    fitted, ends = figures["step_time"], figures["step_time_ends"]
    yield Section(
        "Risk that a step takes longer",
        (
            "Widths from which the risk of a slower step is computed, from the errors above: as far to both sides in "
            "logarithms as the 90 % quantile of the errors of like runs, where every source counts the same however "
            "many rows it has (split conformal prediction; tests/studies/interval_calibration.py has the method and "
            "its papers). What is like is known before a run is measured:",
            "The interval that simulate prints has an end of its own to each side, at which publishers left out have "
            f"90 % in the mean: {_describe_ends(ends['known'])} of the prediction where framework and kernels are "
            f"known, {_describe_ends(ends['unknown'])} where not. publishers.md in this folder says how many runs of "
            "each publisher left out lie inside.",
        ),
        (
            ("category", "what is known", "rows", "sources", "interval"),
            *(
                (name, _CATEGORIES[Category(name)], str(fit["rows"]), str(len(fit["sources"])), _describe_interval(fit))
                for name, fit in fitted.items()
            ),
        ),
    )
    sources, networks = leave_out(predictions, source_of), leave_out(predictions, network_of)
    yield Section(
        "Widths for runs that were left out",
        (
            "Each publisher is judged by widths fitted without it, then each network (by its sizes) by widths "
            "fitted without it. Width: the upper end over the prediction, the median of the source.",
            _describe_outside(group_coverage(sources, "source")),
        ),
        _build_left_out_table(sources, networks),
        "intervals.png",
        "Measured over predicted within widths that were fitted without the source",
    )


def _describe_ends(fit: Mapping[str, Any]) -> str:
    return f"x {exp(fit['low']):.2f} to {exp(fit['high']):.2f}"


def _describe_interval(fit: Mapping[str, Any]) -> str:
    factor = exp(fit["half_width"])
    return f"x {1 / factor:.2f} to {factor:.2f}"


def _describe_outside(coverages: Mapping[str, Coverage]) -> str:
    low = [
        f"{name} ({_format_percent(coverage_of_source.inside)})"
        for name, coverage_of_source in coverages.items()
        if coverage_of_source.inside < COVERAGE - 0.05
    ]
    return f"Sources whose runs the widths contain too seldom, below 85 %: {', '.join(low) or 'none'}."


def _build_left_out_table(sources: Sequence[HeldOutRun], networks: Sequence[HeldOutRun]) -> Table:
    by_name, others = group_coverage(sources, "source"), group_coverage(networks, "source")
    pairs = [(name, by_name[name], others[name]) for name in by_name]
    head = ("source", "runs", "source left out: inside", "width", "network left out: inside", "width")
    rows = [
        (
            name,
            str(by_sources.runs),
            *(
                cell
                for part in (by_sources, by_networks)
                for cell in (_format_percent(part.inside), f"{part.factor:.2f}")
            ),
        )
        for name, by_sources, by_networks in (*pairs, ("all", measure_coverage(sources), measure_coverage(networks)))
    ]
    return (head, *rows)


def _build_memory(predictions: Sequence[Prediction], result: Mapping[str, Any]) -> Section:
    memory_figures = fit_figures(predictions, "")
    error, ratio = result["all"]["memory"], memory_figures["reserved_over_allocated"]
    ends, both = memory_figures["peak_memory_ends"]["all"], ", ".join(ratio["sources"])
    return Section(
        "Peak memory",
        (
            f"{error['count']} runs state their peak: mean error {100 * error['mape']:.2f} %, largest "
            f"{100 * error['max']:.2f} %, each against the kind of peak that it states; memory.md in this folder has "
            f"every kind and source. The 90 % interval that simulate prints is {_describe_ends(ends)} of the "
            "prediction, for publishers left out.",
            f"Where runs state both ({both}), the allocator held {ratio['least']:.2f} to {ratio['largest']:.2f} times "
            f"what it gave to tensors (median {ratio['median']:.2f}). fits asks that what the allocator holds finds "
            "room with a probability of 95 %.",
        ),
    )


def _build_orders(result: Mapping[str, Any]) -> Section:
    head = ("source", "groups", "regret, mean", "regret, largest", "tau, mean")
    rows = [
        (name, str(count), _format_percent(mean), _format_percent(largest), f"{tau:.2f}")
        for name, (count, mean, largest, tau) in sorted(_average_orders(result["groups"]).items())
    ]
    words = (
        "Groups are at least 3 measured plans of one model, machine, batch and sequence. Regret: how much longer the "
        "plan that was predicted fastest took than the fastest. Tau: Kendall's, 1 where the order is right."
    )
    return Section("Order of plans", (words,), (head, *rows))


def _build_classes(heading: str, name: str, class_errors: Mapping[str, Mapping[str, Any]]) -> Section:
    rows = [(label, str(error["count"]), *_format_errors(error)) for label, error in class_errors.items()]
    head = (name, "rows", "mean", "median", "largest", "bias")
    return Section(heading, (), (head, *rows), f"error-by-{name}.png", f"Error {heading.lower()}")


def _list_calibrated(result: Mapping[str, Any]) -> Iterator[Section]:
    """Yield the sections on calibration: what kernels, links and training runs were fitted to."""
    machines: Mapping[str, Mapping[str, str]] = result["calibrated_on"]
    kernels = [(name, paths["matmul"]) for name, paths in machines.items() if "matmul" in paths]
    fitted = {text for paths in machines.values() for text in paths.values() if " fitted to " in text}
    links = [(text.split(":")[0], text.split(": ", 1)[1]) for text in sorted(fitted)]
    yield Section(
        "What was calibrated on what: kernels",
        ("Timings of single kernels, none of them of a training run; docs/kernel_accuracy.md has their errors.",),
        (("accelerator", "products"), *kernels),
    )
    yield Section(
        "What was calibrated on what: links",
        ("Timings of collectives, none of them of a training run; docs/collective_accuracy.md has their errors.",),
        (("link", "figures"), *links),
    )
    yield Section(
        "What was calibrated on what: training runs",
        (
            "Two figures are fitted to rows of this page. Hosts under Megatron launch an operator in "
            f"{ENTRIES['megatron_deepspeed'].defaults.launch * 1e6:.0f} us: 8 of the rows of vtrain_single, of every "
            "width and tensor degree one with a microbatch of 1 (strategies/plan/frameworks.json). Products on the "
            f"H100 and H200 take {accelerator('h100-80gb').sustained} times as long as in a burst: 5 rows of "
            "llmfoundry, drawn at random (simulator/catalog/accelerators.json, training_sustained). "
            "The rows drawn are in the tables; all others are held out of these figures.",
            "Publishers are not always held out: MooreThreads/SimuMax timed the kernels of simumax_b200 too, and "
            "vTrain the collectives of vtrain_single's machine. The intervals are fitted to all rows.",
        ),
    )


def _build_rivals(sources: Mapping[str, Mapping[str, Any]]) -> Section:
    own_errors = [
        sources[name]["step_time"][statistic] for name in (KORTHIKANTI, SC21) for statistic in ("mape", "max")
    ]
    head = ("", "Korthikanti table 5: mean", "largest", "SC21 table 1: mean", "largest")
    rows = [(name, *map(_format_percent, errors)) for name, *errors in (("meshwise", *own_errors), *RIVALS)]
    words = (
        "Public tools on the same rows. The closed form has seen the answers: its parameters are fitted to these rows. "
        "On the small models on one node of vtrain_single these tools are 28 to 57 % too fast."
    )
    return Section("Other simulators", (words,), (head, *rows))


def _build_skipped(result: Mapping[str, Any]) -> Section:
    rows = [
        (name, str(count), reason)
        for name, row in result["sources"].items()
        for reason, count in row["reasons"].items()
    ]
    return Section("Rows that are not predicted", () if rows else ("None.",), (("source", "rows", "reason"), *rows))


def draw_left_out(predictions: Sequence[Prediction], path: Path) -> None:
    """Draw every run on the interval fitted without the runs of its source."""
    held_out_runs = leave_out(predictions, source_of)
    classes: dict[str, list[IntervalRow]] = defaultdict(list)
    for row, held_out_run in zip(select_judged(predictions), held_out_runs, strict=True):
        if row.step_time and row.run.step_time:
            classes[held_out_run.source].append(IntervalRow(row.run.step_time / row.step_time, held_out_run.factor))
    total_coverage = measure_coverage(held_out_runs)
    facts = (
        "90 % widths around the predicted step time, each fitted without the publisher that is shown, contain "
        f"{_format_percent(total_coverage.inside)} of {total_coverage.runs} runs; orange: outside"
    )
    draw_intervals(
        {name: classes[name] for name in sorted(classes)},
        path,
        title="Widths of risk, publishers left out",
        facts=facts,
    )


def write_page(rows: str, place: str, progress: Callable[[str], None]) -> None:
    """Write the page and its pictures into the folder ``place``, from the runs in the file ``rows``."""
    target = make_folder(place)
    predictions = predict_all(
        select_split(load_runs(rows), judge=False),
        lambda num_done, num_runs: progress(f"{num_done} of {num_runs} runs"),
    )
    text = format_page(predictions)
    draw_pictures(predictions, target)
    draw_left_out(predictions, target / "intervals.png")
    write(target / "README.md", text)


def main(arguments: Sequence[str]) -> int:
    """Write the page into the folder of the command line; return the exit code."""
    if len(arguments) != 2:
        note("usage: python -m tests.studies.accuracy_page ROWS.jsonl FOLDER")
        return BAD_INPUT
    ticker = Ticker()
    try:
        rows, place = arguments
        write_page(rows, place, ticker)
    except ValueError as error:
        note(str(error))
        return BAD_INPUT
    finally:
        ticker.clear()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
