"""A page that compares the searches for layouts: how near to the proven optimum each comes, and how soon.

Run ``python -m tests.studies.search_comparison [--wide] [ROUNDS] FOLDER`` to write ``README.md``, its
pictures and ``results.csv`` into a folder; the project's own are ``reports/search`` and, for wide spaces,
``reports/search-wide``. ROUNDS is the number of seeds of randomized algorithms, 10 by default. ``runs.jsonl`` gets
every run as it is made: the same command continues after an interruption, and makes only the runs that are missing or
were made by another version of the program.
"""

import csv
import io
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf, isfinite
from pathlib import Path
from statistics import median

from meshwise.executor.launch.processes import INTERRUPTED
from meshwise.reports.document import Section, to_markdown
from meshwise.scenarios.console import BAD_INPUT, Ticker, note
from meshwise.scenarios.files.results import make_folder, write
from meshwise.simulator.units import format_time
from meshwise.strategies.search.algorithms import LAYOUT_ALGORITHMS

from .search_pictures import SOLVED_GAP, draw_cases, draw_gaps, draw_solved
from .search_runs import (
    BUDGET,
    CASES,
    MOST_PLANS,
    PROVING,
    SECONDS,
    SLACK,
    WIDE_CASES,
    Case,
    SearchRun,
    read_runs,
    run_case,
    to_line,
)

TITLES = ("Searches side by side", "Searches side by side, in wide spaces")
ROUNDS = 10
MOST_ROUNDS = 1000
WIDE = "--wide"
"""The command-line flag for wide spaces."""
COUNTS = (100, 1_000, 10_000)
"""Evaluations after which algorithms are compared."""
PICTURED = COUNTS[1]
"""Evaluations after which algorithms are drawn for every problem."""
TIMES = (1.0, 5.0)
"""CPU seconds after which algorithms are compared."""
_SPACE = ("the whole space of what an engineer tries first", "the wide space of all that a layout can be")
Table = tuple[tuple[str, ...], ...]


class Comparison:
    """Runs by algorithm and problem, for the problems whose optimum is proven."""

    def __init__(self, runs: Sequence[SearchRun], cases: Sequence[Case] = CASES) -> None:
        self.kinds = {case.name: case.kind for case in cases}
        self.wide = any(case.wide for case in cases)
        self.optimum = {run.case: run.best for run in runs if run.algorithm == PROVING and run.proven}
        known_runs = [run for run in runs if run.case in self.optimum and run.case in self.kinds]
        self.cases = [case.name for case in cases if case.name in self.optimum]
        self.refused = [run for run in known_runs if run.refused]
        self.runs: dict[str, dict[str, list[SearchRun]]] = defaultdict(lambda: defaultdict(list))
        for run in known_runs:
            if not run.refused:
                self.runs[run.algorithm][run.case].append(run)
        order = {name: number for number, name in enumerate(LAYOUT_ALGORITHMS)}
        self.names = sorted(self.runs, key=lambda name: order.get(name, len(order)))

    def gap(self, run: SearchRun, limit: float = inf, column: int = 0) -> float:
        """Return the gap after ``limit`` evaluations (column 0) or CPU seconds (1): step time over optimum, minus 1."""
        gap = run.best_after(limit, column) / self.optimum[run.case] - 1
        return 0.0 if abs(gap) < SLACK else gap

    def gaps(self, name: str, limit: float = inf, column: int = 0) -> dict[str, float]:
        """Return the median gap of an algorithm over its seeds, by problem."""
        return {
            case: median(self.gap(run, limit, column) for run in self.runs[name][case])
            for case in self.cases
            if self.runs[name][case]
        }

    def solved_share(self, name: str, limit: float, column: int = 0) -> float:
        """Return the fraction of an algorithm's runs that are within `SOLVED_GAP` of the optimum."""
        runs = [run for case_runs in self.runs[name].values() for run in case_runs]
        return sum(self.gap(run, limit, column) <= SOLVED_GAP for run in runs) / len(runs)

    def wins(self, limit: float, column: int = 0) -> Counter[str]:
        """Return the number of problems in which an algorithm has the least median gap; ties count for each."""
        gaps = {name: self.gaps(name, limit, column) for name in self.names}
        wins: Counter[str] = Counter()
        for case in self.cases:
            gaps_of_case = {name: case_gaps[case] for name, case_gaps in gaps.items() if case in case_gaps}
            least = min(gaps_of_case.values(), default=inf)
            wins.update(name for name, gap in gaps_of_case.items() if isfinite(gap) and gap <= least + SLACK)
        return wins

    def courses(self, column: int) -> dict[str, list[list[tuple[float, float]]]]:
        """Return the course of the gap over evaluations or seconds, of every run by algorithm, for the pictures."""
        return {
            name: [
                [(point[column], point[2] / self.optimum[run.case] - 1) for point in run.history]
                for case in self.cases
                for run in self.runs[name][case]
            ]
            for name in self.names
        }


