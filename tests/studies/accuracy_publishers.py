"""Errors of predictions by publisher, each judged by what was fitted to all others.

Run ``python -m tests.studies.accuracy_publishers ROWS.jsonl FOLDER`` to write ``publishers.md`` and
``publishers.json`` into a folder; the project's own are in ``reports/accuracy``. Runs of publishers that are kept for
the last judgement are left out. Every publisher counts the same, however many runs it has.

For each publisher the figures that were fitted to its runs are fitted again without it (`refit_run`), and so are the
prior of few-shot calibration and the ends of intervals.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, geometric_mean, median
from typing import Any, NamedTuple

from meshwise.reports.document import Section, to_markdown
from meshwise.scenarios.console import BAD_INPUT, Ticker, note
from meshwise.scenarios.files.results import make_folder, write
from meshwise.scenarios.intervals import NOT_UNDERSTOOD, load_figures
from meshwise.scenarios.published.accuracy import (
    Prediction,
    load_runs,
    predict_all,
    select_split,
    summarize,
    summarize_errors,
)
from meshwise.scenarios.published.estimates import estimate_step_time
from meshwise.scenarios.published.runs import Run
from meshwise.scenarios.published.vocabulary.publishers import find_publisher
from meshwise.simulator.catalog import accelerator
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster
from meshwise.strategies.plan.framework import ENTRIES

from .factor_priors import StepsByPublisher, measure_steps
from .few_shot import COUNTS, judge_publishers
from .interval_ends import FEWEST_RUNS, is_timed, measure_left_out_coverage

TITLE = "Predicted against measured, by publisher"
PAGE, DATA = "publishers.md", "publishers.json"

FACTORS = (1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.4)
"""Factors of training over a burst that are tried where the publisher of the fitted one is left out."""

LAUNCHES = (45e-6, 70e-6, 90e-6, 110e-6, 140e-6, 170e-6, 200e-6, 240e-6)
"""Seconds of a launch of eager code that are tried for every publisher."""
OTHER_LAUNCHES = {"stas00": 45e-6, "meshwise": 140e-6}
"""Seconds of a launch by those who timed eager code and have no rows among the published runs, as
``strategies/plan/frameworks.json`` derives them: Llama 1B forward on a B200, and small models of transformers on an
H200 (``reports/executor/device-rows-h200.jsonl``)."""
HOST_BOUND = 1.1
"""How much longer a step gets at least as launches go from 100 to 200 us, for it to tell how long they are."""


FITTED = ("MosaicML", "Moore Threads")
"""Publishers by whose runs or kernels a factor of training over a burst was fitted."""


class Refit(NamedTuple):
    """Figures fitted without the publisher whose runs gave those that ship.

    ``hopper_factor`` is the time of products on the H100 over a burst, without MosaicML. ``launches`` are the seconds
    in which hosts launch an operator of eager code by each publisher's own runs, of which the geometric mean without
    the publisher's own counts.
    """

    hopper_factor: float
    launches: Mapping[str, float]

    def find_launch(self, publisher: str) -> float:
        """Return the seconds of a launch without a publisher's own figure."""
        return geometric_mean(seconds for name, seconds in self.launches.items() if name != publisher)


def refit_run(run: Run, publisher: str, refit: Refit) -> Run:
    """Return a run of a publisher with the figures that are fitted to other publishers alone.

    Without Moore Threads, who timed products on the B200 under load, they take as many times a burst as on the H100.
    """
    if run.scenario is None:
        return run
    cluster = run.scenario.problem.cluster
    if publisher == "MosaicML":
        cluster = _with_sustained(cluster, "H", refit.hopper_factor)
    elif publisher == "Moore Threads":
        cluster = _with_sustained(cluster, "B200", accelerator("h100-80gb").sustained)
    if publisher in refit.launches:
        cluster = _with_launch(cluster, refit.find_launch(publisher))
    problem = replace(run.scenario.problem, cluster=cluster)
    return replace(run, scenario=replace(run.scenario, problem=problem))


def _with_launch(cluster: Cluster, seconds: float) -> Cluster:
    nodes = ((node, replace(node.host, launch=seconds if node.host.launch else 0.0), n) for node, n in cluster.nodes)
    return replace(cluster, nodes=tuple((replace(node, host=host), n) for node, host, n in nodes))


