"""``meshwise calibrate``: measure this machine, or fit accelerators and links to published timings."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwise.executor.calibration import device_calibration
from meshwise.executor.calibration.device_cluster import cluster_of, is_measured
from meshwise.scenarios.calibration.calibrate import calibrate as measure_cores
from meshwise.scenarios.calibration.published_timings import (
    KERNEL_HEAD,
    LINK_HEAD,
    fit_accelerators,
    fit_links_without,
    has_collectives,
    kernel_lines,
    link_lines,
    read_collectives,
    read_kernels,
    to_json,
    to_markdown,
)
from meshwise.scenarios.commands.options import Json
from meshwise.scenarios.console import Ticker, emit, note, table
from meshwise.scenarios.files.reader import dump
from meshwise.scenarios.files.results import check_output, write
from meshwise.scenarios.inputs.cluster_file import cluster_document, write_cluster
from meshwise.simulator.calibration.collective_report import report as page
from meshwise.simulator.calibration.link_fits import dump as dump_links
from meshwise.simulator.units import format_count

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
        str | None,
        typer.Option("--from", metavar="ROWS", help="Fit published timings of kernels or collectives."),
    ] = None,
    accelerator: Names = None,
    leave_out: LeftOut = None,
    report: Annotated[str | None, typer.Option(help="With --from: write the errors as a page (.md).")] = None,
    as_json: Json = False,
) -> None:
    """Measure this machine into a cluster file; or fit accelerators or links to published timings."""
    if rows is None:
        _refuse(
            "goes with --from ROWS.jsonl, met no --from", accelerator=accelerator, leave_out=leave_out, report=report
        )
        _measure(out, device, processes, seconds, as_json)
    elif out is not None and out.endswith((".yaml", ".yml")) and _are_measured(rows):
        given = {"accelerator": accelerator, "leave_out": leave_out, "report": report}
        _refuse("goes with --out FITTED.json, met a cluster file", **given)
        _to_cluster(rows, out, as_json)
    elif has_collectives(rows):
        if accelerator is not None:
            raise ValueError("--accelerator goes with rows of kernels, met rows of collectives")
        _fit_links(rows, leave_out or [], out, report, as_json)
    else:
        _fit(rows, accelerator or [], leave_out or [], out, report, as_json)


def _refuse(why: str, **given: Any) -> None:
    named = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None]
    if named:
        raise ValueError(f"{', '.join(named)} {why}")


def _measure(out: str | None, device: str | None, processes: int | None, seconds: float, as_json: bool) -> None:
    check_output(out, (".yaml", ".yml"))
    kind = device_calibration.chosen_device(device)
    ranks = device_calibration.chosen_ranks(kind, processes)
    if kind == "cuda":
        _measure_gpus(out, ranks, seconds, as_json)
    else:
        _measure_cores(out, ranks, seconds, as_json)


def _measure_cores(out: str | None, ranks: int, seconds: float, as_json: bool) -> None:
    ticker = Ticker()
    cluster = measure_cores(processes=ranks, seconds=seconds, progress=lambda *words: ticker(str(words[0])))
    ticker.done()
    _show(cluster, out, as_json, "Measured on this machine by `meshwise calibrate`.")


def _measure_gpus(out: str | None, ranks: int, seconds: float, as_json: bool) -> None:
    rows = Path(out).with_suffix(".jsonl") if out is not None else Path("calibration.jsonl")
    check_output(rows)
    ticker = Ticker()
    try:
        skipped = device_calibration.measure(rows, "cuda", ranks, seconds, progress=ticker)
    finally:
        ticker.done()
        note(device_calibration.kept(rows))
    for line in skipped:
        note(f"left out: {line}")
    _to_cluster(str(rows), out, as_json)


def _are_measured(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return is_measured(file.readline(_FIRST))
    except (OSError, ValueError):
        return False


def _to_cluster(rows: str, out: str | None, as_json: bool) -> None:
    check_output(out, (".yaml", ".yml"))
    read_kernels(rows)  # says of a line that is no row which one it is
    cluster = cluster_of(Path(rows).read_bytes().splitlines())
    _show(cluster, out, as_json, f"Fitted by `meshwise calibrate` to the rows of {Path(rows).name}.")


def _show(cluster: Any, out: str | None, as_json: bool, comment: str) -> None:
    if out is not None:
        write_cluster(cluster, out, comment)
    if as_json:
        emit(cluster_document(cluster))
    elif out is None:
        print(dump(cluster_document(cluster)), end="")
    else:
        print(f"{out} is written; predict with it: meshwise simulate SCENARIO --cluster {shlex.quote(out)}")
        print(f"a scenario in the same folder names it as `cluster: {{file: {Path(out).name}}}`")


def _fit(path: str, names: list[str], left_out: list[str], out: str | None, report: str | None, as_json: bool) -> None:
    check_output(out, (".json",))
    check_output(report, (".md",))
    used, skipped = read_kernels(path)
    ticker = Ticker()
    found = fit_accelerators(used, names, left_out, ticker)
    ticker.done()
    document = to_json(found, skipped)
    if out is not None:
        write(out, document)
    if report is not None:
        write(report, to_markdown(found, used))
    if as_json:
        print(document, end="")
    else:
        _print(found)
        note(f"{format_count(len(used), 'row')} used, {len(skipped)} skipped; --json says why")


def _fit_links(path: str, left_out: list[str], out: str | None, report: str | None, as_json: bool) -> None:
    check_output(out, (".json",))
    check_output(report, (".md",))
    used, skipped = read_collectives(path)
    fits, found = fit_links_without(used, left_out)
    if out is not None:
        write(out, dump_links(fits))
    if report is not None:
        write(report, page(used, skipped))
    if as_json:
        print(dump_links(fits), end="")
    else:
        table(LINK_HEAD, link_lines(found))
        note(f"{format_count(len(used), 'row')} used, {len(skipped)} skipped; --report lists why")


def _print(found: Any) -> None:
    for each in found:
        print(f"{each.name}: sustained {each.calibration.sustained.factor:.3f} times a burst")
        table(KERNEL_HEAD, kernel_lines(each))
        print()
