"""Links fitted to a file of published collective timings."""

import json
from collections.abc import Sequence

from scenarios.errors import Fault, ScenarioError
from simulator.calibration.collective_rows import CollectiveRow
from simulator.calibration.collective_rows import Skipped as SkippedCollective
from simulator.calibration.collective_rows import read_rows as read_collective_rows
from simulator.calibration.collectives import Error, Fits, errors, fit_links

LINK_HEAD = ("source", "collective", "size", "rows", "mean", "median", "bias")

_FIRST = 64 * 2**10


def has_collectives(path: str) -> bool:
    """Return whether the first row of a file is of a collective; a file that cannot be read has none."""
    try:
        with open(path, "rb") as file:
            first = json.loads(file.readline(_FIRST))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(first, dict) and "collective" in first


def read_collectives(path: str) -> tuple[Sequence[CollectiveRow], Sequence[SkippedCollective]]:
    """Return the rows of a file that the model can be held against and the others; `ScenarioError` where none is."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            used, skipped = read_collective_rows(file)
    except OSError as error:
        raise ScenarioError((Fault(path, 0, 0, "", f"the file cannot be read: {error.strerror}"),)) from None
    if not used:
        line, reason = skipped[0]
        message = f"a file of collectives has rows that can be used, met none; {len(skipped)} skipped: {reason}"
        raise ScenarioError((Fault(path, line, 1, "", message),))
    return used, skipped


def fit_links_without(rows: Sequence[CollectiveRow], left_out: Sequence[str]) -> tuple[Fits, tuple[Error, ...]]:
    """Return links fitted to ``rows`` without the sources ``left_out``, and the errors on all, those included."""
    known = sorted({row.source for row in rows})
    for name in left_out:
        if name not in known:
            raise ValueError(f"--leave-out is one of {', '.join(known)}, met {name[:100]}")
    fits = fit_links(rows, left_out)
    return fits, errors(rows, fits)


def link_lines(found: Sequence[Error]) -> list[tuple[str, ...]]:
    """Return the errors of whole sources as lines of a table."""
    whole = [each for each in found if (each.collective, each.size) == ("*", "*")]
    return [
        (each.source, "all", "all", str(each.rows), *(f"{part:.1%}" for part in (each.mean, each.median, each.bias)))
        for each in whole
    ]