def _with_sustained(cluster: Cluster, prefix: str, factor: float) -> Cluster:
    def change(device: Accelerator) -> Accelerator:
        return replace(device, sustained=factor) if device.name.startswith(prefix) else device

    return cluster.with_accelerators(change)


def fit_others(predictions: Sequence[Prediction]) -> Refit:
    """Return the figures that fit the runs of other publishers best, each publisher counted once.

    The factor of the H100 is fitted to 16-bit steps, and launches to steps that hosts bound (`HOST_BOUND`).
    """
    hopper_runs = [
        row.run
        for row in predictions
        if is_timed(row)
        and row.run.scenario is not None
        and row.run.scenario.problem.cluster.accelerator.name.startswith("H100")
        and row.run.scenario.problem.training.precision == "bf16"
        and find_publisher(row.run.source).name != "MosaicML"
    ]
    shipped = Refit(accelerator("h100-80gb").sustained, {})
    hopper_fits = [shipped._replace(hopper_factor=factor) for factor in FACTORS] if hopper_runs else [shipped]
    best_fit = min(hopper_fits, key=lambda refit: _measure_error(hopper_runs, "MosaicML", refit))
    return best_fit._replace(launches=OTHER_LAUNCHES | fit_launches(predictions))


def fit_launches(predictions: Sequence[Prediction]) -> dict[str, float]:
    """Return the seconds of a launch that fit each publisher's runs that hosts bound best."""
    runs_by_publisher: dict[str, list[Run]] = defaultdict(list)
    for row in predictions:
        if row.error is not None and _is_host_bound(row.run):
            runs_by_publisher[find_publisher(row.run.source).name].append(row.run)
    return {
        name: min(LAUNCHES, key=partial(_measure_launch_error, runs))
        for name, runs in runs_by_publisher.items()
        if len(runs) >= FEWEST_RUNS
    }


def _measure_launch_error(runs: Sequence[Run], seconds: float) -> float:
    errors = (measure_error(_change_launch(run, seconds)) for run in runs)
    return fmean(abs(error) for error in errors if error is not None)


def _is_host_bound(run: Run) -> bool:
    """Return whether launches of 200 us instead of 100 us make a step `HOST_BOUND` times as long.

    A run on a machine of which nothing is understood tells nothing.
    """
    if run.scenario is None or any(NOT_UNDERSTOOD in text for text in run.assumed):
        return False
    if not ENTRIES[run.scenario.problem.training.framework].defaults.launch:
        return False
    fast_error, slow_error = (measure_error(_change_launch(run, seconds)) for seconds in (100e-6, 200e-6))
    return fast_error is not None and slow_error is not None and 1.0 + slow_error > HOST_BOUND * (1.0 + fast_error)


def _change_launch(run: Run, seconds: float) -> Run:
    """Return a run whose hosts launch an operator in so many seconds."""
    if run.scenario is None:
        return run
    problem = run.scenario.problem
    problem = replace(problem, cluster=_with_launch(problem.cluster, seconds))
    return replace(run, scenario=replace(run.scenario, problem=problem))


def measure_error(run: Run) -> float | None:
    """Return the relative error of the predicted step time of a run, without a look at its memory."""
    if run.scenario is None or not run.step_time:
        return None
    try:
        return estimate_step_time(run.scenario.problem, run.scenario.choose_plan()) / run.step_time - 1.0
    except ValueError:
        return None


def _measure_error(runs: Sequence[Run], publisher: str, refit: Refit) -> float:
    errors: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        error = measure_error(refit_run(run, publisher, refit))
        if error is not None:
            errors[find_publisher(run.source).name].append(abs(error))
    return fmean(map(fmean, errors.values())) if errors else 0.0


