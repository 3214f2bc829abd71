"""A page that compares the default search with published recipes and with what an engineer types first.

Run ``python -m tests.studies.recipe_comparison [--seconds S] [--only NAME,...] [--out FOLDER]`` to write
``recipes.md`` and ``recipes.jsonl`` into a folder, by default ``reports/search``. Every search has S seconds of wall
time, 20 by default. Every problem is stored as it is done: the same command continues after an interruption, and makes
only the rows that are missing or were made by another version of the program or with other seconds.

A problem has three kinds of plan: of the default search, its own published one, and those that an engineer types. The
same simulation and the same rule of fitting judge all of them.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from hashlib import sha256
from math import inf, isfinite
from pathlib import Path

from meshwise.executor.launch.processes import INTERRUPTED
from meshwise.reports.document import Section, to_markdown
from meshwise.scenarios.console import BAD_INPUT, Ticker, note
from meshwise.scenarios.files.errors import ScenarioError, suggest_nearest
from meshwise.scenarios.files.library import find_root, find_scenario, list_names
from meshwise.scenarios.files.results import make_folder, write
from meshwise.scenarios.fitting import start_timer
from meshwise.scenarios.interchange.targets import list_trainers
from meshwise.scenarios.intervals import FIGURES
from meshwise.scenarios.launches import fastest_runnable, list_launches
from meshwise.scenarios.loader import load, read_scenario
from meshwise.scenarios.recipes import FILE as RECIPES
from meshwise.scenarios.recipes import Recipe, list_recipe_layouts, load_recipes
from meshwise.scenarios.scenario import Measured, Scenario
from meshwise.scenarios.search_journal import compute_cost_model_version
from meshwise.simulator.models.transformer import Transformer
from meshwise.simulator.units import format_time
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.evaluation import CostModel
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.starts import engineer_layouts

SLACK = 1e-3
"""Fraction by which the search may be slower than another plan before it counts as slower."""
_LOCAL_SCENARIOS = ("local/", "operators/", "starter")
"""Prefixes of library scenarios that are not trained on a cluster: those of this machine, and a template."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The simulated result of one plan.

    Parameters
    ----------
    name
        Name of the plan.
    plan
        Description of the plan in one line.
    step_time
        Seconds; ``None`` where the plan does not fit.
    peak_memory
        Bytes of the fullest device.
    """

    name: str
    plan: str
    step_time: float | None
    peak_memory: float

    @property
    def fits(self) -> bool:
        """Whether the plan fits."""
        return self.step_time is not None


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """The best plan of the default search: step time (s), peak memory (bytes), proven gap and number of evaluations.

    ``gap`` is 0 for a proven optimum and ``None`` without a proof.
    """

    plan: str
    step_time: float
    peak_memory: float
    gap: float | None
    evaluations: int


@dataclass(frozen=True, slots=True)
class SayablePlan:
    """The fastest plan found that a trainer can express and that fits by its conventions: step time (s) and bytes."""

    trainer: str
    plan: str
    step_time: float
    peak_memory: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The plans of one problem beside each other.

    Parameters
    ----------
    digest
        Hash of the stated problem and of the program: a row with another hash is made again.
    seconds
        Wall time of the search.
    capacity
        Usable memory of the smallest device, in bytes.
    ran, published
        Whether a recipe ran, and its published step time in seconds; ``None`` for a library scenario.
    found
        The plan of the search; ``None`` where nothing fits.
    own
        The plan that the recipe or the scenario states.
    dozen, carried
        The fastest plan that an engineer types, and the fastest of all recipes' plans on this problem; ``None`` where
        none fits.
    trainers
        Trainers that can express the search's plan.
    sayable
        The fastest plan found that fits in a trainer, where the search's plan fits in none; else ``None``.
    """

    name: str
    digest: str
    seconds: float
    capacity: float
    ran: bool | None
    published: float | None
    found: SearchOutcome | None
    own: Outcome | None
    dozen: Outcome | None
    carried: Outcome | None
    trainers: tuple[str, ...]
    sayable: SayablePlan | None

    @property
    def rivals(self) -> list[Outcome]:
        """The plans that fit besides that of the search, fastest first."""
        stated_outcomes = [rival for rival in (self.own, self.dozen, self.carried) if rival is not None and rival.fits]
        return sorted(stated_outcomes, key=lambda rival: rival.step_time or inf)

    @property
    def ratio(self) -> float | None:
        """The search's step time over the fastest of the others; ``None`` where either has no plan."""
        if not self.rivals:
            return None
        fastest = self.rivals[0].step_time
        return None if fastest is None or self.found is None else self.found.step_time / fastest

    @property
    def is_slower(self) -> bool:
        """Whether another plan is faster than the search's by more than `SLACK`, or the search found none."""
        return bool(self.rivals) and (self.ratio is None or self.ratio > 1 + SLACK)


