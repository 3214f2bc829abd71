"""Faults of input files: what is wrong, where, and the nearest values that are allowed."""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from meshwise.simulator.files import escape_text

MAX_SHOWN = 60
"""Most characters of a value from a file that a message repeats."""


MAX_LISTED = 50
"""Most faults that the text of an error lists."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of an input file, printed as ``file:line:column: field: message``.

    ``line`` and ``column`` count from 1; both are 0 for a fault of the file as a whole.
    """

    file: str
    line: int
    column: int
    field: str
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        text = f"{place}: {self.field}: {self.message}" if self.field else f"{place}: {self.message}"
        return escape_text(text).replace("\n", "\\n")


class ScenarioError(ValueError):
    """Raised where an input file has faults; ``faults`` lists all of them in the order of lines."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        self.faults = tuple(sorted(dict.fromkeys(faults), key=lambda fault: (fault.line, fault.column)))
        lines = [str(fault) for fault in self.faults[:MAX_LISTED]]
        num_more = len(self.faults) - MAX_LISTED
        super().__init__("\n".join(lines + ([f"... and {num_more} more"] if num_more > 0 else [])))


def format_value(value: object) -> str:
    """Return ``value`` as text for a message: one line, printable, at most `MAX_SHOWN` characters.

    >>> format_value("8 GPUs")
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
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


MAX_NEAR = 3
"""Most names that are suggested where several contain the value."""


def suggest_nearest(value: str, names: Iterable[str]) -> str:
    """Return ``"; nearest: NAME"`` for the ``names`` that contain ``value``, else for the most similar one; or no text.

    >>> suggest_nearest("tensr", ["data", "tensor"])
    '; nearest: tensor'
    >>> suggest_nearest("h100", ["v100", "eos-h100", "dgx-h100"])
    '; nearest: dgx-h100, eos-h100'
    """
    name_list = list(dict.fromkeys(names))
    matches = sorted(
        (name for name in name_list if value and value.lower() in name.lower()), key=lambda match: (len(match), match)
    )
    suggestions = matches[:MAX_NEAR] or get_close_matches(value, name_list, n=1, cutoff=0.5)
    return f"; nearest: {', '.join(suggestions)}" if suggestions else ""
