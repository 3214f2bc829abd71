"""A page that compares the default search with published recipes and with what an engineer types first.

Run ``python -m scenarios.recipe_comparison [--seconds S] [--only NAME,...] [--out FOLDER]`` to write
``recipes.md`` and ``recipes.jsonl`` into a folder, by default ``reports/search``. Every search has S seconds of wall
time, 20 by default.
Each problem is kept as it is done: the same command goes on after an end of any kind, and makes only what is missing
or was made by another version of the program or with other seconds.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from pathlib import Path

from executor.exit_codes import INTERRUPTED
from reports.document import Section, to_markdown
from scenarios.console import BAD_INPUT, Ticker, note
from scenarios.fields import nearest
from scenarios.files import folder, write
from scenarios.recipe_runs import SLACK, Case, Comparison, cases, compare_case, read, to_line
from scenarios.recipes import recipes
from simulator.units import format_time

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
            "one simulation with one rule of fitting. Written by python -m scenarios.recipe_comparison; "
            "every row is in recipes.jsonl.",
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
    parser = argparse.ArgumentParser("python -m scenarios.recipe_comparison", description=__doc__.splitlines()[0])
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
