"""A page that compares the searches which choose a sharding for every operator, on captured networks.

Run ``python -m tests.studies.operator_comparison FOLDER [--seconds S] [--only NAME;...]`` to write ``operators.md`` and
``operators.jsonl`` into a folder. Every search begins with nothing in caches and has S CPU seconds, 20 by default, its
own tables of costs included. Every search is stored as it ends: the same command goes on after an interruption.

The twelve networks and their machine are those of `tests.studies.joint_comparison`.
"""

import json
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path
from statistics import median
from time import process_time

from meshwise.reports.document import Section, to_markdown
from meshwise.scenarios.files.results import write
from meshwise.simulator.units import format_time
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.algorithms import ALGORITHMS, OPERATOR_ALGORITHMS
from meshwise.strategies.search.simulated_search import search

from .joint_comparison import EQUAL, capture_problem
from .joint_models import FACTORIES
from .search_runs import SearchRun

NAMES = (*OPERATOR_ALGORITHMS, "auto", "mcmc", "mcts", "genetic")
"""All searches for operators, and for comparison the default and three searches for uniform plans."""

EARLY = 2.0
"""CPU seconds after which searches are compared, beside their whole time."""
SECONDS = 20.0
"""Default of the CPU seconds of a search."""
COUNTS = (5, 50)
"""Evaluations after which they are compared."""
NEAR = 0.01
"""Fraction above the best step time of all within which a search counts as near."""

Runs = Mapping[str, Mapping[str, SearchRun]]
"""Runs by problem and search."""


def run_search(case: str, name: str, problem: Problem, seconds: float) -> SearchRun:
    """Return the run of one search on a problem."""
    try:
        result = search(ALGORITHMS[name](), problem, seconds=seconds, clock=process_time)
    except ValueError as error:
        return SearchRun(case, name, None, 0, 0, 0.0, None, (), refused=str(error))
    points = tuple((count, round(elapsed, 6), time) for count, elapsed, time in result.history)
    counts = result.evaluations, result.considered, round(result.wall_time, 6)
    return SearchRun(case, name, None, *counts, result.lower_bound, points)


def build_page(runs: Runs, seconds: float) -> str:
    """Return the page of all problems."""
    names = [name for name in NAMES if any(name in row for row in runs.values())]
    summary = [_summarise(name, runs, seconds) for name in names]
    columns = [f"{count:,} evaluations" for count in COUNTS] + [f"{time:g} s" for time in (EARLY, seconds)]
    headers = [*(f"within {NEAR:.0%} at {column}" for column in columns), "best", "median gap", "no plan", "proven"]
    rows = [
        (case, *(_describe_run(row[name], _find_best(row)) if name in row else "-" for name in names))
        for case, row in runs.items()
    ]
    text = (
        f"{len(runs)} networks captured from torch, on 16 A100 with 100 Gb/s between their two nodes; {seconds:g} CPU "
        "seconds a search, from nothing: its tables of costs are counted. Gap: the best step time of a search over the "
        "best of all, minus 1. Operators of one stage: frontier, integer_programming, dynamic_programming, "
        "recursive_programming and sharding_propagation; with stages: joint and uniap; uniform plans: the others."
    )
    return to_markdown(
        "Searches for operators side by side",
        [
            Section("By search", (text,), (("search", *headers), *summary)),
            Section("By network", ("The best step time of every search, and its gap.",), (("network", *names), *rows)),
        ],
    )


def _summarise(name: str, runs: Runs, seconds: float) -> tuple[str, ...]:
    """Return a row of the first table: how often a search is near the best, and how it ends."""
    pairs = [(row[name], _find_best(row)) for row in runs.values() if name in row]
    limits = [(float(count), 0) for count in COUNTS] + [(time, 1) for time in (EARLY, seconds)]
    near = [sum(run.best_after(*limit) <= best * (1 + NEAR) for run, best in pairs) for limit in limits]
    gaps = [run.best / best - 1 for run, best in pairs]
    return (
        name,
        *(f"{count} of {len(pairs)}" for count in near),
        str(sum(gap <= EQUAL for gap in gaps)),
        _describe_gap(median(gaps)),
        str(sum(gap == inf for gap in gaps)),
        str(sum(run.proven for run, _ in pairs)),
    )


def _find_best(row: Mapping[str, SearchRun]) -> float:
    return min(run.best for run in row.values())


def _describe_run(run: SearchRun, best: float) -> str:
    if run.refused:
        return "refused"
    return "none" if run.best == inf else f"{format_time(run.best)}, {_describe_gap(run.best / best - 1)}"


def _describe_gap(gap: float) -> str:
    return "no plan" if gap == inf else f"{100 * gap:.1f} %"


def read_runs(path: Path) -> dict[str, dict[str, SearchRun]]:
    """Return the runs in a file; none where there is no file."""
    runs: dict[str, dict[str, SearchRun]] = {}
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        document = json.loads(line)
        run = SearchRun(**document | {"history": tuple(map(tuple, document["history"]))})
        runs.setdefault(run.case, {})[run.algorithm] = run
    return runs


def main(arguments: Sequence[str]) -> int:
    """Write the page of the command line; return the exit code."""
    parser = ArgumentParser(prog="python -m tests.studies.operator_comparison")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--only", default="")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    store = options.folder / "operators.jsonl"
    runs = read_runs(store)
    wanted_names = options.only.split(";") if options.only else list(FACTORIES)
    for case in wanted_names:
        missing_names = [name for name in NAMES if name not in runs.get(case, {})]
        problem = capture_problem(case) if missing_names else None
        for name in missing_names:
            assert problem is not None
            run = run_search(case, name, problem, options.seconds)
            runs.setdefault(case, {})[name] = run
            with store.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(run)) + "\n")
            print(f"{case}, {name}: {run.best:.6g} s after {run.evaluations} evaluations", flush=True)
    write(str(options.folder / "operators.md"), build_page(runs, options.seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