def summarize_publishers(
    predictions: Sequence[Prediction], steps_by_publisher: StepsByPublisher | None = None
) -> dict[str, Any]:
    """Return errors by publisher and their medians as JSON-ready data; without steps no few-shot errors."""
    members: dict[str, list[Prediction]] = defaultdict(list)
    for row in predictions:
        members[find_publisher(row.run.source).name].append(row)
    refit = fit_others(predictions)
    coverage = measure_left_out_coverage(predictions)
    shots = judge_publishers(steps_by_publisher) if steps_by_publisher else {}
    lines = []
    for name, rows in sorted(members.items(), key=lambda entry: entry[0].lower()):
        timed = [row for row in rows if is_timed(row)]
        is_fitted = name in FITTED or name in refit.launches
        errors = [measure_error(refit_run(row.run, name, refit)) if is_fitted else row.error for row in timed]
        few_shot = {str(count): round(errors.mape, 12) for count, errors in shots.get(name, {}).items() if count}
        lines.append(_build_line(name, rows, timed, errors) | {"few_shot": few_shot, "inside": coverage.get(name)})
    judged = [line for line in lines if line["left_out"]["count"] >= FEWEST_RUNS]
    return {
        "rows": len(predictions),
        "refit": refit._asdict(),
        "publishers": lines,
        "medians": {
            "publishers": len(judged),
            "runs": sum(line["left_out"]["count"] for line in judged),
            "left_out": _find_median(line["left_out"]["mape"] for line in judged),
            "largest": max((line["left_out"]["mape"] for line in judged), default=None),
            "bias": _find_median(line["left_out"]["bias"] for line in judged),
            "inside": _find_median(line["inside"] for line in judged),
            **{f"after_{count}": _find_median(line["few_shot"].get(str(count)) for line in judged) for count in COUNTS},
        },
        "all": {name: value for name, value in summarize(predictions)["all"].items() if name != "skipped"},
    }


def _build_line(
    publisher: str, rows: Sequence[Prediction], timed: Sequence[Prediction], errors: Sequence[float | None]
) -> dict[str, Any]:
    summary = summarize(rows)
    groups = [group for group in summary["groups"] if group.get("regret") is not None]
    kinds: dict[str, list[float | None]] = defaultdict(list)
    for row in rows:
        if row.memory_error is not None:
            kinds[row.run.memory_kind].append(row.memory_error)
    sources = sorted({row.run.source for row in rows})
    return {
        "publisher": publisher,
        "split": str(find_publisher(sources[0]).split),
        "sources": sources,
        "rows": len(rows),
        "left_out": summarize_errors(errors),
        "in_sample": summarize_errors(row.error for row in timed),
        "memory": {kind: summarize_errors(values) for kind, values in sorted(kinds.items())},
        "out_of_memory": summary["all"]["out_of_memory"],
        "groups": len(groups),
        "regret": round(fmean(group["regret"] for group in groups), 12) if groups else None,
        "tau": round(fmean(group["tau"] for group in groups), 12) if groups else None,
    }


def _find_median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(median(known), 12) if known else None


HEAD = ("publisher", "use", "timed", "mean error", "bias", *(f"after {count}" for count in COUNTS), "inside")
MEMORY_HEAD = ("publisher", "memory", "kind", "bias", "ran: fits", "OOM: told", "regret", "tau", "groups")
SMALL_HEAD = ("publisher", "in sample", "bias", "runs", "sources")


def format_page(result: Mapping[str, Any]) -> str:
    """Return the page as Markdown."""
    lines, medians = result["publishers"], result["medians"]
    timed = [line for line in lines if line["left_out"]["count"]]
    sections = [
        Section(
            "Step time of publishers left out",
            (
                f"{result['rows']} published runs. Errors are predicted over measured, minus 1. What was fitted to "
                "runs of a publisher was fitted again without it. *After 1, 3, 5*: the error on its other runs after "
                "so many of its runs, drawn at random 20 times, with `meshwise calibrate --runs`. *Inside*: the part "
                "of its runs inside 90 % intervals that the others gave. Runs of tier A and B; of tests of Megatron "
                "Core those of models that are 4096 wide.",
                _describe_medians(medians),
            ),
            (HEAD, *map(_format_line, timed)),
        ),
        Section(
            "Memory and choice",
            (
                "The peak of the kind that was measured; *ran: fits* are the runs that ran and are predicted to fit, "
                "*OOM: told* those that ran out of memory and are predicted to. *Regret* is the measured time of the "
                "plan that is predicted fastest over that of the fastest, minus 1, and *tau* Kendall's, in the mean "
                "over groups of one problem with three plans or more.",
                _describe_fits(result["all"]["out_of_memory"]),
                _describe_unchecked(),
            ),
            (MEMORY_HEAD, *(row for line in lines for row in _format_memory(line))),
        ),
        Section(
            "In sample",
            ("Errors with all figures as they ship: what the simulator can be brought to, not what to expect.",),
            (
                SMALL_HEAD,
                *(
                    (
                        line["publisher"],
                        *_format_errors(line["in_sample"]),
                        str(line["rows"]),
                        ", ".join(line["sources"]),
                    )
                    for line in lines
                ),
            ),
        ),
    ]
    return to_markdown(TITLE, sections)


