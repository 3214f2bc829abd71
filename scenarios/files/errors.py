"""What is wrong with an input file, where, and what would do."""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from meshwise.simulator.files import escaped

SHOWN = 60
"""Characters of a foreign value that a message repeats at most."""


LISTED = 50
"""Faults that the text of an error lists at most."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong: prints as ``file:line:column: field: message``.

    ``line`` and ``column`` count from 1; 0 where the fault is of the file as a whole.
    """

    file: str
    line: int
    column: int
    field: str
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        text = f"{place}: {self.field}: {self.message}" if self.field else f"{place}: {self.message}"
        return escaped(text).replace("\n", "\\n")


class ScenarioError(ValueError):
    """An input file is wrong; ``faults`` lists everything that was found, in file order."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        self.faults = tuple(sorted(dict.fromkeys(faults), key=lambda fault: (fault.line, fault.column)))
        lines = [str(fault) for fault in self.faults[:LISTED]]
        more = len(self.faults) - LISTED
        super().__init__("\n".join(lines + ([f"... and {more} more"] if more > 0 else [])))


def shown(value: object) -> str:
    """Return ``value`` as text for a message: one line, printable, at most `SHOWN` characters.

    >>> shown("8 GPUs")
    "'8 GPUs'"
    """
    if isinstance(value, dict):
        text = "a mapping"
    elif isinstance(value, list | tuple) and len(value) > 16:
        text = f"a list of {len(value)}"
    elif value is None or isinstance(value, bool):
        text = {None: "nothing", True: "true", False: "false"}[value]
    else:
        text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


MOST_NEAR = 3
"""Names that are told where several hold what was written."""


def nearest(value: str, names: Iterable[str]) -> str:
    """Return ``"; nearest: NAME"`` for ``names`` that hold what was written, else for the most similar one, if any is.

    >>> nearest("tensr", ["data", "tensor"])
    '; nearest: tensor'
    >>> nearest("h100", ["v100", "eos-h100", "dgx-h100"])
    '; nearest: dgx-h100, eos-h100'
    """
    known = list(names)
    holding = sorted((name for name in known if value and value.lower() in name.lower()), key=lambda n: (len(n), n))
    close = holding[:MOST_NEAR] or get_close_matches(value, known, n=1, cutoff=0.5)
    return f"; nearest: {', '.join(close)}" if close else ""
