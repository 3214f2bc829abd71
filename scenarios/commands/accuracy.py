"""``meshwise accuracy``: predicted against measured over published runs."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwise.reports.pictures.accuracy import draw_accuracy
from meshwise.reports.tables import console, print_accuracy
from meshwise.scenarios.collectives.accuracy import (
    format_collectives_csv,
    predict_messages,
    summarize_collectives,
)
from meshwise.scenarios.collectives.rows import is_collective_file, read_messages
from meshwise.scenarios.commands.options import Json
from meshwise.scenarios.console import Ticker, emit, note, print_table
from meshwise.scenarios.files.results import check_output, make_folder, write
from meshwise.scenarios.inputs.cluster_file import load_cluster
from meshwise.scenarios.intervals import GUESSED, NOT_KNOWN, NOT_UNDERSTOOD
from meshwise.scenarios.machine_fit.run_fit import move_run
from meshwise.scenarios.published.accuracy import (
    Prediction,
    draw_pictures,
    list_points,
    load_runs,
    predict_all,
    select_split,
    summarize,
    to_csv,
)
from meshwise.scenarios.published.runs import Run
from meshwise.scenarios.published.vocabulary.publishers import Split, list_publishers
from meshwise.simulator.machine.factors import RunCalibration
from meshwise.simulator.units import format_count


def accuracy(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="Rows (.jsonl), scenarios with `measured`, or text of nccl-tests.")
    ],
    out: Annotated[str | None, typer.Option(help="Write one line a run, or a message of a collective (.csv).")] = None,
    picture: Annotated[str | None, typer.Option(help="Draw predicted over measured (.png, .svg).")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Predict each run with the factors that `calibrate --runs` wrote into this file."
        ),
    ] = None,
    plots: Annotated[str | None, typer.Option(help="Folder for pictures by source, size and technique (.png).")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse rows with words that are not understood.")] = False,
    judge: Annotated[
        bool, typer.Option("--judge", help="Predict the runs of publishers that are kept for the last judgement alone.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare predictions with measured runs or collectives; what cannot be predicted is listed with its reason."""
    check_output(out, (".csv",))
    if is_collective_file(path):
        if any(option is not None for option in (picture, plots, cluster)) or judge or strict:
            raise ValueError("--picture, --plots, --cluster, --judge and --strict go with runs, met collectives")
        _judge_collectives(path, out, as_json)
        return
    check_output(picture, (".png", ".svg"))
    place = make_folder(plots) if plots is not None else None
    all_runs = load_runs(path, strict=strict)
    runs = select_split(all_runs, judge=judge)
    if not runs:
        met = f"none of them in {len(all_runs)} runs" if judge else f"{len(all_runs)} runs of them alone"
        raise ValueError(f"{path}: runs of {_list_judges()} are predicted with --judge, and no others; met {met}")
    if len(runs) < len(all_runs) and not judge:
        note(f"{len(all_runs) - len(runs)} runs of {_list_judges()} are kept for --judge")
    if cluster is not None:
        calibration = _load_calibration(cluster)
        runs = tuple(move_run(run, calibration) for run in runs)
    ticker = Ticker()
    predictions = predict_all(runs, lambda num_done, num_runs: ticker(f"{num_done} of {num_runs} runs"))
    ticker.clear()
    result = summarize(predictions)
    if out is not None:
        write(out, to_csv(predictions))
    if picture is not None:
        draw_accuracy(list_points(predictions), Path(picture))
    if place is not None and not draw_pictures(predictions, place):
        note("no run has a predicted and a measured step time: no pictures")
    if as_json:
        emit(result)
    else:
        _print(predictions, result)


def _judge_collectives(path: str, out: str | None, as_json: bool) -> None:
    messages, skipped = read_messages(path)
    ticker = Ticker()
    predictions = predict_messages(messages, lambda num_done, count: ticker(f"{num_done} of {count} messages"))
    ticker.clear()
    result = summarize_collectives(predictions, skipped)
    if out is not None:
        write(out, format_collectives_csv(predictions))
    if as_json:
        emit(result)
        return
    rows = [
        (
            name,
            str(entry["count"]),
            *(f"{entry[key]:.1%}" for key in ("mape", "median")),
            f"{entry['bias']:+.1%}",
            f"{entry['inside']:.0%}",
        )
        for name, entry in {**result["sources"], **result["groups"]}.items()
        if entry["count"]
    ]
    print_table(("collectives", "messages", "mean error", "median", "bias", "in interval"), rows)
    for entry in result["assumptions"][:_SHOWN]:
        note(f"assumed for {entry['rows']}: {entry['assumption']}")
    for entry in result["skipped"][:_SHOWN]:
        note(f"skipped line {entry['line']}: {entry['reason']}")


_SHOWN = 10
"""Assumptions and skipped lines that are printed; --json and --out have all."""


def _list_judges() -> str:
    publishers = list_publishers().values()
    return ", ".join(sorted({publisher.name for publisher in publishers if publisher.split is Split.JUDGE}))


def _load_calibration(path: str) -> RunCalibration:
    calibration = load_cluster(path).calibration
    if calibration is None:
        raise ValueError(f"{path}: calibration: a file that `meshwise calibrate --runs` wrote has it, met none")
    return calibration


def print_doubts(runs: Iterable[Run]) -> None:
    """Note what of runs was not understood or known, and the figures that were guessed."""
    lines = Counter(line for run in runs for line in run.assumed)
    marks = NOT_UNDERSTOOD, NOT_KNOWN, GUESSED
    doubts = [(line, count) for line, count in lines.most_common() if any(mark in line for mark in marks)]
    for line, count in doubts[:_SHOWN]:
        note(f"in {format_count(count, 'run')}: {line}")
    if len(doubts) > _SHOWN:
        note(f"and {len(doubts) - _SHOWN} more of the kind")


def print_assumptions(runs: Iterable[Run]) -> None:
    """Note how much is assumed of runs, and where it is listed."""
    count = len({line for run in runs for line in run.assumed})
    if count:
        note(f"{format_count(count, 'assumption')} in all; --out and --json list them")


def _print(predictions: Sequence[Prediction], result: dict[str, Any]) -> None:
    rows = [
        (row.run.row_id, f"{row.step_time:.4g}", f"{row.run.step_time:.4g}", f"{row.error:+.1%}")
        for row in predictions
        if row.step_time and row.run.step_time
    ]
    print_table(("run", "predicted s", "measured s", "error"), rows)
    print()
    print_accuracy(console(), result["sources"] | {"all": result["all"]})
    for reason, count in result["all"]["reasons"].items():
        note(f"skipped {count}: {reason}")
    predicted_runs = [row.run for row in predictions if not row.skipped]
    print_doubts(predicted_runs)
    print_assumptions(predicted_runs)
