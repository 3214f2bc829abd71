"""Mutants that no test can notice, and why."""

from .mutants import Mutant

EQUIVALENT: dict[tuple[str, str, str, str], str] = {}
"""By file, function, what was there and what is there now."""


def reason(path: str, mutant: Mutant) -> str:
    """Return why a mutant does as the original; empty where it does not."""
    return EQUIVALENT.get((path, mutant.function, mutant.was, mutant.now), "")
