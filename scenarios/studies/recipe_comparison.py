"""A page that compares the default search with published recipes and with what an engineer types first.

Run ``python -m meshwise.scenarios.studies.recipe_comparison [--seconds S] [--only NAME,...] [--out FOLDER]`` to write
``recipes.md`` and ``recipes.jsonl`` into a folder, by default ``reports/search``. Every search has S seconds of wall
time, 20 by default.
Each problem is kept as it is done: the same command goes on after an end of any kind, and makes only what is missing
or was made by another version of the program or with other seconds.

One problem laid out three ways: by the default search, by its own published plan, and by what an engineer types.

All three are judged by one simulation, with one rule of fitting, so that they can be compared.
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
from meshwise.scenarios.files.errors import ScenarioError, nearest
from meshwise.scenarios.files.library import find, names, root
from meshwise.scenarios.files.results import folder, write
from meshwise.scenarios.fitting import seconds_left
from meshwise.scenarios.interchange.targets import trainers_of
from meshwise.scenarios.intervals import FIGURES
from meshwise.scenarios.launches import fastest_runnable, launches
from meshwise.scenarios.loader import load, scenario_in
from meshwise.scenarios.recipes import FILE as RECIPES
from meshwise.scenarios.recipes import Recipe, recipe_layouts, recipes
from meshwise.scenarios.scenario import Measured, Scenario
from meshwise.scenarios.search_journal import cost_model_version
from meshwise.simulator.models.transformer import Transformer
from meshwise.simulator.units import format_time
from meshwise.strategies.cost_model import CostModel, SimulatedCost
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.starts import engineer_layouts

SLACK = 1e-3
"""Fraction by which the search may be slower than another plan before it counts as slower."""
_APART = ("local/", "operators/", "starter")
"""Scenarios of the library that are no training of a machine learning cluster: this machine's own, and a template."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the simulation says of one plan.

    Parameters
    ----------
    name
        What the plan is called.
    plan
        The plan in one line.
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
        """Whether it fits."""
        return self.step_time is not None


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """What the default search says of its best plan: seconds, bytes, the gap that it has proven, and its effort.

    ``gap`` is 0 for a proven optimum and ``None`` where nothing is proven.
    """

    plan: str
    step_time: float
    peak_memory: float
    gap: float | None
    evaluations: int


@dataclass(frozen=True, slots=True)
class Sayable:
    """The fastest plan found that a trainer can say and that fits by its conventions: its seconds a step and bytes."""

    trainer: str
    plan: str
    step_time: float
    peak_memory: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A problem with its layouts.

    Parameters
    ----------
    digest
        Hash of the problem as it is stated and of the program: a row with another one is made again.
    seconds
        Wall time that the search was given.
    ran, published
        Of a recipe: whether it ran, and the seconds of a step that the publisher states.
    found
        ``None`` where the search found nothing that fits.
    own
        The plan that the recipe or the scenario states.
    dozen, carried
        The fastest of what an engineer types, and of all recipes' plans carried over; ``None`` where none fits.
    trainers
        Trainers in whose words the search's plan can be said.
    sayable
        Where it fits in none of these by their own conventions, what was found that fits in one; ``None`` elsewhere.
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
    sayable: Sayable | None

    @property
    def others(self) -> list[Outcome]:
        """The plans that fit of those that the search did not choose, fastest first."""
        stated = [each for each in (self.own, self.dozen, self.carried) if each is not None and each.fits]
        return sorted(stated, key=lambda each: each.step_time or inf)

    @property
    def ratio(self) -> float | None:
        """The search's step time over the fastest of the others; ``None`` where either has no plan."""
        if not self.others:
            return None
        fastest = self.others[0].step_time
        return None if fastest is None or self.found is None else self.found.step_time / fastest

    @property
    def slower(self) -> bool:
        """Whether another plan is faster than the search's by more than `SLACK`, or the search found none."""
        return bool(self.others) and (self.ratio is None or self.ratio > 1 + SLACK)


@dataclass(frozen=True, slots=True)
class Case:
    """A problem to compare on: a published recipe, or a scenario of the library by name."""

    name: str
    recipe: Recipe | None = None

    def scenario(self) -> Scenario:
        """Return the scenario with its own plan, where it states one."""
        return load(self.name) if self.recipe is None else recipe_scenario(self.recipe)

    def digest(self) -> str:
        """Return the digest of the problem as it is stated, of the program, its recipes, and how memory is judged.

        Also of what says which trainers can say a plan.
        """
        stated = find(self.name).read_bytes() if self.recipe is None else self.recipe.record()
        return sha256(cost_model_version().encode() + _judges() + stated).hexdigest()[:16]


