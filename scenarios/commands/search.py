"""``meshwise search`` and ``meshwise compare``: the best plan found, and how algorithms get there."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scenarios.commands.output import Json, ScenarioName, Ticker, emit, note, show, table
from scenarios.commands.page import PageFile, check_page, write_page
from scenarios.exit_codes import INTERRUPTED, NOTHING_FITS

if TYPE_CHECKING:
    from concurrent.futures import Executor

NEGLIGIBLE = 1e-6
"""A gap that is nothing to people: solvers that compute in floating point leave as much."""

Budget = Annotated[int | None, typer.Option(min=1, help="Evaluations at most.")]
Seconds = Annotated[float | None, typer.Option(help="Wall time at most, in seconds.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Seed of algorithms that draw.")]


def search(
    scenario: ScenarioName,
    algorithm: Annotated[str | None, typer.Option(help="See `meshwise list algorithms`.")] = None,
    budget: Budget = None,
    seconds: Seconds = None,
    seed: Seed = None,
    out: Annotated[
        str | None, typer.Option(help="Write the best plan so far (.json), whenever it becomes better.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Keep every trial in this file, and go on from those that are in it."),
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes that evaluate plans; 0 for one a core.")] = 1,
    scheduler: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Evaluate plans on the Dask cluster at this address.")
    ] = None,
    robust: Annotated[
        float | None, typer.Option(help="Rank by this quantile of step time, out of memory taken for ever, as 0.95.")
    ] = None,
    out_of_memory: Annotated[float, typer.Option(help="Probability up to which --robust allows a plan.")] = 0.05,
    report: PageFile = None,
    as_json: Json = False,
) -> None:
    """Search for the fastest plan that fits. Ctrl-C ends the search and keeps the best so far."""
    from scenarios.files import check_output
    from scenarios.loader import load
    from scenarios.nothing_fits import nothing_fits_in
    from scenarios.robust_choice import check_robust, robust_choice

    check_output(out, (".json",))
    check_page(report)
    check_robust(robust, out_of_memory)
    value = load(scenario)
    value.search_settings.make_algorithm(algorithm, seed)  # a wrong name is an error before workers begin
    ticker = Ticker()
    follow, keep = _follow(ticker), _keep(out)

    def told(progress: Any) -> None:
        keep(progress.best)
        follow(progress)

    with _executor(workers, scheduler) as executor:
        result = value.search(
            algorithm, budget=budget, seconds=seconds, seed=seed, progress=told, resume=resume, executor=executor
        )
    ticker.done()
    keep(result.best)
    document, chosen = to_json(result), None
    if robust is not None and result.best is not None and not result.interrupted:
        found = robust_choice(value, robust, out_of_memory)
        document["robust"] = found.to_json()
        chosen = found.plan
        keep(replace(result.best, plan=chosen or result.best.plan))
    if result.best is None and not result.interrupted:
        document |= nothing_fits_in(value)
    if report is not None:
        _write_page(report, value, [result], chosen)
    if as_json:
        emit(document)
    elif result.best is not None:
        _print(value, result)
        _print_more("robust", document)
    if result.interrupted:
        if out is not None and result.best is not None:
            note(f"the best plan so far is in {out}")
        raise typer.Exit(INTERRUPTED)
    if result.best is None:
        note(_nothing_fits(value, result))
        _print_more("changes", document)
        raise typer.Exit(NOTHING_FITS)


@contextmanager
def _executor(workers: int, scheduler: str | None) -> "Iterator[Executor | None]":
    """Yield what evaluates plans: nothing for one worker, which is this process; what was begun is given up after."""
    if scheduler is not None:
        from distributed import Client

        try:
            client = Client(scheduler, timeout="10s")
        except (OSError, ValueError) as error:
            words = " ".join(str(error).split())
            raise ValueError(f"--scheduler: the address of a Dask scheduler, met {scheduler}: {words}") from None
        with client:
            yield client.get_executor()
    elif workers == 1:
        yield None
    else:
        from strategies.search import processes

        executor = processes(workers)
        try:
            yield executor
        finally:
            executor.give_up()


def _keep(out: str | None) -> Callable[[Any], None]:
    """Return what writes a best plan to ``out`` where it is a new one."""
    from scenarios.files import write

    kept: list[Any] = [None]

    def keep(best: Any) -> None:
        if out is not None and best is not kept[0]:
            write(out, json.dumps(best.plan.to_json(), indent=2) + "\n")
            kept[0] = best

    return keep


def _print_more(section: str, document: dict[str, Any]) -> None:
    """Print what is robust on stdout, and what would make a plan fit on stderr, where there is anything."""
    from reports.explanation import changes_lines, robust_lines

    if section == "robust" and section in document:
        print("\n".join(robust_lines(document[section])))
    if section == "changes":
        if document["lacking"]:
            note(document["lacking"]["words"])
        for line in changes_lines(document):
            note(line)


def _follow(ticker: Ticker) -> Any:
    from simulator.units import format_time

    def follow(progress: Any) -> None:
        words = [format_time(progress.best.evaluation.step_time) if progress.best else "none fits yet"]
        if progress.lower_bound is not None:
            words.append(f"bound {format_time(progress.lower_bound)}")
        if progress.gap is not None:
            words.append(f"gap {progress.gap:.1%}")
        left = f" ({progress.left:.0f} s left)" if progress.left is not None else ""
        seen = f"{progress.considered:,} plans, {progress.evaluations:,} simulated, {progress.elapsed:.1f} s{left}"
        ticker(f"best {', '.join(words)}; {seen}")

    return follow


def to_json(result: Any) -> dict[str, Any]:
    """Return a search result as JSON-ready data."""
    return {
        "algorithm": result.algorithm,
        "best": _trial(result.best),
        "nearest": _trial(result.nearest),
        "evaluations": result.evaluations,
        "lower_bound": result.lower_bound,
        "gap": result.gap,
        "certificate": _certificate(result.certificate),
        "wall_time": result.wall_time,
        "interrupted": result.interrupted,
        "history": [{"evaluations": n, "elapsed": elapsed, "best": best} for n, elapsed, best in result.history],
    }


def _certificate(certificate: Any) -> dict[str, Any] | None:
    if certificate is None:
        return None
    return {name: getattr(certificate, name) for name in ("gap", "memory_price", "among")}


def _trial(trial: Any) -> dict[str, Any] | None:
    if trial is None:
        return None
    fields = ("step_time", "peak_memory", "fits")
    evaluation = {name: getattr(trial.evaluation, name) for name in fields}
    return {"plan": trial.plan.to_json(), "evaluation": evaluation, "elapsed": trial.elapsed}


def _nothing_fits(value: Any, result: Any) -> str:
    from simulator.units import format_size

    device = value.problem.cluster.accelerator
    has = format_size(device.memory - device.reserved)
    if result.nearest is None:
        return "nothing fits: the search space is empty; the limits in search.space allow no legal plan"
    needs = format_size(result.nearest.evaluation.peak_memory)
    plan = result.nearest.plan.describe()
    return f"nothing fits: a device has {has}; the plan that needs the least, {needs}, is {plan}"


def _proof(gap: float | None) -> str:
    if gap is None:
        return "none known"
    return "proven optimal" if gap == 0 else f"{gap:.1%}"


def _proven(certificate: Any) -> str:
    """Return what is proven of sums of operators' costs, for people."""
    from simulator.units import Dimension, format_time, parse

    among = f" among {certificate.among}" if certificate.among else ""
    said = ["nothing proven"]
    if certificate.gap is not None:
        within = f"within {100 * certificate.gap:.2g} % of " if certificate.gap > NEGLIGIBLE else ""
        said = [f"proven {within}the least{among}"]
    if certificate.memory_price is not None:
        saved = certificate.memory_price * parse("1 GiB", Dimension.SIZE)
        said.append(f"1 GiB more a device saves {format_time(saved)} a step" if saved else "memory does not bind")
    return "; ".join(said)