def format_page(comparison: Comparison) -> str:
    """Return the page as Markdown; the pictures of `draw_pictures` lie beside it."""
    return to_markdown(TITLES[comparison.wide], tuple(_build_sections(comparison)))


def _build_sections(comparison: Comparison) -> Iterator[Section]:
    yield Section(
        "What this is",
        (
            f"Every search for layouts on {len(comparison.cases)} problems whose optimum {PROVING} has proven, each "
            f"over {_SPACE[comparison.wide]}. A run has {BUDGET:,} evaluations or "
            f"{SECONDS:g} s of one core's CPU time; algorithms that draw run with "
            f"{_count_seeds(comparison)} seeds. Written by python -m tests.studies.search_comparison, "
            "which goes on where it was ended; every run is in runs.jsonl and, in short, in results.csv.",
            "Gap: the best step time so far over the optimum, minus 1. A gap below 0 is a plan outside the space that "
            "best_first proves, as of stages of other sizes. Evaluations are simulations of different plans: bounds, "
            "memory filters and longest paths are not counted, only timed. Seconds are CPU time with the costs of "
            "operators at hand; an evaluation that an earlier run has made is charged what it took then. Runs that "
            "draw end at the optimum.",
            *_list_left_out(comparison),
        ),
    )
    yield Section(
        "By algorithm",
        (
            f"Within {_format_whole(SOLVED_GAP)}: the part of runs that near to the optimum. Wins: problems in which "
            "no algorithm has a better median over seeds; ties count for all. "
            "Median gap: over problems, of the medians over seeds. "
            f"{_describe_sizes(comparison)}: an algorithm that evaluates none twice has seen all after as many "
            "evaluations.",
        ),
        _build_algorithm_table(comparison),
        "solved.png",
        f"Part of runs within {_format_whole(SOLVED_GAP)} of the proven optimum",
    )
    yield Section(
        "Gap against evaluations", image="gap-evaluations.png", caption="Median gap and middle half, by evaluations"
    )
    yield Section("Gap against time", image="gap-seconds.png", caption="Median gap and middle half, by CPU time")
    yield Section(
        "By problem",
        (
            f"Space: plans that the exhaustive search would look at; it is left out beyond {MOST_PLANS:,}. From "
            "nothing: the same proof as the first search of a process, which computes the costs of operators.",
        ),
        _build_case_table(comparison),
        "problems.png",
        f"Median gap after {PICTURED:,} evaluations",
    )
    if comparison.refused:
        reasons = dict.fromkeys((run.algorithm, run.case, run.refused) for run in comparison.refused)
        yield Section("Problems that an algorithm refuses", (), (("algorithm", "problem", "reason"), *reasons))


def _list_left_out(comparison: Comparison) -> Iterator[str]:
    names = [name for name in comparison.kinds if name not in comparison.cases]
    if names:
        yield f"Left out, for want of runs or of a proof: {', '.join(names)}."


def _describe_sizes(comparison: Comparison) -> str:
    sizes = [comparison.runs[PROVING][case][0].considered for case in comparison.cases]
    return f"Spaces have {min(sizes):,} to {max(sizes):,} plans"


def _count_seeds(comparison: Comparison) -> int:
    return max((len(runs) for by_case in comparison.runs.values() for runs in by_case.values()), default=0)


