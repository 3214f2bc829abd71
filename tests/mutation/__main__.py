"""Mutation scores: ``python -m tests.mutation [FILE...] [--mutants N] [--seed S] [--function NAME] [--out FILE]``.

Draws mutants of files, runs the tests that `TESTS` names for each, and writes which mutants no test has noticed, as
JSON. Those that `EQUIVALENT` names with a reason are counted apart.
"""

import argparse
import json
import sys
from pathlib import Path
from random import Random
from typing import Any

from .equivalent import EQUIVALENT
from .mutants import Mutant, mutants
from .tests_of import TESTS
from .trial import Bench, Outcome, copied

ROOT = Path(__file__).parents[2]


def drawn(source: str, path: str, number: int, seed: int, function: str = "") -> list[Mutant]:
    """Return so many mutants of a file, of one function where one is named, by chance."""
    every = [each for each in mutants(source) if function in ("", *each.function.split("."))]
    chosen = Random(f"{seed} {path}").sample(range(len(every)), min(number, len(every)))
    return [every[index] for index in sorted(chosen)]


def score(bench: Bench, path: str, chosen: list[Mutant]) -> dict[str, Any]:
    """Return what the tests of a file say of mutants of it."""
    counts, survivors = dict.fromkeys(Outcome, 0), []
    for mutant in chosen:
        outcome = bench.outcome(mutant.source)
        counts[outcome] += 1
        print(f"{path}:{mutant.line}: {mutant.was} -> {mutant.now}: {outcome}", file=sys.stderr, flush=True)
        if outcome is Outcome.SURVIVED:
            was, now = mutant.change(bench.original)
            why = EQUIVALENT.get((path, was, now), "")
            survivors.append({"line": mutant.line, "was": was, "now": now, "equivalent": why})
    found, equivalent = len(chosen) - len(survivors), sum(bool(each["equivalent"]) for each in survivors)
    return {
        "mutants": len(chosen),
        **counts,
        "equivalent": equivalent,
        "score": found / max(len(chosen), 1),
        "score_without_equivalent": found / max(len(chosen) - equivalent, 1),
        "seconds_of_tests": round(bench.seconds, 1),
        "survivors": survivors,
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description="Mutation scores of files.")
    parser.add_argument("files", nargs="*", default=list(TESTS), metavar="FILE")
    parser.add_argument("--mutants", type=int, default=15, help="how many a file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--function", default="", help="only of this function")
    parser.add_argument("--out", type=Path, help="where the result goes, instead of standard output")
    options = parser.parse_args()
    if unknown := [path for path in options.files if path not in TESTS]:
        parser.error(f"{unknown[0]}: tests/mutation/tests_of.py names the tests of {', '.join(TESTS)}")
    result = {}
    with copied(ROOT) as tree:
        for path in options.files:
            bench = Bench(tree, path, TESTS[path])
            result[path] = score(
                bench, path, drawn(bench.original, path, options.mutants, options.seed, options.function)
            )
            if options.out:  # what is known so far
                options.out.write_text(json.dumps({"seed": options.seed, "files": result}, indent=1) + "\n", "utf-8")
    if not options.out:
        print(json.dumps({"seed": options.seed, "files": result}, indent=1))


if __name__ == "__main__":
    main()