@lru_cache(maxsize=1)
def _judges() -> bytes:
    """Return what besides the cost model a comparison follows from: margins, recipes, and the words of trainers."""
    words = sorted((root() / "interchange").glob("*.py"))
    modules = (root().parent / each for each in ("scenarios/intervals.py", "scenarios/launches.py"))
    judges = (root() / FIGURES, root() / RECIPES, *modules, *words)
    return b"".join(path.read_bytes() for path in judges)


def recipe_scenario(recipe: Recipe) -> Scenario:
    """Return a recipe as a scenario with its own plan.

    Raises
    ------
    ScenarioError
        Where anything in the record is wrong; it lists everything, with file, line and column.
    """
    try:
        found = scenario_in(recipe.document())
    except ScenarioError:
        found = scenario_in(recipe.document(placed=True))
    problem = found.problem
    if recipe.device_memory is not None:
        memory = recipe.device_memory
        sized = problem.cluster.with_accelerators(lambda each: replace(each, memory=memory))
        problem = replace(problem, cluster=sized)
    measured = Measured(recipe.measured.seconds(problem), str(recipe.source)) if recipe.measured is not None else None
    return replace(found, problem=problem, measured=measured, assumptions=(*found.assumptions, *recipe.notes))


def cases() -> tuple[Case, ...]:
    """Return all recipes, and the scenarios of the library that are trained on a cluster."""
    library = (Case(name) for name in names() if not name.startswith(_APART))
    return (*(Case(recipe.name, recipe) for recipe in recipes()), *library)


def compare_case(case: Case, seconds: float) -> Comparison:
    """Return the comparison of one problem, whose search has so many seconds of wall time.

    Raises
    ------
    KeyboardInterrupt
        Where the user ends the search: what it has found so far is no result.
    """
    scenario = case.scenario()
    problem = scenario.problem
    result = scenario.search(seconds=seconds)
    if result.interrupted:
        raise KeyboardInterrupt
    costs = SimulatedCost(problem)
    best, found = result.best, None
    if best is not None:
        evaluation = best.evaluation
        found = SearchOutcome(
            best.plan.describe(), evaluation.step_time, evaluation.peak_memory, result.gap, result.evaluations
        )
    recipe = case.recipe
    measured = recipe.measured if recipe is not None else None
    return Comparison(
        name=case.name,
        digest=case.digest(),
        seconds=seconds,
        capacity=min(problem.usable(each) for each in problem.cluster.accelerators),
        ran=None if recipe is None else recipe.ran,
        published=None if measured is None else measured.seconds(problem),
        found=found,
        own=None if scenario.plan is None else outcome("its own plan", scenario.plan, costs),
        dozen=fastest(problem, engineer_layouts(problem), costs),
        carried=fastest(problem, recipe_layouts(problem), costs),
        trainers=() if best is None else trainers_of(scenario.spec, problem, best.plan),
        sayable=None if best is None else _sayable(scenario, best.plan, seconds),
    )


def _sayable(scenario: Scenario, plan: Plan, seconds: float) -> Sayable | None:
    """Return what fits in a trainer, where a plan of a decoder does in none; the search for it has so many seconds.

    Where the scenario names a framework, its conventions price the plans of all trainers.
    """
    if not isinstance(scenario.spec, Transformer) or any(launch.fits for launch in launches(scenario, plan)):
        return None
    fastest = fastest_runnable(scenario, seconds_left(seconds))
    if fastest is None:
        return None
    return Sayable(fastest.trainer, fastest.plan.describe(), fastest.step_time, fastest.peak_memory)


def outcome(name: str, plan: Plan, costs: CostModel) -> Outcome:
    """Return what the simulation says of one plan."""
    evaluation = costs.evaluate(plan)
    time = evaluation.step_time if evaluation.fits else None
    return Outcome(name, plan.describe(), time, evaluation.peak_memory)


def fastest(problem: Problem, named: Iterable[tuple[str, Layout]], costs: CostModel) -> Outcome | None:
    """Return the fastest of the layouts that fit; those whose bound is above it are not simulated."""
    plans = [(name, complete(problem, layout)) for name, layout in named]
    ordered = sorted(
        ((costs.bound(plan), name, plan) for name, plan in plans if costs.fits(plan)), key=lambda row: row[0]
    )
    best: Outcome | None = None
    for bound, name, plan in ordered:
        if best is not None and best.step_time is not None and bound >= best.step_time:
            break
        met = outcome(name, plan, costs)
        if best is None or (met.step_time or inf) < (best.step_time or inf):
            best = met
    return best