def _build_algorithm_table(comparison: Comparison) -> Table:
    limits = [(count, 0, f"{count:,}") for count in COUNTS] + [(time, 1, f"{time:g} s") for time in TIMES]
    wins = {limit: comparison.wins(limit, column) for limit, column, _ in limits}
    head = (
        "algorithm",
        *(f"within {_format_whole(SOLVED_GAP)} at {text}" for *_, text in limits),
        *(f"wins at {text}" for *_, text in limits),
        *(f"median gap at {text}" for *_, text in limits),
        "proven",
    )
    rows = [
        (
            name,
            *(_format_whole(comparison.solved_share(name, limit, column)) for limit, column, _ in limits),
            *(str(wins[limit][name]) for limit, *_ in limits),
            *(_format_percent(median(comparison.gaps(name, limit, column).values())) for limit, column, _ in limits),
            _format_proven_share(comparison, name),
        )
        for name in comparison.names
    ]
    return (head, *sorted(rows, key=lambda row: -int(row[1].rstrip(" %"))))


def _format_proven_share(comparison: Comparison, name: str) -> str:
    runs = [run for case_runs in comparison.runs[name].values() for run in case_runs]
    return _format_whole(sum(run.proven for run in runs) / len(runs))


def _format_whole(part: float) -> str:
    return f"{100 * part:.0f} %"


def _format_percent(gap: float) -> str:
    return f"{100 * gap:.1f} %" if isfinite(gap) else "no plan"


def _build_case_table(comparison: Comparison) -> Table:
    head = ("problem", "what", "space", "optimum", "simulated for it", "CPU time of the proof", "from nothing")
    rows = []
    for case in comparison.cases:
        (proof,) = comparison.runs[PROVING][case]
        counts = f"{proof.considered:,}", format_time(proof.best), str(proof.evaluations)
        rows.append((case, comparison.kinds[case], *counts, *map(format_time, (proof.seconds, proof.cold_seconds))))
    return (head, *rows)


def draw_pictures(comparison: Comparison, place: Path) -> None:
    """Draw the pictures of the page into a folder."""
    problems = f"{len(comparison.cases)} problems; algorithms that draw: {_count_seeds(comparison)} seeds"
    evaluations, seconds = comparison.courses(0), comparison.courses(1)
    facts = f"part of runs within {_format_whole(SOLVED_GAP)} of the proven optimum; {problems}"
    draw_solved(evaluations, seconds, place / "solved.png", title="How soon searches are at the optimum", facts=facts)
    facts = f"line: the median over runs, band: the middle half; grey: the other algorithms; {problems}"
    for courses, name, subject in (
        (evaluations, "gap-evaluations", "evaluations"),
        (seconds, "gap-seconds", "CPU time (s)"),
    ):
        draw_gaps(
            courses,
            place / f"{name}.png",
            title=f"Gap to the proven optimum by {subject}",
            facts=facts,
            axis_label=subject,
        )
    by_name = {name: comparison.gaps(name, PICTURED) for name in comparison.names}
    gaps = {
        case: {name: by_name[name][case] for name in comparison.names if case in by_name[name]}
        for case in comparison.cases
    }
    title = f"Gap to the proven optimum after {PICTURED:,} evaluations"
    draw_cases(gaps, place / "problems.png", title=title, facts="median over seeds; white: within 1 %")


