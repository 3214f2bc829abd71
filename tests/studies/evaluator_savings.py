"""What each fast evaluator of plans saves a search: CPU seconds of the benchmark's searches with it and without it.

Without one, the search asks what that evaluator is a shortcut for: memory and longest paths of a plan are those of its
program, the bound of a plan is its longest path, and the bounds of groups and families are the least that is sure, 0.
Searches return the same plan, or run out of time. Run ``python -m tests.studies.evaluator_savings FILE SECONDS`` to
write the table; no search takes longer than so many seconds.
"""

import sys
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from time import process_time
from typing import NamedTuple

import numpy as np

from meshwise.scenarios.benchmark.search_benchmark import GPT3, LLAMA, MIXED, WIDE
from meshwise.scenarios.loader import load
from meshwise.simulator.engine import simulate, step_ticks
from meshwise.simulator.units import to_seconds
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.evaluation import FloatArray
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.plan.group import Group
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.algorithms import ALGORITHMS
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import Space

from .circumstances import describe_circumstances, format_today

CASES = (
    ("best_first", GPT3, Space()),
    ("best_first", GPT3, WIDE),
    ("auto", GPT3, Space()),
    ("auto", MIXED, Space()),
    ("auto", LLAMA, Space()),
)
"""Algorithms, scenarios and spaces of the search benchmark."""


class WithoutGroupBounds(SimulatedCost):
    """A cost model whose bounds of groups say nothing: every member is looked at alone."""

    def group_bounds(self, group: Group, limit: float = inf) -> FloatArray:
        """Return 0 for every member, which is below any bound."""
        return np.where(group.member_mask, 0.0, inf)


class WithoutFamilyBounds(SimulatedCost):
    """A cost model whose bounds of families say nothing: all their groups are looked at."""

    def family_bound(self, family: Layout) -> float:
        """Return 0."""
        return 0.0

    def busy_bound(self, family: Layout) -> float:
        """Return 0."""
        return 0.0


class WithoutPlanBounds(SimulatedCost):
    """A cost model whose bound of a plan is its longest path."""

    def plan_bound(self, plan: Plan) -> float:
        """Return the longest path of a plan."""
        return self.longest_paths([plan])[0]


class WithoutWalks(SimulatedCost):
    """A cost model that builds the program of every plan for its longest path."""

    def longest_paths(self, plans: Sequence[Plan]) -> list[float]:
        """Return the longest paths of the programs of plans."""
        programs = (lower(self.problem, plan, costs=self.costs) for plan in plans)
        return [to_seconds(step_ticks(program, "longest_path")) for program in programs]


class WithoutMemory(SimulatedCost):
    """A cost model that simulates every plan for its memory."""

    def peak_memory(self, plan: Plan) -> float:
        """Return the peak that the simulation reaches."""
        timeline = simulate(lower(self.problem, plan, costs=self.costs))
        return float(max(profile.peak for profile in timeline.memory))

    def fits(self, plan: Plan) -> bool:
        """Return whether the simulation keeps within the memory of all devices and hosts."""
        timeline = simulate(lower(self.problem, plan, costs=self.costs))
        profiles = (*timeline.memory, *timeline.host_memory)
        return all(profile.peak <= profile.capacity for profile in profiles)


MODELS: dict[str, Callable[[Problem], SimulatedCost]] = {
    "all": SimulatedCost,
    "bounds of groups": WithoutGroupBounds,
    "bounds of families": WithoutFamilyBounds,
    "bounds of plans": WithoutPlanBounds,
    "walks of passes": WithoutWalks,
    "memory without a program": WithoutMemory,
}


class Row(NamedTuple):
    """A search without one evaluator: its CPU seconds, the plans that it simulated, step time and gap."""

    algorithm: str
    scenario: str
    is_wide: bool
    left_out: str
    seconds: float
    evaluations: int
    step_time: float | None
    gap: float | None


def measure_search(algorithm: str, scenario: str, space: Space, left_out: str, seconds: float) -> Row:
    """Return what a search takes without one evaluator; ``all`` leaves none out."""
    problem = load(scenario).problem
    start = process_time()
    result = search(ALGORITHMS[algorithm](), problem, space, costs=MODELS[left_out](problem), seconds=seconds)
    elapsed = process_time() - start
    step_time = result.best.evaluation.step_time if result.best is not None else None
    return Row(algorithm, scenario, space.wide, left_out, elapsed, result.evaluations, step_time, result.gap)


def format_table(rows: Sequence[Row]) -> str:
    """Return rows as a table of Markdown."""
    lines = [
        "# What each fast evaluator saves a search",
        "",
        "CPU seconds of searches of the benchmark, with all evaluators and without one of them; a search that takes "
        "longer than its time limit ends with a gap. "
        "Written by `python -m tests.studies.evaluator_savings` on "
        f"{format_today()}, {', '.join(map(str, describe_circumstances().values()))}.",
        "",
        "| search | scenario | space | without | CPU seconds | simulated | step time | gap |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        step_time = "none" if row.step_time is None else f"{row.step_time:.4g} s"
        gap = "none" if row.gap is None else f"{100 * row.gap:.1f} %"
        name = "-" if row.left_out == "all" else row.left_out
        space = "wide" if row.is_wide else "usual"
        cells = (row.algorithm, row.scenario, space, name, f"{row.seconds:.1f}", row.evaluations, step_time, gap)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, ""])


def main(path: str, seconds: str) -> None:
    """Write the table; it is written again after every search."""
    rows: list[Row] = []
    measure_search(*CASES[0], "all", float(seconds))  # imports and compiles
    for algorithm, scenario, space in CASES:
        for left_out in MODELS:
            rows.append(measure_search(algorithm, scenario, space, left_out, float(seconds)))
            Path(path).write_text(format_table(rows))
            print(rows[-1], file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
