"""``meshwise accuracy``: predicted against measured over published runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwise.reports.pictures.accuracy import draw_accuracy
from meshwise.reports.tables import console, print_accuracy
from meshwise.scenarios.commands.options import Json
from meshwise.scenarios.console import Ticker, emit, note, print_table
from meshwise.scenarios.files.results import check_output, make_folder, write
from meshwise.scenarios.inputs.cluster_file import load_cluster
from meshwise.scenarios.machine_fit.run_fit import move_run
from meshwise.scenarios.published.accuracy import (
    Prediction,
    draw_pictures,
    list_points,
    load_runs,
    predict_all,
    summarize,
    to_csv,
)
from meshwise.simulator.machine.factors import RunCalibration


def accuracy(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Rows (.jsonl), or scenarios with `measured`.")],
    out: Annotated[str | None, typer.Option(help="Write one line a run (.csv).")] = None,
    picture: Annotated[str | None, typer.Option(help="Draw predicted over measured (.png, .svg).")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Predict each run with the factors that `calibrate --runs` wrote into this file."
        ),
    ] = None,
    plots: Annotated[str | None, typer.Option(help="Folder for pictures by source, size and technique (.png).")] = None,
    as_json: Json = False,
) -> None:
    """Compare predictions with measured runs; a run that cannot be predicted is listed with its reason."""
    check_output(out, (".csv",))
    check_output(picture, (".png", ".svg"))
    place = make_folder(plots) if plots is not None else None
    runs = load_runs(path)
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


def _load_calibration(path: str) -> RunCalibration:
    calibration = load_cluster(path).calibration
    if calibration is None:
        raise ValueError(f"{path}: calibration: a file that `meshwise calibrate --runs` wrote has it, met none")
    return calibration


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