def to_csv(comparison: Comparison) -> str:
    """Return a CSV line per run: its gaps, and when it came within `SOLVED_GAP` of the optimum."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    gap_columns = [f"gap_after_{count}" for count in COUNTS] + [f"gap_after_{time:g}_s" for time in TIMES]
    writer.writerow(
        ["problem", "kind", "algorithm", "seed", "optimum_s", "best_s", "gap", *gap_columns, "evaluations_to_1_percent",
         "seconds_to_1_percent", "evaluations", "considered", "cpu_seconds", "proven"]
    )  # fmt: skip
    for name in comparison.names:
        for case in comparison.cases:
            for run in comparison.runs[name][case]:
                limits = [(count, 0) for count in COUNTS] + [(time, 1) for time in TIMES]
                gaps = [comparison.gap(run), *(comparison.gap(run, limit, column) for limit, column in limits)]
                near_optimum = comparison.optimum[case] * (1 + SOLVED_GAP)
                first_near = next(
                    ((count, elapsed) for count, elapsed, time in run.history if time <= near_optimum), ("", "")
                )
                writer.writerow(
                    [case, comparison.kinds[case], name, "" if run.seed is None else run.seed,
                     f"{comparison.optimum[case]:.9g}", f"{run.best:.9g}",
                     *(f"{gap:.6g}" if isfinite(gap) else "" for gap in gaps), *first_near,
                     run.evaluations, run.considered, f"{run.seconds:.3f}", str(run.proven).lower()]
                )  # fmt: skip
    return text.getvalue()


def compare(
    place: Path, rounds: int, progress: Callable[[str], None], cases: Sequence[Case] = CASES
) -> Mapping[str, list[SearchRun]]:
    """Make the runs that ``runs.jsonl`` in a folder lacks, append each as it is made, and return all by problem."""
    file = place / "runs.jsonl"
    known_runs = read_runs(file)
    write(file, "".join(map(to_line, known_runs)))
    runs_by_case: dict[str, list[SearchRun]] = {
        case.name: [run for run in known_runs if run.case == case.name] for case in cases
    }
    # a row is flushed as soon as it is made, so that an interruption loses only the current run
    with open(file, "a", encoding="utf-8") as runs_file:
        for number, case in enumerate(cases, 1):
            for run in run_case(case, rounds, runs_by_case[case.name]):
                runs_by_case[case.name].append(run)
                runs_file.write(to_line(run))
                runs_file.flush()
                seed = "" if run.seed is None else f" with seed {run.seed}"
                progress(f"problem {number} of {len(cases)}, {case.name}: {run.algorithm}{seed}, {run.seconds:.1f} s")
    return runs_by_case


def write_page(
    place: str, rounds: int, progress: Callable[[str], None], cases: Sequence[Case] = CASES
) -> tuple[str, ...]:
    """Write the page, its pictures and tables into a folder; return the problems without a proven optimum.

    Raises
    ------
    ValueError
        Where the folder cannot be written, or no problem has a proof.
    """
    target = make_folder(place)
    runs_by_case = compare(target, rounds, progress, cases)
    comparison = Comparison([run for runs in runs_by_case.values() for run in runs], cases)
    if not comparison.cases:
        raise ValueError(f"a comparison needs a problem whose optimum {PROVING} proves, met none of {len(cases)}")
    draw_pictures(comparison, target)
    write(target / "results.csv", to_csv(comparison))
    write(target / "README.md", format_page(comparison))
    return tuple(case.name for case in cases if case.name not in comparison.cases)


def main(arguments: Sequence[str]) -> int:
    """Write the page into the folder of the command line; return the exit code."""
    cases = WIDE_CASES if WIDE in arguments else CASES
    other_arguments = [argument for argument in arguments if argument != WIDE]
    rounds, place = (
        (other_arguments[0], other_arguments[-1])
        if len(other_arguments) == 2
        else (str(ROUNDS), "".join(other_arguments))
    )
    if (
        len(other_arguments) not in (1, 2)
        or place.startswith("-")
        or not (rounds.isdecimal() and 1 <= int(rounds) <= MOST_ROUNDS)
    ):
        note(f"usage: python -m tests.studies.search_comparison [{WIDE}] [ROUNDS, 1 to {MOST_ROUNDS}] FOLDER")
        return BAD_INPUT
    ticker = Ticker()
    try:
        unproven_names = write_page(place, int(rounds), ticker, cases)
    except ValueError as error:
        note(str(error))
        return BAD_INPUT
    except KeyboardInterrupt:
        note(f"interrupted; the runs that were made are in {Path(place) / 'runs.jsonl'}")
        return INTERRUPTED
    finally:
        ticker.clear()
    for name in unproven_names:
        note(f"{name} is left out: its optimum was not proven")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
