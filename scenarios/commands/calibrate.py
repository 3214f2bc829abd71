"""``meshwise calibrate``: measure this machine, or fit it to measured steps, or parts to published timings."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwise.executor.calibration import device_calibration
from meshwise.executor.calibration.device_cluster import build_cluster, is_measured
from meshwise.scenarios.calibration.calibrate import calibrate as measure_cores
from meshwise.scenarios.calibration.published_timings import (
    KERNEL_HEAD,
    LINK_HEAD,
    fit_accelerators,
    fit_links_excluding,
    has_collectives,
    list_kernel_lines,
    list_link_lines,
    read_collectives,
    read_kernels,
    to_json,
    to_markdown,
)
from meshwise.scenarios.collectives.text_fit import find_cluster, fit_links_to_file
from meshwise.scenarios.commands.calibrate_runs import calibrate_to_runs
from meshwise.scenarios.commands.options import Json
from meshwise.scenarios.console import Ticker, emit, note, print_table
from meshwise.scenarios.files.reader import dump_yaml
from meshwise.scenarios.files.results import check_output, write
from meshwise.scenarios.inputs.cluster_document import build_cluster_document
from meshwise.scenarios.inputs.cluster_file import write_cluster
from meshwise.simulator.calibration.collective_report import report as page
from meshwise.simulator.calibration.link_fits import to_json_text as dump_links
from meshwise.simulator.units import format_count

if TYPE_CHECKING:
    from meshwise.simulator.machine.cluster import Cluster

Names = Annotated[list[str] | None, typer.Option("--accelerator", metavar="NAME", help="With --from: fit this one.")]
_FIRST = 2**16
LeftOut = Annotated[
    list[str] | None,
    typer.Option("--leave-out", metavar="SOURCE", help="With --from: fit without a source, and predict it."),
]


def calibrate(
    out: Annotated[
        str | None,
        typer.Option(
            help="Write the cluster file (.yaml), and on GPUs its rows beside it (.jsonl); with --from, a .json, "
            "or of rows that this command measured a .yaml."
        ),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Devices that communicate: 2 cores, or all GPUs.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Time to spend, about; training steps come on top.")] = 30.0,
    device: Annotated[
        str | None, typer.Option(metavar="cpu|cuda", help="What to measure; cuda where torch sees a GPU.")
    ] = None,
    rows: Annotated[
        str | None, typer.Option("--from", metavar="ROWS", help="Fit published timings of kernels or collectives.")
    ] = None,
    accelerator: Names = None,
    leave_out: LeftOut = None,
    runs: Annotated[
        str | None,
        typer.Option(metavar="RUNS", help="Fit a machine to a few measured steps: rows (.jsonl), or scenarios."),
    ] = None,
    suggest: Annotated[
        int | None, typer.Option(min=1, max=20, help="With --runs: plans to measure next, those that would tell most.")
    ] = None,
    report: Annotated[str | None, typer.Option(help="With --from: write the errors as a page (.md).")] = None,
    collectives: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Fit links to text of nccl-tests or rows of collectives; with --runs, before the rest."
        ),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option("--cluster", metavar="PRESET|FILE", help="With --collectives: the machine that was measured."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure this machine into a cluster file; or fit one to measured steps or collectives, or parts to timings."""
    options: dict[str, object] = {"--accelerator": accelerator, "--leave-out": leave_out, "--report": report}
    if runs is not None:
        others = {"--from": rows, "--processes": processes, "--device": device, "--cluster": machine} | options
        _check_alone("--runs", others)
        calibrate_to_runs(runs, collectives, suggest, out, as_json)
        return
    if suggest is not None:
        raise ValueError("--suggest goes with --runs RUNS.jsonl, met no --runs")
    stated_options = ", ".join(name for name, value in options.items() if value is not None)
    if machine is not None and collectives is None:
        raise ValueError("--cluster goes with --collectives FILE, met no --collectives")
    if collectives is not None:
        if stated_options or rows is not None:
            raise ValueError(f"--collectives goes with --cluster and --out, met {stated_options or '--from'}")
        _fit_collectives(collectives, machine, out, as_json)
    elif rows is None:
        if stated_options:
            raise ValueError(f"{stated_options} goes with --from ROWS.jsonl, met no --from")
        _measure(out, device, processes, seconds, as_json)
    elif out is not None and out.endswith((".yaml", ".yml")) and _has_measured_rows(rows):
        if stated_options:
            raise ValueError(f"{stated_options} goes with --out FITTED.json, met a cluster file")
        _to_cluster(rows, out, as_json)
    elif has_collectives(rows):
        if accelerator is not None:
            raise ValueError("--accelerator goes with rows of kernels, met rows of collectives")
        _fit_links(rows, leave_out or [], out, report, as_json)
    else:
        _fit_kernels(rows, accelerator or [], leave_out or [], out, report, as_json)


