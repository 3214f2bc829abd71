"""``python -m tests.endurance.interrupt_trials``: commands are interrupted, each at a moment that a seed draws.

A moment is drawn uniformly over what the command takes undisturbed, the start of the process and its imports included.
After every interrupt the process is gone in time without a traceback, nothing it started is left, every file is whole,
the plan of a search is one that simulates to the time in its journal, and the search goes on from its journal to the
answer of the undisturbed run.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from meshwise.scenarios.loader import load
from meshwise.scenarios.scenario import Scenario
from meshwise.simulator.brief import to_full_text
from meshwise.strategies.plan.plan import Plan

from .interruption import Interruption, interrupt, whole_run

PLAN, JOURNAL = "plan.json", "journal.jsonl"
_COLUMNS = "{:<14}  {:>5}  {:>8}  {:>8}  {:>8}  {:>5}  {}"
_HEAD = ("command", "trial", "at", "gone in", "cpu", "code", "faults")


@dataclass(frozen=True, slots=True)
class Command:
    """A command to interrupt.

    Parameters
    ----------
    limit
        Seconds within which an interrupt must have ended it.
    repeats
        Endings of files that have the same bytes in every run.
    own
        Whether other files than those of an undisturbed run may be there: what ranks tell each other.
    """

    arguments: tuple[str, ...]
    limit: float = 2.0
    repeats: tuple[str, ...] = ()
    own: bool = False


_SEARCH = ("--out", PLAN, "--resume", JOURNAL)
_DRAWN = ("search", "local/dp2-tp2-pp2", "--algorithm", "random", "--budget", "8", *_SEARCH)
COMMANDS = {
    "search": Command(("search", "local/dp2-tp2-pp2", *_SEARCH)),
    "search-random": Command(_DRAWN),
    "search-workers": Command((*_DRAWN, "--workers", "2")),
    "compare": Command(("compare", "local/dp2", "--budget", "5", "--out", "compared", "--report", "page.html")),
    "simulate": Command(
        ("simulate", "megatron/gpt-18b-256-a100", "--timeline", "s.png", "--trace", "s.json", "--memory", "m.svg"),
        repeats=(".png", ".json", ".svg"),
    ),
    "explain": Command(("explain", "local/dp2-tp2-pp2", "--report", "page.html", "--front", "front.png")),
    "execute": Command(("execute", "local/dp2", "--steps", "5", "--out", "run"), limit=5.0, own=True),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """An interrupt of a command, and all that is not as it should be."""

    name: str
    interruption: Interruption
    faults: tuple[str, ...]


def trials(names: Sequence[str], count: int, seed: int, *, busy: bool = False) -> Iterator[Outcome]:
    """Yield what came of every interrupt; trial ``i`` of a seed is the same fraction of the run for any number.

    On a ``busy`` machine limits are of CPU time.
    """
    for name in names:
        command = COMMANDS[name]
        with tempfile.TemporaryDirectory(prefix="meshwise-") as place:
            whole = Path(place)
            seconds = whole_run(command.arguments, whole)
            for index in range(count):
                with tempfile.TemporaryDirectory(prefix="meshwise-") as other:
                    folder = Path(other)
                    moment = Random(f"{seed} {name} {index}").uniform(0.0, seconds)
                    found = interrupt(command.arguments, folder, moment)
                    yield Outcome(name, found, (*found.faults(command.limit, busy=busy), *left(command, folder, whole)))


def left(command: Command, folder: Path, whole: Path) -> Iterator[str]:
    """Yield what is wrong with the files that a command left; ``whole`` has those of the undisturbed run."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder)
        reference = whole / name
        if path.name.startswith(".") or not (reference.exists() or command.own):
            yield f"{name} is left"
        elif not command.own and not is_whole(path):
            yield f"{name} is not whole"
        elif path.suffix in command.repeats and path.read_bytes() != reference.read_bytes():
            yield f"{name} differs from that of a whole run"
    if PLAN in command.arguments:
        yield from searched(command, folder, whole)


def is_whole(path: Path) -> bool:
    """Return whether a file has an end: JSON parses, pictures and pages are closed, lines of tables end."""
    content = path.read_bytes()
    ends: dict[str, Callable[[], bool]] = {
        ".png": lambda: content.endswith(b"IEND\xaeB`\x82"),
        ".svg": lambda: content.rstrip().endswith(b"</svg>"),
        ".html": lambda: content.rstrip().endswith(b"</html>"),
        ".csv": lambda: content.endswith(b"\n"),
        ".jsonl": lambda: content.endswith(b"\n") and all(map(_parses, content.splitlines())),
        ".json": lambda: _parses(content),
    }
    return ends[path.suffix]()


