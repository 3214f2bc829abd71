"""Files that are lines of assignments or arguments: no shell or interpreter ever sees them on the way back."""

import ast
import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any

from scenarios.errors import Fault, ScenarioError, shown
from scenarios.reader import MAX_BYTES, Document

Pair = tuple[str, Any]
"""A dotted key and its value."""

_NUMBER = re.compile(r"-?[0-9]{1,18}")
_FRACTION = re.compile(r"-?[0-9]{1,18}\.[0-9]{1,18}")


def document(content: bytes, file: str, pair: Callable[[str], Pair | None]) -> Document:
    """Return the document of the lines of a file.

    Parameters
    ----------
    pair
        What a line says: a key and its value, or nothing; ``ValueError`` where it is no line of such a file.

    Raises
    ------
    ScenarioError
        Where a line is none, or a key is stated twice; with its place.
    """
    data: dict[str, Any] = {}
    places: dict[tuple[str | int, ...], tuple[int, int]] = {}
    for number, line in _lines(content, file):
        column = len(line) - len(line.lstrip()) + 1
        try:
            met = pair(line.strip())
            if met is None:
                continue
            path = tuple(met[0].split("."))
            if path in places:
                raise ValueError(f"{met[0]} is stated once, met it again")
        except ValueError as error:
            raise ScenarioError((Fault(file, number, column, "", str(error)),)) from None
        places[path] = (number, column)
        section = data
        for key in path[:-1]:
            section = section.setdefault(key, {})
            if not isinstance(section, dict):
                raise ScenarioError((Fault(file, number, column, met[0], f"{key} is a value already"),))
        section[path[-1]] = met[1]
    return Document(file, data, dict(places))


def _lines(content: bytes, file: str) -> Iterator[tuple[int, str]]:
    if len(content) > MAX_BYTES:
        raise ScenarioError((Fault(file, 0, 0, "", f"a file has at most {MAX_BYTES} bytes, met more"),))
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        message = f"a file is UTF-8 text, met the byte 0x{content[error.start]:02x}"
        raise ScenarioError((Fault(file, line, 1, "", message),)) from None
    yield from enumerate(text.split("\n"), 1)


def literal(text: str) -> Any:
    """Return the plain value that Python would read: numbers, text, truth values, ``None`` and lists of them.

    >>> literal("[['layers.0'], ['norm']]")
    [['layers.0'], ['norm']]

    Raises
    ------
    ValueError
        Where it is no such value; nothing is run.
    """
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise ValueError(f"a value is a number, text, True, False, None or a list, met {shown(text)}") from None
    return value


def argument(line: str) -> Pair:
    """Return the key and value of a line of arguments: a flag is true, one word a value, several a list.

    >>> argument("--micro-batch-size 2"), argument("--bf16")
    (('--micro-batch-size', 2), ('--bf16', True))

    Raises
    ------
    ValueError
        Where a shell would read more into the line.
    """
    if re.search(r"[$`\\;&<>!{}]", line):
        raise ValueError(f"a line is an argument and its words, with nothing for a shell to expand, met {shown(line)}")
    try:
        key, *words = shlex.split(line)
    except ValueError as error:
        raise ValueError(f"a line is an argument and its words, met {shown(line)}: {error}") from None
    if not re.fullmatch(r"--[a-z0-9-]+", key):
        raise ValueError(f"a line begins with an argument such as --bf16, met {shown(key)}")
    values = [_value(word) for word in words]
    return key, values if len(values) > 1 else values[0] if values else True


def _value(word: str) -> Any:
    if _NUMBER.fullmatch(word):
        return int(word)
    return float(word) if _FRACTION.fullmatch(word) else word