def read(path: Path) -> Iterator[Comparison]:
    """Yield the comparisons in a file of them; lines of other versions and torn ones are dropped."""
    if not path.is_file():
        return
    for line in path.read_text("utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
            parts = {name: Outcome(**row[name]) if row[name] else None for name in ("own", "dozen", "carried")}
            found = SearchOutcome(**row["found"]) if row["found"] else None
            sayable = Sayable(**row["sayable"]) if row["sayable"] else None
            yield Comparison(**row | parts | {"found": found, "trainers": tuple(row["trainers"]), "sayable": sayable})
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
"""Recipes that ran and that the simulation may refuse for memory, of all."""
Row = tuple[str, ...]


def page(rows: Sequence[Comparison]) -> str:
    """Return the page as Markdown."""
    return to_markdown(TITLE, tuple(_sections(rows)))


def _sections(rows: Sequence[Comparison]) -> Iterator[Section]:
    slower, refused = [row for row in rows if row.slower], [row for row in rows if _refused(row)]
    ratios = sorted(row.ratio for row in rows if row.ratio is not None)
    yield Section(
        "What this is",
        (
            f"{len(rows)} problems: {sum(row.ran is not None for row in rows)} published recipes and the scenarios of "
            "the library. Each was laid out by the default search, by its own plan, by the plans that an engineer "
            "types first for that model and machine, and by all recipes' plans carried over to it. All were judged by "
            "one simulation with one rule of fitting. Written by "
            "python -m meshwise.scenarios.studies.recipe_comparison; every row is in recipes.jsonl.",
            f"Seconds of wall time of a search: {', '.join(f'{each:g}' for each in sorted({r.seconds for r in rows}))}."
            " Gap: how far the best plan may be above the optimum of the searched space; none where nothing is proven.",
            f"Search over others: the step of the search's plan over that of the fastest other plan. "
            f"{_spread(ratios)} It is above {1 + SLACK:g} in {len(slower)} problems{_named(slower)}.",
            "Where the search's plan of a transformer fits in no trainer that can say it, by the conventions of that "
            "trainer or of the framework that the scenario names, the last column has the fastest plan that does.",
            f"{len(refused)} of {sum(row.ran is True for row in rows)} recipes that ran are refused for memory "
            f"(at most {MOST_REFUSED} is the aim){_named(refused)}.",
        ),
    )
    yield Section("By problem", (), (_HEAD, *map(_row, rows)))
    own = [row for row in rows if row.ran is not None and row.own is not None]
    if own:
        text = "Published is what the publisher measured or what follows from it; memory is of the fullest device."
        yield Section("Recipes as they were published", (text,), (_RECIPE_HEAD, *map(_recipe_row, own)))
    if refused:
        by_name = {recipe.name: recipe for recipe in recipes()}
        table = [(row.name, _memory(row.own, row.capacity), " ".join(by_name[row.name].notes)) for row in refused]
        yield Section("Recipes that ran and are refused", (), (("recipe", "memory, GiB", "what is open"), *table))


_HEAD = (
    "problem", "plan of the search", "step", "memory, GiB", "gap", "fastest other plan", "its step",
    "search over others", "trainers that can say the search's plan", "where it fits in none: the fastest that does",
)  # fmt: skip
_RECIPE_HEAD = (
    "recipe", "its step", "memory, GiB", "fits", "published", "simulated over published", "search",
    "search over recipe", "fastest of the dozen", "its step",
)  # fmt: skip


def _row(row: Comparison) -> Row:
    other = row.others[0] if row.others else None
    found = row.found
    return (
        row.name,
        "nothing fits" if found is None else found.plan,
        "" if found is None else format_time(found.step_time),
        "" if found is None else _gib(found.peak_memory, row.capacity),
        "" if found is None or found.gap is None else f"{100 * found.gap:.1f} %",
        "none fits" if other is None else other.name,
        "" if other is None or other.step_time is None else format_time(other.step_time),
        "" if row.ratio is None else f"{row.ratio:.3f}",
        ", ".join(row.trainers) or "none",
        _told(row),
    )


def _told(row: Comparison) -> str:
    """Return the plan that fits in a trainer where the search's fits in none, with its time over that one's."""
    said, found = row.sayable, row.found
    if said is None or found is None:
        return ""
    slower = f"{said.step_time / found.step_time:.2f} of the search's"
    return f"{said.trainer}: {said.plan}: {format_time(said.step_time)}, {slower}"


def _recipe_row(row: Comparison) -> Row:
    own, found, dozen = row.own, row.found, row.dozen
    assert own is not None  # rows without a plan of their own are not shown
    time = own.step_time
    return (
        row.name,
        "" if time is None else format_time(time),
        _memory(own, row.capacity),
        "yes" if own.fits else "no",
        "" if row.published is None else format_time(row.published),
        "" if row.published is None or time is None else f"{time / row.published:.2f}",
        "" if found is None else format_time(found.step_time),
        "" if found is None or time is None else f"{found.step_time / time:.2f}",
        "none fits" if dozen is None else dozen.name,
        "" if dozen is None or dozen.step_time is None else format_time(dozen.step_time),
    )


def _refused(row: Comparison) -> bool:
    return bool(row.ran) and row.own is not None and not row.own.fits


def _memory(own: object, capacity: float) -> str:
    return _gib(getattr(own, "peak_memory", float("nan")), capacity)


def _gib(peak: float, capacity: float) -> str:
    return f"{peak / GIB:.1f} of {capacity / GIB:.1f}" if isfinite(peak) else ""


def _spread(ratios: Sequence[float]) -> str:
    if not ratios:
        return ""
    return f"Median {ratios[len(ratios) // 2]:.3f}, least {ratios[0]:.3f}, greatest {ratios[-1]:.3f}."


def _named(rows: Sequence[Comparison]) -> str:
    return f": {'; '.join(row.name for row in rows)}" if rows else ""


def compare(place: Path, chosen: Sequence[Case], seconds: float, progress: Callable[[str], None]) -> list[Comparison]:
    """Make the comparisons that ``recipes.jsonl`` in a folder has not, add each as it is made, and return all.

    Problems of the file that are not ``chosen`` stay in it and in the result, where the program still has them.
    """
    file = place / "recipes.jsonl"
    known = {case.name: case for case in cases()}
    made = {row.name: row for row in read(file) if row.name in known and row.digest == known[row.name].digest()}
    write(file, "".join(map(to_line, made.values())))
    with open(file, "a", encoding="utf-8") as kept:
        for number, case in enumerate(chosen, 1):
            if case.name in made and made[case.name].seconds == seconds:
                continue
            progress(f"problem {number} of {len(chosen)}: {case.name}")
            made[case.name] = compare_case(case, seconds)
            kept.write(to_line(made[case.name]))
            kept.flush()
    write(file, "".join(to_line(made[name]) for name in known if name in made))
    return [made[name] for name in known if name in made]


def chosen_cases(only: str | None) -> tuple[Case, ...]:
    """Return the problems that names, or parts of names, mean; all where none are given.

    Raises
    ------
    ValueError
        Where a name means none.
    """
    known = cases()
    if only is None:
        return known
    found = [case for case in known if case.name == only]  # names may have commas too
    parts = [] if found else filter(None, (each.strip() for each in only.split(",")))
    for name in parts:
        met = [case for case in known if case.name == name] or [
            case for case in known if name.lower() in case.name.lower()
        ]
        if not met:
            raise ValueError(f"--only: no problem has {name} in its name{nearest(name, [case.name for case in known])}")
        found += met
    return tuple(dict.fromkeys(found))


def main(arguments: Sequence[str]) -> int:
    """Write the page; return the exit code."""
    parser = argparse.ArgumentParser(
        "python -m meshwise.scenarios.studies.recipe_comparison", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="wall time of a search (%(default)g)")
    parser.add_argument("--only", help="names of problems, or parts of them, with commas between")
    parser.add_argument("--out", default=OUT, help="the folder of recipes.md and recipes.jsonl (%(default)s)")
    options = parser.parse_args(arguments)
    ticker = Ticker()
    place = Path(options.out)
    try:
        if not 0 < options.seconds < 86_400:
            raise ValueError(f"--seconds is more than 0 and less than 86400, met {options.seconds:g}")
        rows = compare(folder(place), chosen_cases(options.only), options.seconds, ticker)
        write(place / "recipes.md", page(rows))
    except ValueError as error:
        note(str(error))
        return BAD_INPUT
    except KeyboardInterrupt:
        note(f"interrupted; what is done is in {place / 'recipes.jsonl'}")
        return INTERRUPTED
    finally:
        ticker.done()
    for row in filter(_refused, rows):
        note(f"{row.name} ran and is refused: {_memory(row.own, row.capacity)} GiB")
    for row in rows:
        if row.slower:
            note(f"{row.name}: the search is slower than {row.others[0].name}, {row.ratio or float('inf'):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
