"""Mutants that no test can notice, and why."""

EQUIVALENT: dict[tuple[str, str, str], str] = {}
"""By file, what its line was and what it is now."""
