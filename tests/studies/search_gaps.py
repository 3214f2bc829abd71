"""A table of how near to the proven optimum searches come with few evaluations.

Run ``python -m tests.studies.search_gaps [--seeds N] [--budget N] ALGORITHM ...`` to print it: by algorithm the mean
and the median gap, and the part of runs within `SOLVED_GAP` of the optimum, over `PROBLEMS` and seeds. It takes some
minutes. `tests.studies.search_comparison` compares all searches with many evaluations, for hours.
"""

import sys
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from statistics import fmean, median

from meshwise.scenarios.console import BAD_INPUT, note
from meshwise.strategies.search.algorithms import LAYOUT_ALGORITHMS
from meshwise.strategies.search.simulated_search import search

from .search_pictures import SOLVED_GAP
from .search_runs import CASES, PROVING, Case, SharedCosts, draws_seeds, make_algorithm

PROBLEMS = (
    "GPT-3 1.3B, 8 A100",
    "GPT-3 6.7B, 16 A100",
    "DeepSeek-V2-Lite, 16 H100",
    "BERT-large, 8 A100",
    "ViT-H/14, 8 A100",
    "GPT-3 6.7B, 8 V100",
    "GPT-3 13B, 32 V100",
    "Llama 2 7B, 16 A100 at 100 Gb/s",
    "Llama 2 13B, 64 TPU v4",
)
"""Problems of the comparison that were not looked at while the defaults of these searches were chosen."""


def find_gaps(case: Case, names: Sequence[str], seeds: int, budget: int) -> Iterator[tuple[str, float]]:
    """Yield the name and the gap of every run on a problem: the best step time over the proven optimum, minus 1.

    Raises
    ------
    ValueError
        Where the optimum is not proven.
    """
    problem = case.problem()
    costs = SharedCosts(problem)  # what one search has simulated the next one looks up
    proof = search(LAYOUT_ALGORITHMS[PROVING](), problem, case.space, costs=costs)
    if proof.best is None or proof.gap != 0:
        raise ValueError(f"{case.name}: its optimum is not proven")
    for name in names:
        for seed in range(seeds) if draws_seeds(name) else (None,):
            algorithm = make_algorithm(name, seed)
            result = search(algorithm, problem, case.space, costs=costs, budget=budget)
            best_time = inf if result.best is None else result.best.evaluation.step_time
            yield name, best_time / proof.best.evaluation.step_time - 1


def format_gaps(gaps: Mapping[str, Sequence[float]]) -> str:
    """Return a Markdown table of gaps by algorithm.

    >>> print(format_gaps({"random": (0.0, 0.05, 0.4)}).splitlines()[-1])
    | `random` | 15.0 % | 5.0 % | 33 % |
    """
    rows = [
        f"| `{name}` | {100 * fmean(values):.1f} % | {100 * median(values):.1f} % "
        f"| {100 * fmean(gap <= SOLVED_GAP for gap in values):.0f} % |"
        for name, values in gaps.items()
    ]
    return "\n".join(("| algorithm | mean gap | median gap | within 1 % |", "| --- | --- | --- | --- |", *rows))


def main(arguments: Sequence[str]) -> int:
    """Print the table of the command line; return the exit code."""
    parser = ArgumentParser(prog="python -m tests.studies.search_gaps")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--budget", type=int, default=60)
    parser.add_argument("algorithms", nargs="+", choices=list(LAYOUT_ALGORITHMS), metavar="ALGORITHM")
    options = parser.parse_args(arguments)
    if options.seeds < 1 or options.budget < 1:
        note(f"--seeds and --budget are at least 1, met {options.seeds} and {options.budget}; nearest: 1")
        return BAD_INPUT
    gaps: dict[str, list[float]] = defaultdict(list)
    for case in CASES:
        if case.name in PROBLEMS:
            for name, gap in find_gaps(case, options.algorithms, options.seeds, options.budget):
                gaps[name].append(gap)
            note(f"{case.name}: done")
    print(format_gaps(gaps))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