def _describe_medians(medians: Mapping[str, Any]) -> str:
    if not medians["publishers"]:
        return f"No publisher has {FEWEST_RUNS} timed runs."
    after = ", ".join(
        f"{_format_percent(medians[f'after_{count}'])} after {count}"
        for count in COUNTS
        if medians[f"after_{count}"] is not None
    )
    return (
        f"In the median over {medians['publishers']} publishers with {FEWEST_RUNS} timed runs or more: "
        f"{_format_percent(medians['left_out'])} off, at most {_format_percent(medians['largest'])}, bias "
        f"{_format_signed(medians['bias'])}{'; ' + after if after else ''}."
    )


def _describe_fits(confusion: Mapping[str, int]) -> str:
    runs = sum(confusion.values())
    if not runs:
        return "No run was judged."
    num_right = confusion["true_fit"] + confusion["true_oom"]
    return f"Of {runs} runs {num_right} are told rightly, {_format_percent(num_right / runs)}."


def _describe_unchecked() -> str:
    """Return how well the room of unchecked frameworks tells models that had no part in it."""
    fit = load_figures()["replay_unknown_framework"]
    fractions = ", ".join(f"{name} {_format_percent(fraction)}" for name, fraction in fit["left_out"].items())
    return (
        "The room that a framework needs whose memory nobody checked is fitted to a sweep with runs out of memory, the "
        f"first of this table. Told rightly of each of its models by the room that the others gave: {fractions}."
    )


def _format_line(line: Mapping[str, Any]) -> tuple[str, ...]:
    shots = (line["few_shot"].get(str(count)) for count in COUNTS)
    return (
        line["publisher"],
        line["split"],
        str(line["left_out"]["count"]),
        *_format_errors(line["left_out"]),
        *("-" if error is None else _format_percent(error) for error in shots),
        "-" if line["inside"] is None else f"{100 * line['inside']:.0f} %",
    )


def _format_memory(line: Mapping[str, Any]) -> list[tuple[str, ...]]:
    confusion = line["out_of_memory"]
    ran, failed = confusion["true_fit"] + confusion["false_oom"], confusion["true_oom"] + confusion["false_fit"]
    outcome = (
        f"{confusion['true_fit']} of {ran}" if ran else "-",
        f"{confusion['true_oom']} of {failed}" if failed else "-",
        "-" if line["regret"] is None else _format_percent(line["regret"]),
        "-" if line["tau"] is None else f"{line['tau']:.2f}",
        str(line["groups"]),
    )
    kinds = list(line["memory"].items()) or [("-", {"count": 0})]
    return [
        (line["publisher"], _format_errors(error)[0], kind, _format_errors(error)[1], *outcome) for kind, error in kinds
    ]


def _format_errors(error: Mapping[str, Any]) -> tuple[str, str]:
    return (_format_percent(error["mape"]), _format_signed(error["bias"])) if error["count"] else ("-", "-")


def _format_percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


def _format_signed(fraction: float) -> str:
    return f"{100 * fraction:+.1f} %"


def main(arguments: Sequence[str]) -> int:
    """Write the page and its data into the folder of the command line; return the exit code."""
    if len(arguments) != 2:
        note("usage: python -m tests.studies.accuracy_publishers ROWS.jsonl FOLDER")
        return BAD_INPUT
    ticker = Ticker()
    try:
        rows, place = arguments
        target = make_folder(place)
        runs = select_split(load_runs(rows), judge=False)
        predictions = predict_all(runs, lambda num_done, num_runs: ticker(f"{num_done} of {num_runs} runs"))
        timed = [row.run for row in predictions if is_timed(row)]
        steps = measure_steps(timed, lambda num_done, num_runs: ticker(f"shares of {num_done} of {num_runs} runs"))
        result = summarize_publishers(predictions, steps)
        write(target / DATA, json.dumps(result, indent=1) + "\n")
        write(target / PAGE, format_page(result))
    except ValueError as error:
        note(str(error))
        return BAD_INPUT
    finally:
        ticker.clear()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