def _parses(content: bytes) -> bool:
    try:
        json.loads(content)
    except ValueError:
        return False
    return True


def searched(command: Command, folder: Path, whole: Path) -> Iterator[str]:
    """Yield what is wrong with the plan and the journal of a search."""
    plan_file, journal = folder / PLAN, folder / JOURNAL
    times = _times(journal)
    scenario = load(command.arguments[1])
    if plan_file.exists():
        plan = Plan.from_json(json.loads(plan_file.read_bytes()))
        if scenario.simulate(plan).step_time != times.get(sha256(to_full_text(plan).encode()).hexdigest()):
            yield "the plan does not simulate to the time in the journal"
    if journal.exists():
        yield from _resumed(command, scenario, journal, whole)


def _resumed(command: Command, scenario: Scenario, journal: Path, whole: Path) -> Iterator[str]:
    options = dict(zip(command.arguments[2::2], command.arguments[3::2], strict=False))
    budget = int(options["--budget"]) if "--budget" in options else None
    try:
        again = scenario.search(options.get("--algorithm"), budget=budget, resume=journal)
    except ValueError as error:
        yield f"the search does not go on: {error}"
        return
    if again.best is None or again.best.plan != Plan.from_json(json.loads((whole / PLAN).read_bytes())):
        yield "the search does not go on to the plan of an undisturbed one"
    if list(_times(journal).items()) != list(_times(whole / JOURNAL).items()):
        yield "the search does not go on to the journal of an undisturbed one"


def _times(journal: Path) -> dict[str, float]:
    """Return the step times in a journal by the digest of their plans, in order."""
    rows = [json.loads(line) for line in journal.read_bytes().splitlines()[1:]] if journal.exists() else []
    return {row["plan"]: row["step_time"] for row in rows}


def to_json(outcomes: Sequence[Outcome], seed: int) -> dict[str, Any]:
    """Return all trials as JSON-ready data, with the load of the machine."""
    rows = [{"name": each.name} | asdict(each.interruption) | {"faults": list(each.faults)} for each in outcomes]
    held = sum(not each.faults for each in outcomes)
    return {"seed": seed, "trials": len(rows), "held": held, "load": os.getloadavg()[0], "rows": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials, print a line for each and write JSON after each; return 0 where all held, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.endurance.interrupt_trials", description=__doc__)
    parser.add_argument("--trials", type=int, default=50, help="interrupts of every command")
    parser.add_argument("--commands", default=",".join(COMMANDS), help="which, with commas between")
    parser.add_argument("--seed", type=int, default=0, help="draws the moments")
    parser.add_argument("--busy", action="store_true", help="hold limits against CPU time: others use the machine too")
    parser.add_argument("--out", type=Path, help="write all that was seen (.json)")
    given = parser.parse_args(arguments)
    names = given.commands.split(",")
    if unknown := [name for name in names if name not in COMMANDS]:
        parser.error(f"--commands are of {', '.join(COMMANDS)}, met {unknown[0]}")
    if given.trials < 1:
        parser.error(f"--trials is at least 1, met {given.trials}")
    if given.out is not None and not given.out.parent.is_dir():
        parser.error(f"--out is in a folder that exists, met {given.out}")
    print(_COLUMNS.format(*_HEAD))
    outcomes = []
    for outcome in trials(names, given.trials, given.seed, busy=given.busy):
        outcomes.append(outcome)
        print(_line(len(outcomes) % given.trials or given.trials, outcome), flush=True)
        if given.out is not None:
            given.out.write_text(json.dumps(to_json(outcomes, given.seed), indent=1) + "\n")
    for name in names:
        print(_summary(name, [each for each in outcomes if each.name == name]))
    return 0 if not any(outcome.faults for outcome in outcomes) else 1


def _line(number: int, outcome: Outcome) -> str:
    found = outcome.interruption
    seconds, cpu = f"{found.seconds:.2f} s", f"{found.cpu_seconds:.2f} s"
    faults = "; ".join(outcome.faults) or "none"
    return _COLUMNS.format(outcome.name, number, f"{found.moment:.2f} s", seconds, cpu, found.code, faults)


def _summary(name: str, outcomes: Sequence[Outcome]) -> str:
    held = sum(not outcome.faults for outcome in outcomes)
    met = [outcome.interruption for outcome in outcomes if not outcome.interruption.ended_before]
    early = sum(not each.in_program for each in met)
    text = f"{name}: {held} of {len(outcomes)} hold; {len(met)} met it running, {early} before its first module"
    if met:
        for word, values in (("", [each.seconds for each in met]), ("CPU ", [each.cpu_seconds for each in met])):
            text += f"; gone in {median(values):.2f} s {word}(median), {max(values):.2f} s at most"
    return text


if __name__ == "__main__":
    sys.exit(main())