def _print(value: Any, result: Any) -> None:
    from simulator.units import format_size, format_time

    best, certificate = result.best, result.certificate
    show(
        [
            ("scenario", value.name),
            ("algorithm", result.algorithm),
            ("best plan", best.plan.describe()),
            ("step time", format_time(best.evaluation.step_time)),
            ("peak memory", format_size(best.evaluation.peak_memory)),
            ("gap", _proof(result.gap)),
            *([("sum of operators' costs", _proven(certificate))] if certificate is not None else []),
            ("plans", f"{result.considered:,} considered, {result.evaluations:,} simulated"),
            ("wall time", format_time(result.wall_time)),
        ]
    )


def compare(
    scenario: ScenarioName,
    algorithms: Annotated[str, typer.Option(help="all, or names with commas between.")] = "all",
    budget: Budget = None,
    seconds: Seconds = None,
    seed: Seed = None,
    out: Annotated[str | None, typer.Option(help="Folder for table, results and picture.")] = None,
    report: PageFile = None,
    as_json: Json = False,
) -> None:
    """Run several algorithms on one problem: quality against evaluations and against time."""
    from scenarios.files import folder
    from scenarios.loader import load
    from strategies.search import installed

    check_page(report)
    value = load(scenario)
    names = list(installed()) if algorithms == "all" else [name.strip() for name in algorithms.split(",")]
    for name in names:
        value.search_settings.make_algorithm(name, seed)  # a wrong name is an error before the first search
    target = folder(out) if out is not None else None
    results = []
    for name in names:
        ticker = Ticker()
        results.append(value.search(name, budget=budget, seconds=seconds, seed=seed, progress=_follow(ticker)))
        ticker.done()
        if results[-1].interrupted:
            break
    if target is not None:
        _write_comparison(target, results)
    if report is not None:
        _write_page(report, value, results)
    if as_json:
        emit([to_json(result) for result in results])
    else:
        _print_comparison(results)
    if results[-1].interrupted:
        raise typer.Exit(INTERRUPTED)
    if all(result.best is None for result in results):
        note(_nothing_fits(value, results[0]))
        raise typer.Exit(NOTHING_FITS)


