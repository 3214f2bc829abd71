"""A run beside its prediction: printed, written into a folder, and put into pages."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwise.executor.launch.run import Run
from meshwise.reports.difference import HEAD, Difference, difference
from meshwise.reports.pictures.timeline import draw_comparison
from meshwise.scenarios.commands.page import write_page
from meshwise.scenarios.console import Ticker, emit, note, print_rows, print_table
from meshwise.scenarios.files.results import write
from meshwise.scenarios.scenario import Scenario
from meshwise.scenarios.simulation import Simulation
from meshwise.simulator.units import format_size, format_time


def follow(ticker: Ticker) -> Callable[[int, float, float], None]:
    """Return a callback that shows the progress of a run: step, loss and seconds of the step."""
    return lambda step, loss, seconds: ticker(f"step {step}, loss {loss:.4f}, {seconds * 1000:.1f} ms")


def tell_run(
    value: Scenario, predicted: Simulation, run: Run, target: Path | None, report: str | None, *, as_json: bool
) -> None:
    """Write and print a run beside its prediction."""
    document = to_json(run, predicted)
    if target is not None:
        write_run(target, document, predicted, run)
    if report is not None:
        write_page(report, value, predicted, run=document, measured=run.timeline)
    if as_json:
        emit(document)
    else:
        _print_run(value.name, predicted, document)
        print_difference(difference(predicted.timeline, run.timeline), run.step_time)


def to_json(run: Run, predicted: Simulation) -> dict[str, Any]:
    """Return a run with its prediction as JSON-ready data."""
    check = run.verification
    fields = ("loss_error", "gradient_error", "parameter_error", "reference", "equal")
    return {
        "steps": run.steps,
        "first_step": run.first_step,
        "loss": list(run.losses),
        "step_time": run.step_time,
        "predicted_step_time": predicted.step_time,
        "peak_memory": run.peak_memory,
        "predicted_peak_memory": predicted.peak_memory,
        "verify": {name: getattr(check, name) for name in fields} if check is not None else None,
        "difference": difference(predicted.timeline, run.timeline).to_json(),
    }


def print_difference(step_difference: Difference, step_time: float) -> None:
    """Print which operations were predicted wrongly, and what they cost the step."""
    rows = step_difference.lines()
    if rows:
        predicted, measured = format_time(step_difference.predicted), format_time(step_difference.measured)
        print(f"\nwhat leads from {predicted} predicted to {measured} measured")
        print_table(HEAD, rows)
    note(f"operations were measured under the profiler; steps without it took {format_time(step_time)}")


def write_run(target: Path, document: dict[str, Any], predicted: Simulation, run: Run) -> None:
    """Write result, difference from the prediction, plan and a picture of both into a folder."""
    write(target / "result.json", json.dumps(document, indent=2) + "\n")
    write(target / "difference.json", json.dumps(document["difference"], indent=2) + "\n")
    write(target / "plan.json", json.dumps(predicted.plan.to_json(), indent=2) + "\n")
    draw_comparison(predicted.timeline, run.timeline, target / "comparison.png", step_time=run.step_time)


def _print_run(name: str, predicted: Simulation, document: dict[str, Any]) -> None:
    check = document["verify"]
    step = format_time(document["step_time"])
    peak = format_size(document["peak_memory"])
    print_rows(
        [
            ("scenario", name),
            ("plan", predicted.plan.describe()),
            ("loss", ", ".join(f"{loss:.4f}" for loss in document["loss"][:10])),
            ("step time", f"{step}, predicted {format_time(predicted.step_time)}"),
            ("peak memory", f"{peak}, predicted {format_size(predicted.peak_memory)}"),
            *([("verified", _describe_verdict(check))] if check else []),
        ]
    )


def _describe_verdict(check: dict[str, Any]) -> str:
    verdict = "equal to" if check["equal"] else "NOT equal to"
    errors = ", ".join(f"{word} {check[f'{word}_error']:.1e}" for word in ("loss", "gradient", "parameter"))
    return f"{verdict} {check['reference']} (largest difference: {errors})"