def _fit_collectives(path: str, machine: str | None, out: str | None, as_json: bool) -> None:
    check_output(out, (".yaml", ".yml"))
    fit = fit_links_to_file(path, None if machine is None else find_cluster(machine))
    note(fit.summary)
    comment = f"Links fitted by `meshwise calibrate` to {Path(path).name}; {fit.summary}."
    _show_cluster(fit.machine, out, as_json, comment)


def _check_alone(option: str, others: dict[str, object]) -> None:
    """Raise ``ValueError`` where one of the other options is stated."""
    names = ", ".join(name for name, value in others.items() if value is not None)
    if names:
        raise ValueError(f"{option} goes without {names}: it measures nothing on this machine, met both")


def _measure(out: str | None, device: str | None, processes: int | None, seconds: float, as_json: bool) -> None:
    check_output(out, (".yaml", ".yml"))
    kind = device_calibration.choose_device(device)
    ranks = device_calibration.choose_num_ranks(kind, processes)
    if kind == "cuda":
        _measure_gpus(out, ranks, seconds, as_json)
        return
    ticker = Ticker()
    cluster = measure_cores(processes=ranks, seconds=seconds, progress=lambda *words: ticker(str(words[0])))
    ticker.clear()
    _show_cluster(cluster, out, as_json, "Measured on this machine by `meshwise calibrate`.")


def _measure_gpus(out: str | None, ranks: int, seconds: float, as_json: bool) -> None:
    rows = Path(out).with_suffix(".jsonl") if out is not None else Path("calibration.jsonl")
    check_output(rows)
    ticker = Ticker()
    try:
        skipped = device_calibration.measure_devices(rows, "cuda", ranks, seconds, progress=ticker)
    finally:
        ticker.clear()
        note(device_calibration.describe_rows(rows))
    for line in skipped:
        note(f"left out: {line}")
    _to_cluster(str(rows), out, as_json)


def _has_measured_rows(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return is_measured(file.readline(_FIRST))
    except (OSError, ValueError):
        return False


def _to_cluster(rows: str, out: str | None, as_json: bool) -> None:
    check_output(out, (".yaml", ".yml"))
    read_kernels(rows)  # says of a line that is no row which one it is
    cluster = build_cluster(Path(rows).read_bytes().splitlines())
    _show_cluster(cluster, out, as_json, f"Fitted by `meshwise calibrate` to the rows of {Path(rows).name}.")


def _show_cluster(cluster: "Cluster", out: str | None, as_json: bool, comment: str) -> None:
    if out is not None:
        write_cluster(cluster, out, comment)
    if as_json:
        emit(build_cluster_document(cluster))
    elif out is None:
        print(dump_yaml(build_cluster_document(cluster)), end="")
    else:
        print(f"{out} is written; predict with it: meshwise simulate SCENARIO --cluster {shlex.quote(out)}")
        print(f"a scenario in the same folder names it as `cluster: {{file: {Path(out).name}}}`")


def _fit_kernels(
    path: str, names: list[str], excluded_sources: list[str], out: str | None, report: str | None, as_json: bool
) -> None:
    check_output(out, (".json",))
    check_output(report, (".md",))
    used_rows, skipped = read_kernels(path)
    ticker = Ticker()
    fits = fit_accelerators(used_rows, names, excluded_sources, ticker)
    ticker.clear()
    document = to_json(fits, skipped)
    if out is not None:
        write(out, document)
    if report is not None:
        write(report, to_markdown(fits, used_rows))
    if as_json:
        print(document, end="")
    else:
        for fit in fits:
            print(f"{fit.name}: sustained {fit.calibration.sustained.factor:.3f} times a burst")
            print_table(KERNEL_HEAD, list_kernel_lines(fit))
            print()
        note(f"{format_count(len(used_rows), 'row')} used, {len(skipped)} skipped; --json says why")


def _fit_links(path: str, excluded_sources: list[str], out: str | None, report: str | None, as_json: bool) -> None:
    check_output(out, (".json",))
    check_output(report, (".md",))
    used_rows, skipped = read_collectives(path)
    fits, link_errors = fit_links_excluding(used_rows, excluded_sources)
    if out is not None:
        write(out, dump_links(fits))
    if report is not None:
        write(report, page(used_rows, skipped))
    if as_json:
        print(dump_links(fits), end="")
    else:
        print_table(LINK_HEAD, list_link_lines(link_errors))
        note(f"{format_count(len(used_rows), 'row')} used, {len(skipped)} skipped; --report lists why")