def _write_page(path: str, value: Any, results: list[Any], chosen: Any = None) -> None:
    """Write the report of a plan, of the fastest that any search found, with all searches; nothing where none fits."""
    found = [result.best for result in results if result.best is not None]
    if found:
        plan = chosen or min(found, key=lambda trial: trial.evaluation.step_time).plan
        write_page(path, value, value.simulate(plan), searches=[to_json(result) for result in results])


_HEAD = ("algorithm", "step_time", "gap", "evaluations", "wall_time", "plan")


def _rows(results: list[Any]) -> list[tuple[Any, ...]]:
    rows = []
    for result in results:
        time = result.best.evaluation.step_time if result.best else None
        plan = result.best.plan.describe() if result.best else ""
        rows.append((result.algorithm, time, result.gap, result.evaluations, result.wall_time, plan))
    return rows


def _print_comparison(results: list[Any]) -> None:
    from simulator.units import format_time

    rows = [
        (name, format_time(time) if time else "none fits", _proof(gap), f"{count:,}", format_time(wall), plan)
        for name, time, gap, count, wall, plan in _rows(results)
    ]
    table([word.replace("_", " ") for word in _HEAD], rows)


def _write_comparison(target: Path, results: list[Any]) -> None:
    import csv
    import io

    from scenarios.files import write

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_HEAD)
    writer.writerows(_rows(results))
    write(target / "compare.csv", text.getvalue())
    write(target / "compare.json", json.dumps([to_json(result) for result in results], indent=2) + "\n")
    histories = {result.algorithm: result.history for result in results if result.history}
    if histories:
        from reports.search import draw_search

        bounds = [result.lower_bound for result in results if result.lower_bound is not None]
        draw_search(histories, target / "compare.png", lower_bound=max(bounds, default=None))