@dataclass(frozen=True, slots=True)
class Case:
    """A problem to compare on: a published recipe, or a scenario of the library by name."""

    name: str
    recipe: Recipe | None = None

    def scenario(self) -> Scenario:
        """Return the scenario with its own plan, where it states one."""
        return load(self.name) if self.recipe is None else load_recipe(self.recipe)

    def digest(self) -> str:
        """Return the digest of all that a comparison depends on: the stated problem, and the program that judges it."""
        problem_bytes = find_scenario(self.name).read_bytes() if self.recipe is None else self.recipe.dump_record()
        return sha256(compute_cost_model_version().encode() + _read_judges() + problem_bytes).hexdigest()[:16]


@lru_cache(maxsize=1)
def _read_judges() -> bytes:
    """Return the files, besides the cost model, that a comparison depends on: margins, recipes and trainers."""
    words = sorted((find_root() / "interchange").glob("*.py"))
    modules = (find_root().parent / module_path for module_path in ("scenarios/intervals.py", "scenarios/launches.py"))
    judges = (find_root() / FIGURES, find_root() / RECIPES, *modules, *words)
    return b"".join(path.read_bytes() for path in judges)


def load_recipe(recipe: Recipe) -> Scenario:
    """Return a recipe as a scenario with its own plan.

    Raises
    ------
    ScenarioError
        Lists every fault in the record, with file, line and column.
    """
    try:
        scenario = read_scenario(recipe.to_document())
    except ScenarioError:
        scenario = read_scenario(recipe.to_document(with_places=True))
    problem = scenario.problem
    if recipe.device_memory is not None:
        memory = recipe.device_memory
        resized_cluster = problem.cluster.with_accelerators(lambda accelerator: replace(accelerator, memory=memory))
        problem = replace(problem, cluster=resized_cluster)
    measurement = (
        Measured(recipe.measured.find_step_time(problem), str(recipe.source)) if recipe.measured is not None else None
    )
    return replace(scenario, problem=problem, measured=measurement, assumptions=(*scenario.assumptions, *recipe.notes))


def list_cases() -> tuple[Case, ...]:
    """Return the cases of all recipes, and of the library scenarios that are trained on a cluster."""
    library = (Case(name) for name in list_names() if not name.startswith(_LOCAL_SCENARIOS))
    return (*(Case(recipe.name, recipe) for recipe in load_recipes()), *library)


def compare_case(case: Case, seconds: float) -> Comparison:
    """Return the comparison of one problem; its search has ``seconds`` of wall time.

    Raises
    ------
    KeyboardInterrupt
        Where the user ends the search: its best plan so far is no result.
    """
    scenario = case.scenario()
    problem = scenario.problem
    result = scenario.search(seconds=seconds)
    if result.interrupted:
        raise KeyboardInterrupt
    costs = SimulatedCost(problem)
    best, search_outcome = result.best, None
    if best is not None:
        evaluation = best.evaluation
        search_outcome = SearchOutcome(
            best.plan.describe(), evaluation.step_time, evaluation.peak_memory, result.gap, result.evaluations
        )
    recipe = case.recipe
    measurement = recipe.measured if recipe is not None else None
    return Comparison(
        name=case.name,
        digest=case.digest(),
        seconds=seconds,
        capacity=min(problem.usable_memory(accelerator) for accelerator in problem.cluster.accelerators),
        ran=None if recipe is None else recipe.ran,
        published=None if measurement is None else measurement.find_step_time(problem),
        found=search_outcome,
        own=None if scenario.plan is None else evaluate_plan("its own plan", scenario.plan, costs),
        dozen=find_fastest(problem, engineer_layouts(problem), costs),
        carried=find_fastest(problem, list_recipe_layouts(problem), costs),
        trainers=() if best is None else list_trainers(scenario.spec, problem, best.plan),
        sayable=None if best is None else _find_sayable(scenario, best.plan, seconds),
    )


