"""One row of published measurements: typed reading of its fields, and what was assumed on the way."""

import re
from collections.abc import Mapping
from math import isfinite
from typing import Any

from scenarios.errors import shown

MAX_TEXT = 2000
"""Characters of a text field that are read."""
MOST = 10**9
"""Largest count that a field may hold unless its reader says otherwise."""

_NOTHING = frozenset({"", "none", "null", "nan", "n/a", "na", "-", "?", "unknown", "not stated", "unspecified"})
_TRUE = re.compile(r"^(true|yes|on|1|enabled?|overlap\w*)\b")
_FALSE = re.compile(r"^(false|no|not|off|0|disabled?|none|without)\b")


_NUMBER = re.compile(r"\s*([0-9][0-9_,]*\.?[0-9]*([eE][-+]?[0-9]+)?)\s*([kKmM](?![a-zA-Z])|)(?!\s*[-x*/~.][0-9])")
"""A number, and whether it is in thousands or millions; not one of several, as of ``8x400`` or ``1-4``."""


class Skip(ValueError):
    """Why a row is not predicted; the message begins with the field."""


class Row:
    """A row, and in ``assumed`` what reading it took for granted.

    A field that is left out, null or a word for nothing is None; one that holds what no run can have
    is `Skip` for the row.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields
        self.assumed: list[str] = []

    def assume(self, what: str) -> None:
        """Note an assumption, once."""
        if what not in self.assumed:
            self.assumed.append(what)

    def states(self, name: str) -> bool:
        """Return whether a field holds anything."""
        value = self.fields.get(name)
        return value is not None and not (isinstance(value, str) and value.strip().lower() in _NOTHING)

    def text(self, *names: str) -> str:
        """Return fields in lower case, joined by spaces; empty where they are not stated."""
        values = [self.fields[name] for name in names if self.states(name)]
        return " ".join(str(value)[:MAX_TEXT] for value in values).strip().lower()

    def number(self, name: str) -> float | None:
        """Return a number above 0; text such as ``"80 GB"`` is read up to its unit, and ``"32k"`` in thousands."""
        value: Any = self.fields.get(name)
        if not self.states(name) or value == 0:
            return None
        if isinstance(value, str) and (found := _NUMBER.match(value)):
            thousand = 1024.0 if name == "seq_len" else 1000.0
            value = float(re.sub("[_,]", "", found[1])) * {"": 1.0, "k": thousand, "m": thousand**2}[found[3].lower()]
        real = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e18 and isfinite(value)
        if not real:
            raise Skip(f"{name} is a number above 0, met {shown(value)}")
        return float(value)

    def count(self, name: str, most: int = MOST) -> int | None:
        """Return a whole number above 0; 0 is as good as not stated."""
        number = self.number(name)
        if number is not None and (not number.is_integer() or number > most):
            raise Skip(f"{name} is a whole number of at most {most}, met {shown(self.fields[name])}")
        return None if number is None else int(number)

    def optional(self, name: str, most: int = MOST) -> int | None:
        """Return a count, or None where the field holds none; that is an assumption."""
        try:
            return self.count(name, most)
        except Skip as skip:
            self.assume(f"{name} left out, for {skip}")
            return None

    def optional_number(self, name: str) -> float | None:
        """Return a number, or None where the field holds none; that is an assumption."""
        try:
            return self.number(name)
        except Skip as skip:
            self.assume(f"{name} left out, for {skip}")
            return None

    def needed(self, name: str, most: int = MOST) -> int:
        """Return a count that nothing can replace."""
        value = self.count(name, most)
        if value is None:
            raise Skip(f"{name} is not stated")
        return value

    def assumed_count(self, name: str, default: int, why: str = "not stated", most: int = MOST) -> int:
        """Return a count, or ``default`` as an assumption."""
        value = self.count(name, most)
        if value is None:
            self.assume(f"{name} {default} ({why})")
            return default
        return value

    def flag(self, name: str) -> bool | None:
        """Return whether something is on; None where the field does not say."""
        value = self.fields.get(name)
        if isinstance(value, bool):
            return value
        words = str(value)[:MAX_TEXT].strip().lower() if value is not None else ""
        if _FALSE.search(words) or re.search(r"\b(off|not overlapped|no overlap)\b", words):
            return False
        return True if _TRUE.search(words) or "overlap" in words or re.search(r"\bon\b", words) else None
