"""``meshwise execute`` and ``doctor``: this machine.

With ``--top K``: search, run the best plans, and learn the machine from them.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwise.executor.launch.processes import INTERRUPTED
from meshwise.executor.options import CONSTANT, KEPT_CHECKPOINTS, MAX_SEED, STEPS, TIMEOUT, LearningRate, RunOptions
from meshwise.scenarios.commands.options import ClusterFile, Json, PlanFile, ScenarioName, load_scenario
from meshwise.scenarios.commands.page import PageFile, check_page, write_page
from meshwise.scenarios.console import FAILED, NOTHING_FITS, Ticker, emit, note, show, table


def execute(
    scenario: ScenarioName,
    plan: PlanFile = None,
    cluster: ClusterFile = None,
    steps: Annotated[int, typer.Option(min=1, max=1_000_000, help="Training steps, in all.")] = STEPS,
    verify: Annotated[
        bool | None,
        typer.Option(
            "--verify/--no-verify",
            help="First compare the plan with one process, in fp64 on a scaled-down model; by default before runs of "
            "more than 5 steps. Where it differs the run does not start.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, max=MAX_SEED, help="Seed of the initial parameters and the order of the data.  [default: 0]"
        ),
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="Folder for the run, its metrics and checkpoints, the plan and pictures.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|FOLDER",
            help="UTF-8 text to train on, one token a byte.  [default: the documentation topics of Python]",
        ),
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(help="The largest learning rate.  [default: 0.001 of adamw, 0.02 of sgd]"),
    ] = None,
    warmup_steps: Annotated[int, typer.Option(help="Steps in which the learning rate rises linearly to it.")] = 0,
    decay_steps: Annotated[
        int | None,
        typer.Option(help="Step at which a cosine decay of the learning rate ends.  [default: no decay]"),
    ] = None,
    min_learning_rate: Annotated[float, typer.Option(help="What the decay ends at.")] = 0.0,
    checkpoint_every: Annotated[
        int,
        typer.Option(min=0, metavar="STEPS", help="Write a checkpoint after so many steps each, and after the last."),
    ] = 0,
    keep_checkpoints: Annotated[int, typer.Option(min=1, help="Newest checkpoints that stay.")] = KEPT_CHECKPOINTS,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from the newest good checkpoint in the folder of --out, under this or any other plan.",
        ),
    ] = False,
    module: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:FACTORY", help="The module that the graph was captured from."),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Processes on a host, one a rank: here all ranks; fewer with --rendezvous."),
    ] = None,
    rendezvous: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Do not run: print what each of several hosts runs; HOST is the first."),
    ] = None,
    collect: Annotated[
        bool, typer.Option("--collect", help="Do not run: read what the ranks of several hosts left in --out.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=1, max=1e6, help="Seconds that a silent rank is waited for.")] = TIMEOUT,
    device: Annotated[
        str, typer.Option(metavar="cpu|cuda", help="What ranks train on: cores (gloo), GPUs (NCCL).")
    ] = "cpu",
    top: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=64,
            help="Search and run the best plans, so many, instead of one; fit the machine to what they took, rank them "
            "again, and write the fitted cluster file into --out.",
        ),
    ] = None,
    report: PageFile = None,
    as_json: Json = False,
) -> None:
    """Run a plan for real on this machine and set measurement against prediction.

    A run with --checkpoint-every keeps its state in the folder of --out, and --resume goes on there: with the
    same --data, and with the seed and learning rate of the checkpoint where none is given. A checkpoint that is
    damaged is named, and the one before it taken.

    On several hosts, which share the folder --out: once with --rendezvous, then on every host what that prints, and in
    the end once with --collect.
    """
    from meshwise.executor.device import CPU, require_device
    from meshwise.scenarios.commands import hosts
    from meshwise.scenarios.files.results import folder
    from meshwise.scenarios.fitting import reason
    from meshwise.scenarios.interchange.targets import EXECUTE

    _check_folder(out, resume=resume, keeps=bool(resume or checkpoint_every))
    check_page(report)
    if report is not None and (top is not None or rendezvous is not None):
        raise ValueError("--report tells of one run, met it with --top or --rendezvous")
    rate = LearningRate(learning_rate, warmup_steps, decay_steps, min_learning_rate)
    options = RunOptions(
        steps=steps,
        verify=verify,
        seed=seed,
        timeout=timeout,
        device=device,
        data=data,
        learning_rate=rate if rate != CONSTANT else None,  # where nothing is said, that of the checkpoint
        checkpoint_every=checkpoint_every,
        keep=keep_checkpoints,
        resume=resume,
    )
    value = load_scenario(scenario, plan, cluster)
    if module is None:
        value.executable_spec()  # what cannot be run under any plan is told before a plan is asked for
    value = replace(value, problem=value.priced_for(EXECUTE))  # what runs is priced as what runs it
    if top is not None:
        _check_top({"--plan": plan, "--module": module, "--rendezvous": rendezvous, "--data": data})
        execute_top(value, top, RunOptions(steps, verify, seed, device=device), out=out, as_json=as_json)
        return
    spread = hosts.spread(value, processes, rendezvous, collect=collect, out=out, module=module)
    elsewhere = spread is not None or collect  # whose GPUs this host does not see
    require_device(device, 0 if elsewhere else value.chosen().mesh.num_ranks)
    if module is None and spread is None and not collect:
        value.check_executable()
    predicted = value.simulate()
    if not predicted.fits:
        note(reason(value.problem, predicted.plan))
        raise typer.Exit(NOTHING_FITS)
    if spread is not None and out is not None:
        hosts.prepare(value.jobs(options, folder(out), note), spread, as_json=as_json)
        return
    target = None if out is None else Path(out) if collect else folder(out)
    if collect and target is not None:
        run = hosts.read(value, target)
    else:
        ranks, cores = predicted.plan.mesh.num_ranks, os.cpu_count() or 1
        if ranks > cores and device == CPU:
            note(f"{ranks} ranks share {cores} cores: the prediction, for a core a rank, will be too fast")
        run = _run(value, options, target, module)
    _tell(value, predicted, run, target, report, as_json=as_json)
    if run.verification is not None and not run.verification.equal:  # of several hosts, whose run has begun
        note("the ranks did not compute what one process computes")
        raise typer.Exit(FAILED)


def _check_folder(out: str | None, *, resume: bool, keeps: bool) -> None:
    """Raise where a run that ``keeps`` checkpoints has no folder, or one that goes on finds none."""
    if keeps and out is None:
        raise ValueError("--checkpoint-every and --resume need a folder that stays: --out DIR")
    if resume and not Path(str(out)).is_dir():
        raise ValueError(f"{out}: resuming needs the folder of a run, met none")


def _check_top(options: dict[str, str | None]) -> None:
    """Raise where an option says what --top finds itself."""
    for option, given in options.items():
        if given is not None:
            raise ValueError(f"--top runs plans that it finds for the executor's own model, met {option} {given}")


def _what_is_left(target: Path | None) -> str:
    """Return what a run that was stopped has left in its folder."""
    from meshwise.executor.job import checkpoints_folder
    from meshwise.executor.launch.run import metrics_log
    from meshwise.executor.training.checkpoint import names

    if target is None or not metrics_log(target).exists():
        return "no steps of the run are left"
    newest = names(checkpoints_folder(target))[:1]
    checkpoint = f"; --resume goes on from {newest[0]}" if newest else "; no checkpoint was written"
    return f"the steps that were done are in {metrics_log(target)}{checkpoint}"


def _run(value: Any, options: RunOptions, target: Path | None, module: str | None) -> Any:
    """Return the run of a scenario, which the terminal shows as it goes on."""
    ticker = Ticker()
    try:
        return value.execute(options=options, folder=target, module=module, progress=follow(ticker), warn=note)
    except (KeyboardInterrupt, RuntimeError):
        ticker.done()
        note(_what_is_left(target))
        raise
    finally:
        ticker.done()


def follow(ticker: Ticker) -> Any:
    """Return a callback that shows how far a run is: step, loss and seconds."""
    return lambda step, loss, seconds: ticker(f"step {step}, loss {loss:.4f}, {seconds * 1000:.1f} ms")


def _tell(value: Any, predicted: Any, run: Any, target: Path | None, report: str | None, *, as_json: bool) -> None:
    """Write and print a run beside its prediction."""
    from meshwise.reports.difference import difference

    document = to_json(run, predicted)
    if target is not None:
        write_run(target, document, predicted, run)
    if report is not None:
        write_page(report, value, predicted, run=document, measured=run.timeline)
    if as_json:
        emit(document)
    else:
        _print(value.name, predicted, document)
        print_difference(difference(predicted.timeline, run.timeline), run.step_time)


def to_json(run: Any, predicted: Any) -> dict[str, Any]:
    """Return a run with its prediction as JSON-ready data."""
    from meshwise.reports.difference import difference

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


def print_difference(found: Any, timed: float) -> None:
    """Print which operations the prediction missed and what they cost the step."""
    from meshwise.reports.difference import HEAD
    from meshwise.simulator.units import format_time

    rows = found.lines()
    if rows:
        print(f"\nwhat leads from {format_time(found.predicted)} predicted to {format_time(found.measured)} measured")
        table(HEAD, rows)
    note(f"operations were measured under the profiler; steps without it took {format_time(timed)}")


def write_run(target: Path, document: dict[str, Any], predicted: Any, run: Any) -> None:
    """Write result, plan, what the prediction missed, and the picture of prediction over measurement into a folder."""
    from meshwise.reports.pictures.timeline import draw_comparison
    from meshwise.scenarios.files.results import write

    write(target / "result.json", json.dumps(document, indent=2) + "\n")
    write(target / "difference.json", json.dumps(document["difference"], indent=2) + "\n")
    write(target / "plan.json", json.dumps(predicted.plan.to_json(), indent=2) + "\n")
    draw_comparison(predicted.timeline, run.timeline, target / "comparison.png", step_time=run.step_time)


def _print(name: str, predicted: Any, document: dict[str, Any]) -> None:
    from meshwise.simulator.units import format_size, format_time

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
    from meshwise.executor.launch.doctor import report

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


HEAD = ("plan", "predicted", "measured", "error", "predicted after", "error after")


def execute_top(scenario: Any, most: int, options: RunOptions, *, out: str | None, as_json: bool) -> None:
    """Run the best plans of a scenario, fit its machine to them, rank them again and say what changed."""
    from meshwise.scenarios.closed_loop import close_loop
    from meshwise.scenarios.files.results import folder, write
    from meshwise.scenarios.inputs.cluster_file import write_cluster

    target = folder(out) if out is not None else None
    ticker = Ticker()

    def told(words: str) -> None:
        ticker.done()
        note(words)

    def finished(number: int, plan: Any, run: Any) -> None:
        predicted = scenario.simulate(plan)
        error = f"{predicted.step_time / run.step_time - 1:+.1%}"
        told(f"  {run.step_time * 1e3:.1f} ms a step, {predicted.step_time * 1e3:.1f} ms predicted ({error})")
        if target is not None:
            write_run(folder(target / f"plan-{number}"), to_json(run, predicted), predicted, run)

    loop = close_loop(scenario, most, options, folder=target, note=told, progress=follow(ticker), finished=finished)
    ticker.done()
    document = loop.to_json() | {"cluster": str(target / "cluster.yaml") if target is not None else None}
    if target is not None:
        write_cluster(loop.refit.cluster, target / "cluster.yaml", _comment(loop))
        write(target / "loop.json", json.dumps(document, indent=2) + "\n")
        if loop.best is not None:
            write(target / "plan.json", json.dumps(loop.best.to_json(), indent=2) + "\n")
    if as_json:
        emit(document)
    else:
        _print_loop(loop, document, target)
    if loop.interrupted:
        raise typer.Exit(INTERRUPTED)


def _comment(loop: Any) -> str:
    return f"Fitted by `meshwise execute --top` to the steps of {len(loop.rows)} plans that ran on this machine."


def _print_loop(loop: Any, document: dict[str, Any], target: Path | None) -> None:
    from meshwise.simulator.units import format_time

    table(
        HEAD,
        [
            (
                row.plan.describe(),
                format_time(row.before),
                format_time(row.measured),
                f"{row.before / row.measured - 1:+.1%}",
                format_time(row.after) if row.after is not None else "-",
                f"{row.after / row.measured - 1:+.1%}" if row.after is not None else "-",
            )
            for row in loop.rows
        ],
    )
    print()
    after = document["mean_error_after"]
    figures = {**document["device"], **document["collectives"]}
    show(
        [
            ("mean error before", f"{document['mean_error_before']:.1%}"),
            ("mean error after", f"{after:.1%}, each plan from the others" if after is not None else "needs two plans"),
            ("order of plans", f"Kendall's tau {document['tau_before']:.2f} before, {document['tau_after']:.2f} after"),
            ("time now over before", ", ".join(f"{name} {factor:.2f}" for name, factor in figures.items())),
            ("ran fastest", document["fastest"]),
            *([("best on the fitted machine", document["best"])] if loop.best is not None else []),
            *([("fitted machine", f"{target / 'cluster.yaml'}; give it to --cluster")] if target is not None else []),
        ]
    )