def _find_sayable(scenario: Scenario, plan: Plan, seconds: float) -> SayablePlan | None:
    """Return the fastest plan found in ``seconds`` that fits in a trainer; None where ``plan`` itself fits in one.

    Only decoders have one. Where the scenario names a framework, its conventions price the plans of all trainers.
    """
    if not isinstance(scenario.spec, Transformer) or any(launch.fits for launch in list_launches(scenario, plan)):
        return None
    fastest = fastest_runnable(scenario, start_timer(seconds))
    if fastest is None:
        return None
    return SayablePlan(fastest.trainer, fastest.plan.describe(), fastest.step_time, fastest.peak_memory)


def evaluate_plan(name: str, plan: Plan, costs: CostModel) -> Outcome:
    """Return the simulated outcome of one plan."""
    evaluation = costs.evaluate(plan)
    time = evaluation.step_time if evaluation.fits else None
    return Outcome(name, plan.describe(), time, evaluation.peak_memory)


def find_fastest(problem: Problem, named_layouts: Iterable[tuple[str, Layout]], costs: CostModel) -> Outcome | None:
    """Return the fastest of the layouts that fit, or None; layouts whose lower bound is higher are not simulated."""
    plans = [(name, complete(problem, layout)) for name, layout in named_layouts]
    ordered_plans = sorted(
        ((costs.plan_bound(plan), name, plan) for name, plan in plans if costs.fits(plan)), key=lambda row: row[0]
    )
    best: Outcome | None = None
    for bound, name, plan in ordered_plans:
        if best is not None and best.step_time is not None and bound >= best.step_time:
            break
        candidate = evaluate_plan(name, plan, costs)
        if best is None or (candidate.step_time or inf) < (best.step_time or inf):
            best = candidate
    return best


