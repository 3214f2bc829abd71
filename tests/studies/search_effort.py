"""What the default search takes on large problems: CPU seconds to the first plan, to 1 %, and to the proof; memory.

Run ``python -m tests.studies.search_effort FOLDER [--seconds S] [--only NAME,...]`` to write ``effort.md`` into a
folder. Every search is a process of its own, with S seconds of wall time, 300 by default; its CPU time counts from the
start of the search, with nothing in caches, and its memory is the most that the process holds, the program included.
"""

import json
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace
from resource import RUSAGE_SELF, getrusage
from time import process_time
from typing import Any

from meshwise.reports.document import Section, to_markdown
from meshwise.scenarios.files.library import find_scenario
from meshwise.scenarios.files.results import make_folder, write
from meshwise.scenarios.loader import load
from meshwise.simulator.models.model import build
from meshwise.simulator.models.presets import MODELS
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.algorithms import ALGORITHMS
from meshwise.strategies.search.driver import Progress
from meshwise.strategies.search.simulated_search import search

PROBLEMS = {
    "GPT-3 175B, 1,024 A100": ("gpt3-175b-1024-a100", None),
    "Llama 3 405B, 16,384 H100": ("llama3-405b-16384-h100", None),
    "DeepSeek-V3, 2,048 H800": ("gallery/models/deepseek-v3-2048-h800", None),
    "Llama 3 70B with 61 layers, 64 H100": ("llama3-70b-64-h100", 61),
    "Llama 3 70B with 126 layers, 64 H100": ("llama3-70b-64-h100", 126),
}
"""Scenarios of the library, some with another number of layers."""
NEAR = 0.01
"""Fraction of the last plan's step time within which an earlier plan counts as near."""


def load_problem(name: str) -> Problem:
    """Return a problem by its name."""
    scenario, layers = PROBLEMS[name]
    problem = load(find_scenario(scenario)).problem
    if layers is None:
        return problem
    spec = MODELS["llama3-70b"]
    assert isinstance(spec, Transformer)
    spec = replace(spec, layers=layers)
    return replace(problem, graph=build(spec, problem.training.sequence, problem.training.precision))


def measure(name: str, seconds: float) -> dict[str, Any]:
    """Return what the default search takes on a problem."""
    problem, bests = load_problem(name), list[tuple[float, float]]()
    start = process_time()

    def note_best(progress: Progress) -> None:
        if progress.best is not None:
            step_time = progress.best.evaluation.step_time
            if not bests or step_time < bests[-1][1]:
                bests.append((process_time() - start, step_time))

    result = search(ALGORITHMS["auto"](), problem, seconds=seconds, progress=note_best)
    total = process_time() - start
    assert result.best is not None
    last_time = result.best.evaluation.step_time
    return {
        "name": name,
        "first": bests[0][0],
        "first_over_last": bests[0][1] / last_time,
        "near": next(cpu_time for cpu_time, step_time in bests if step_time <= last_time * (1 + NEAR)),
        "total": total,
        "gap": result.gap,
        "step_time": last_time,
        "plan": result.best.plan.describe(),
        "memory": getrusage(RUSAGE_SELF).ru_maxrss * 1024,
        "end": result.end,
    }


def build_page(rows: Sequence[dict[str, Any]], seconds: float) -> str:
    """Return the page of rows as Markdown."""
    header = (
        "problem",
        "first plan, CPU s",
        "its step",
        "within 1 %, CPU s",
        "end, CPU s",
        "gap",
        "memory, GB",
        "plan",
    )
    lines = [
        (
            row["name"],
            f"{row['first']:.1f}",
            f"{row['first_over_last']:.2f} of the last",
            f"{row['near']:.1f}",
            f"{row['total']:.1f}, {row['end']}",
            "none" if row["gap"] is None else f"{100 * row['gap']:.1f} %",
            f"{row['memory'] / 1e9:.2f}",
            f"{row['step_time']:.3g} s: {row['plan']}",
        )
        for row in rows
    ]
    paragraph = (
        "The default search among uniform plans and stages near them, each in a process of its own on one core, with "
        f"{seconds:g} s of wall time. Memory is that of the process at its fullest, the program included. Written by "
        "python -m tests.studies.search_effort."
    )
    return to_markdown("What the default search takes", [Section("Large problems", (paragraph,), (header, *lines))])


def main(arguments: Sequence[str]) -> int:
    """Write the page, or with ``--measure`` the row of one problem."""
    parser = ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", nargs="?", default="reports/search", help="where effort.md goes (%(default)s)")
    parser.add_argument("--seconds", type=float, default=300.0, help="wall time of a search (%(default)s)")
    parser.add_argument("--only", help="names of problems, with semicolons between them")
    parser.add_argument("--measure", help="print the row of this problem")
    options = parser.parse_args(arguments)
    if options.measure:
        print(json.dumps(measure(options.measure, options.seconds)))
        return 0
    rows = []
    for name in options.only.split(";") if options.only else PROBLEMS:
        command = [sys.executable, "-m", __spec__.name, "--measure", name, "--seconds", str(options.seconds)]
        rows.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
        print(rows[-1], flush=True)
    write(make_folder(options.folder) / "effort.md", build_page(rows, options.seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
