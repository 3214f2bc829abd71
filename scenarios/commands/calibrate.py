"""``meshwise calibrate``: this machine by measuring it; accelerators and links by published timings."""

from typing import Annotated, Any

import typer

from scenarios.commands.output import Json, Ticker, emit, note, table

Names = Annotated[list[str] | None, typer.Option("--accelerator", metavar="NAME", help="With --from: fit this one.")]
LeftOut = Annotated[
    list[str] | None,
    typer.Option("--leave-out", metavar="SOURCE", help="With --from: fit without a source, and predict it."),
]


def calibrate(
    out: Annotated[str | None, typer.Option(help="Write the cluster file (.yaml); with --from, a .json.")] = None,
    processes: Annotated[int, typer.Option(min=1, max=1024, help="Processes that stand for devices.")] = 2,
    seconds: Annotated[float, typer.Option(min=1, help="Time to spend, about.")] = 30.0,
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
    from scenarios.link_calibration import has_collectives

    if rows is None:
        _refuse(accelerator=accelerator, leave_out=leave_out, report=report)
        _measure(out, processes, seconds, as_json)
    elif has_collectives(rows):
        if accelerator is not None:
            raise ValueError("--accelerator goes with rows of kernels, met rows of collectives")
        _fit_links(rows, leave_out or [], out, report, as_json)
    else:
        _fit(rows, accelerator or [], leave_out or [], out, report, as_json)


def _refuse(**given: Any) -> None:
    named = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None]
    if named:
        raise ValueError(f"{', '.join(named)} goes with --from ROWS.jsonl, met no --from")


def _measure(out: str | None, processes: int, seconds: float, as_json: bool) -> None:
    from executor.calibrate import calibrate as measure
    from scenarios.cluster_file import cluster_document, write_cluster
    from scenarios.files import check_output
    from scenarios.yaml_text import dump

    check_output(out, (".yaml", ".yml"))
    ticker = Ticker()
    cluster = measure(processes=processes, seconds=seconds, progress=lambda *words: ticker(str(words[0])))
    ticker.done()
    if out is not None:
        write_cluster(cluster, out, "Measured on this machine by `meshwise calibrate`.")
    if as_json:
        emit(cluster_document(cluster))
    elif out is None:
        print(dump(cluster_document(cluster)), end="")
    else:
        print(f"{out} is written; name it in a scenario as `cluster: {{file: {out}}}`")


def _fit(path: str, names: list[str], left_out: list[str], out: str | None, report: str | None, as_json: bool) -> None:
    from scenarios.files import check_output, write
    from scenarios.kernel_calibration import fit_accelerators, read, to_json, to_markdown

    check_output(out, (".json",))
    check_output(report, (".md",))
    used, skipped = read(path)
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
        note(f"{len(used)} rows used, {len(skipped)} skipped; --json says why")


def _fit_links(path: str, left_out: list[str], out: str | None, report: str | None, as_json: bool) -> None:
    from scenarios.files import check_output, write
    from scenarios.link_calibration import HEAD, fit, lines, read
    from simulator.calibration.collective_report import report as page
    from simulator.calibration.collectives import dump

    check_output(out, (".json",))
    check_output(report, (".md",))
    used, skipped = read(path)
    fits, found = fit(used, left_out)
    if out is not None:
        write(out, dump(fits))
    if report is not None:
        write(report, page(used, skipped))
    if as_json:
        print(dump(fits), end="")
    else:
        table(HEAD, lines(found))
        note(f"{len(used)} rows used, {len(skipped)} skipped; --report lists why")


def _print(found: Any) -> None:
    from scenarios.kernel_calibration import HEAD, lines

    for each in found:
        print(f"{each.name}: sustained {each.calibration.sustained.factor:.3f} times a burst")
        table(HEAD, lines(each))
        print()