def read_comparisons(path: Path) -> Iterator[Comparison]:
    """Yield the comparisons in a file; lines of other versions of the program and incomplete lines are dropped."""
    if not path.is_file():
        return
    for line in path.read_text("utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
            parts = {name: Outcome(**row[name]) if row[name] else None for name in ("own", "dozen", "carried")}
            search_outcome = SearchOutcome(**row["found"]) if row["found"] else None
            sayable = SayablePlan(**row["sayable"]) if row["sayable"] else None
            yield Comparison(
                **row | parts | {"found": search_outcome, "trainers": tuple(row["trainers"]), "sayable": sayable}
            )
        except (ValueError, TypeError, KeyError):
            continue


def to_line(row: Comparison) -> str:
    """Return a comparison as one line of JSON."""
    return json.dumps(asdict(row)) + "\n"


TITLE = "The default search, published recipes and an engineer's dozen"
SECONDS = 20.0
OUT = "reports/search"
GIB = 2**30
MOST_REFUSED = 2
"""Aim for the number of recipes that ran and that the simulation refuses for memory."""
Row = tuple[str, ...]


def format_page(rows: Sequence[Comparison]) -> str:
    """Return the page as Markdown."""
    return to_markdown(TITLE, tuple(_build_sections(rows)))


def _build_sections(rows: Sequence[Comparison]) -> Iterator[Section]:
    slower, refused = [row for row in rows if row.is_slower], [row for row in rows if _is_refused(row)]
    ratios = sorted(row.ratio for row in rows if row.ratio is not None)
    budgets = ", ".join(f"{seconds:g}" for seconds in sorted({row.seconds for row in rows}))
    yield Section(
        "What this is",
        (
            f"{len(rows)} problems: {sum(row.ran is not None for row in rows)} published recipes and the scenarios of "
            "the library. Each was laid out by the default search, by its own plan, by the plans that an engineer "
            "types first for that model and machine, and by all recipes' plans carried over to it. All were judged by "
            "one simulation with one rule of fitting. Written by "
            "python -m tests.studies.recipe_comparison; every row is in recipes.jsonl.",
            f"Seconds of wall time of a search: {budgets}."
            " Gap: how far the best plan may be above the optimum of the searched space; none where nothing is proven.",
            f"Search over others: the step of the search's plan over that of the fastest other plan. "
            f"{_describe_spread(ratios)} It is above {1 + SLACK:g} in {len(slower)} problems{_list_names(slower)}.",
            "Where the search's plan of a transformer fits in no trainer that can say it, by the conventions of that "
            "trainer or of the framework that the scenario names, the last column has the fastest plan that does.",
            f"{len(refused)} of {sum(row.ran is True for row in rows)} recipes that ran are refused for memory "
            f"(at most {MOST_REFUSED} is the aim){_list_names(refused)}.",
        ),
    )
    yield Section("By problem", (), (_HEAD, *map(_build_row, rows)))
    own_rows = [row for row in rows if row.ran is not None and row.own is not None]
    if own_rows:
        text = "Published is what the publisher measured or what follows from it; memory is of the fullest device."
        yield Section("Recipes as they were published", (text,), (_RECIPE_HEAD, *map(_build_recipe_row, own_rows)))
    if refused:
        by_name = {recipe.name: recipe for recipe in load_recipes()}
        table = [
            (row.name, _format_memory(row.own, row.capacity), " ".join(by_name[row.name].notes)) for row in refused
        ]
        yield Section("Recipes that ran and are refused", (), (("recipe", "memory, GiB", "what is open"), *table))


_HEAD = (
    "problem", "plan of the search", "step", "memory, GiB", "gap", "fastest other plan", "its step",
    "search over others", "trainers that can say the search's plan", "where it fits in none: the fastest that does",
)  # fmt: skip
_RECIPE_HEAD = (
    "recipe", "its step", "memory, GiB", "fits", "published", "simulated over published", "search",
    "search over recipe", "fastest of the dozen", "its step",
)  # fmt: skip


def _build_row(row: Comparison) -> Row:
    rival = row.rivals[0] if row.rivals else None
    search_outcome = row.found
    return (
        row.name,
        "nothing fits" if search_outcome is None else search_outcome.plan,
        "" if search_outcome is None else format_time(search_outcome.step_time),
        "" if search_outcome is None else _format_gib(search_outcome.peak_memory, row.capacity),
        "" if search_outcome is None or search_outcome.gap is None else f"{100 * search_outcome.gap:.1f} %",
        "none fits" if rival is None else rival.name,
        "" if rival is None or rival.step_time is None else format_time(rival.step_time),
        "" if row.ratio is None else f"{row.ratio:.3f}",
        ", ".join(row.trainers) or "none",
        _describe_trainers(row),
    )


def _describe_trainers(row: Comparison) -> str:
    """Return the plan that fits in a trainer where the search's fits in none, and its time over the search's."""
    sayable, search_outcome = row.sayable, row.found
    if sayable is None or search_outcome is None:
        return ""
    slower = f"{sayable.step_time / search_outcome.step_time:.2f} of the search's"
    return f"{sayable.trainer}: {sayable.plan}: {format_time(sayable.step_time)}, {slower}"


def _build_recipe_row(row: Comparison) -> Row:
    own_outcome, search_outcome, dozen = row.own, row.found, row.dozen
    assert own_outcome is not None  # rows without a plan of their own are not shown
    time = own_outcome.step_time
    return (
        row.name,
        "" if time is None else format_time(time),
        _format_memory(own_outcome, row.capacity),
        "yes" if own_outcome.fits else "no",
        "" if row.published is None else format_time(row.published),
        "" if row.published is None or time is None else f"{time / row.published:.2f}",
        "" if search_outcome is None else format_time(search_outcome.step_time),
        "" if search_outcome is None or time is None else f"{search_outcome.step_time / time:.2f}",
        "none fits" if dozen is None else dozen.name,
        "" if dozen is None or dozen.step_time is None else format_time(dozen.step_time),
    )


def _is_refused(row: Comparison) -> bool:
    return bool(row.ran) and row.own is not None and not row.own.fits


def _format_memory(own_memory: object, capacity: float) -> str:
    return _format_gib(getattr(own_memory, "peak_memory", float("nan")), capacity)


def _format_gib(peak: float, capacity: float) -> str:
    return f"{peak / GIB:.1f} of {capacity / GIB:.1f}" if isfinite(peak) else ""


def _describe_spread(ratios: Sequence[float]) -> str:
    if not ratios:
        return ""
    return f"Median {ratios[len(ratios) // 2]:.3f}, least {ratios[0]:.3f}, greatest {ratios[-1]:.3f}."


def _list_names(rows: Sequence[Comparison]) -> str:
    return f": {'; '.join(row.name for row in rows)}" if rows else ""


def compare(
    place: Path, chosen_cases: Sequence[Case], seconds: float, progress: Callable[[str], None]
) -> list[Comparison]:
    """Make the comparisons that ``recipes.jsonl`` in a folder lacks, append each as it is made, and return all.

    Rows of problems that are not of ``chosen_cases`` stay in the file and in the result, if the program still has the
    problem.
    """
    file = place / "recipes.jsonl"
    known = {case.name: case for case in list_cases()}
    known_rows = {
        row.name: row for row in read_comparisons(file) if row.name in known and row.digest == known[row.name].digest()
    }
    write(file, "".join(map(to_line, known_rows.values())))
    with open(file, "a", encoding="utf-8") as rows_file:
        for number, case in enumerate(chosen_cases, 1):
            if case.name in known_rows and known_rows[case.name].seconds == seconds:
                continue
            progress(f"problem {number} of {len(chosen_cases)}: {case.name}")
            known_rows[case.name] = compare_case(case, seconds)
            rows_file.write(to_line(known_rows[case.name]))
            rows_file.flush()
    write(file, "".join(to_line(known_rows[name]) for name in known if name in known_rows))
    return [known_rows[name] for name in known if name in known_rows]


def select_cases(only: str | None) -> tuple[Case, ...]:
    """Return the cases selected by names or parts of names, with commas between; all cases for None.

    Raises
    ------
    ValueError
        Where a name selects no case.
    """
    known = list_cases()
    if only is None:
        return known
    exact_cases = [case for case in known if case.name == only]  # names may have commas too
    parts = [] if exact_cases else filter(None, (part.strip() for part in only.split(",")))
    for name in parts:
        matching_cases = [case for case in known if case.name == name] or [
            case for case in known if name.lower() in case.name.lower()
        ]
        if not matching_cases:
            raise ValueError(
                f"--only: no problem has {name} in its name{suggest_nearest(name, [case.name for case in known])}"
            )
        exact_cases += matching_cases
    return tuple(dict.fromkeys(exact_cases))


def main(arguments: Sequence[str]) -> int:
    """Write the page; return the exit code."""
    parser = argparse.ArgumentParser("python -m tests.studies.recipe_comparison", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=SECONDS, help="wall time of a search (%(default)g)")
    parser.add_argument("--only", help="names of problems, or parts of them, with commas between")
    parser.add_argument("--out", default=OUT, help="the folder of recipes.md and recipes.jsonl (%(default)s)")
    options = parser.parse_args(arguments)
    ticker = Ticker()
    place = Path(options.out)
    try:
        if not 0 < options.seconds < 86_400:
            raise ValueError(f"--seconds is more than 0 and less than 86400, met {options.seconds:g}")
        rows = compare(make_folder(place), select_cases(options.only), options.seconds, ticker)
        write(place / "recipes.md", format_page(rows))
    except ValueError as error:
        note(str(error))
        return BAD_INPUT
    except KeyboardInterrupt:
        note(f"interrupted; what is done is in {place / 'recipes.jsonl'}")
        return INTERRUPTED
    finally:
        ticker.clear()
    for row in filter(_is_refused, rows):
        note(f"{row.name} ran and is refused: {_format_memory(row.own, row.capacity)} GiB")
    for row in rows:
        if row.is_slower:
            note(f"{row.name}: the search is slower than {row.rivals[0].name}, {row.ratio or float('inf'):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
