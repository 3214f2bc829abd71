"""``meshwise execute`` and ``doctor``: this machine."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from scenarios.commands.output import (
    NOTHING_FITS,
    ClusterFile,
    Json,
    ScenarioName,
    Ticker,
    emit,
    note,
    show,
    table,
)


def execute(
    scenario: ScenarioName,
    plan: Annotated[str | None, typer.Option(help="A plan file, instead of the scenario's own plan.")] = None,
    cluster: ClusterFile = None,
    steps: Annotated[int, typer.Option(min=1, max=1_000_000, help="Training steps.")] = 5,
    verify: Annotated[
        bool | None,
        typer.Option(
            "--verify/--no-verify",
            help="First compare the plan with one process, in fp64 on a scaled-down model; by default before runs of "
            "more than 5 steps. Where it differs the run does not start.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the initial parameters.")] = 0,
    out: Annotated[str | None, typer.Option(help="Folder for the run, the plan and pictures.")] = None,
    module: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:FACTORY", help="The module that the graph was captured from."),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=64,
            help="Search and run the best plans, so many, instead of one; fit the machine to what they took, rank them "
            "again, and write the fitted cluster file into --out.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a plan for real on this machine and set measurement against prediction."""
    from reports.difference import difference
    from scenarios.cluster_file import load_cluster
    from scenarios.commands.execute_top import execute_top
    from scenarios.files import folder
    from scenarios.loader import load
    from scenarios.nearest import reason

    value = load(scenario, plan)
    if cluster is not None:
        value = value.on(load_cluster(cluster))
    if top is not None:
        for given, name in ((plan, "--plan"), (module, "--module")):
            if given is not None:
                raise ValueError(f"--top runs plans that it finds for the executor's own model, met {name} {given}")
        execute_top(value, top, steps=steps, verify=verify, seed=seed, out=out, as_json=as_json)
        return
    if module is None:
        value.check_executable()
    predicted = value.simulate()
    if not predicted.fits:
        note(reason(predicted))
        raise typer.Exit(NOTHING_FITS)
    ranks, cores = predicted.plan.mesh.num_ranks, os.cpu_count() or 1
    if ranks > cores:
        note(f"{ranks} ranks share {cores} cores: the prediction, for a core a rank, will be too fast")
    target = folder(out) if out is not None else None
    ticker = Ticker()
    run = value.execute(steps=steps, verify=verify, folder=target, seed=seed, module=module, progress=follow(ticker))
    ticker.done()
    document = to_json(run, predicted)
    if target is not None:
        write_run(target, document, predicted, run)
    if as_json:
        emit(document)
    else:
        _print(value.name, predicted, document)
        print_difference(difference(predicted.timeline, run.timeline), run.step_time)


def follow(ticker: Ticker) -> Any:
    """Return a callback that shows how far a run is: step, loss and seconds."""
    return lambda step, loss, seconds: ticker(f"step {step}, loss {loss:.4f}, {seconds * 1000:.1f} ms")


def to_json(run: Any, predicted: Any) -> dict[str, Any]:
    """Return a run with its prediction as JSON-ready data."""
    from reports.difference import difference

    check = run.verification
    fields = ("loss_error", "gradient_error", "parameter_error", "reference", "equal")
    return {
        "steps": run.steps,
        "loss": list(run.losses),
        "step_time": run.step_time,
        "predicted_step_time": predicted.step_time,
        "peak_memory": run.peak_memory,
        "predicted_peak_memory": predicted.peak_memory,
        "verify": {name: getattr(check, name) for name in fields} if check is not None else None,
        "difference": difference(predicted.timeline, run.timeline).to_json(),
    }


def print_difference(found: Any, timed: float) -> None:
    """Print which operations the prediction missed and what they cost the step."""
    from reports.difference import HEAD
    from simulator.units import format_time

    rows = found.lines()
    if rows:
        print(f"\nwhat leads from {format_time(found.predicted)} predicted to {format_time(found.measured)} measured")
        table(HEAD, rows)
    note(f"operations were measured under the profiler; steps without it took {format_time(timed)}")


def write_run(target: Path, document: dict[str, Any], predicted: Any, run: Any) -> None:
    """Write result, plan, what the prediction missed, and the picture of prediction over measurement into a folder."""
    from reports.timeline import draw_comparison
    from scenarios.files import write

    write(target / "result.json", json.dumps(document, indent=2) + "\n")
    write(target / "difference.json", json.dumps(document["difference"], indent=2) + "\n")
    write(target / "plan.json", json.dumps(predicted.plan.to_json(), indent=2) + "\n")
    draw_comparison(predicted.timeline, run.timeline, target / "comparison.png", step_time=run.step_time)


def _print(name: str, predicted: Any, document: dict[str, Any]) -> None:
    from simulator.units import format_size, format_time

    check = document["verify"]
    step = format_time(document["step_time"])
    peak = format_size(document["peak_memory"])
    show(
        [
            ("scenario", name),
            ("plan", predicted.plan.describe()),
            ("loss", ", ".join(f"{loss:.4f}" for loss in document["loss"][:10])),
            ("step time", f"{step}, predicted {format_time(predicted.step_time)}"),
            ("peak memory", f"{peak}, predicted {format_size(predicted.peak_memory)}"),
            *([("verified", _verdict(check))] if check else []),
        ]
    )


def _verdict(check: dict[str, Any]) -> str:
    same = "equal to" if check["equal"] else "NOT equal to"
    errors = ", ".join(f"{word} {check[f'{word}_error']:.1e}" for word in ("loss", "gradient", "parameter"))
    return f"{same} {check['reference']} (largest difference: {errors})"


def doctor(as_json: Json = False) -> None:
    """Show versions, cores, GPUs, what is installed and what is missing."""
    from executor.doctor import report

    found = report()
    if as_json:
        emit(found)
    else:
        show((key, _text(value)) for key, value in found.items())


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_text(item) for item in value) or "none"
    return "missing" if value is None else str(value)
