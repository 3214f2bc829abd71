"""Reads files of other trainers, line by line or key by key.

The content may be hostile: lines are parsed as assignments or arguments, and never reach a shell or an interpreter.
"""

import ast
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwise.scenarios.files.errors import Fault, ScenarioError, format_value
from meshwise.scenarios.files.reader import MAX_BYTES, Document

Pair = tuple[str, Any]
"""A dotted key and its value."""

# at most 18 digits, as of an int64: hostile text cannot make the conversion slow
_NUMBER = re.compile(r"-?[0-9]{1,18}")
_FRACTION = re.compile(r"-?[0-9]{1,18}\.[0-9]{1,18}")


def parse_lines(content: bytes, file: str, parse_line: Callable[[str], Pair | None]) -> Document:
    """Return the document of a file with one key and value a line.

    Parameters
    ----------
    parse_line
        Returns the key and value of a line, or None for a line without them; raises ``ValueError`` for a line that no
        such file has.

    Raises
    ------
    ScenarioError
        Where a line is invalid, or a key occurs twice; with its place.
    """
    data: dict[str, Any] = {}
    places: dict[tuple[str | int, ...], tuple[int, int]] = {}
    for number, line in _list_lines(content, file):
        column = len(line) - len(line.lstrip()) + 1
        try:
            statement = parse_line(line.strip())
            if statement is None:
                continue
            path = tuple(statement[0].split("."))
            if path in places:
                raise ValueError(f"{statement[0]} is stated once, met it again")
        except ValueError as error:
            raise ScenarioError((Fault(file, number, column, "", str(error)),)) from None
        places[path] = (number, column)
        section = data
        for key in path[:-1]:
            section = section.setdefault(key, {})
            if not isinstance(section, dict):
                raise ScenarioError((Fault(file, number, column, statement[0], f"{key} is a value already"),))
        section[path[-1]] = statement[1]
    return Document(file, data, dict(places))


def _list_lines(content: bytes, file: str) -> Iterator[tuple[int, str]]:
    if len(content) > MAX_BYTES:
        raise ScenarioError((Fault(file, 0, 0, "", f"a file has at most {MAX_BYTES} bytes, met more"),))
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        message = f"a file is UTF-8 text, met the byte 0x{content[error.start]:02x}"
        raise ScenarioError((Fault(file, line, 1, "", message),)) from None
    yield from enumerate(text.split("\n"), 1)


def parse_value(text: str) -> Any:
    """Return the value of a Python literal: a number, text, truth value, ``None``, or a list of such values.

    >>> parse_value("[['layers.0'], ['norm']]")
    [['layers.0'], ['norm']]

    Raises
    ------
    ValueError
        Where the text is no such literal; no code is run.
    """
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise ValueError(f"a value is a number, text, True, False, None or a list, met {format_value(text)}") from None


def parse_argument(line: str) -> Pair:
    """Return the key and value of a line with an argument: True for a flag, else its word, or a list of several words.

    >>> parse_argument("--micro-batch-size 2"), parse_argument("--bf16")
    (('--micro-batch-size', 2), ('--bf16', True))

    Raises
    ------
    ValueError
        Where the line is more to a shell than an argument and its words.
    """
    if re.search(r"[$`\\;&<>!{}]", line):
        raise ValueError(
            f"a line is an argument and its words, with nothing for a shell to expand, met {format_value(line)}"
        )
    try:
        key, *words = shlex.split(line)
    except ValueError as error:
        raise ValueError(f"a line is an argument and its words, met {format_value(line)}: {error}") from None
    if not re.fullmatch(r"--[a-z0-9-]+", key):
        raise ValueError(f"a line begins with an argument such as --bf16, met {format_value(key)}")
    values = [_parse_word(word) for word in words]
    return key, values if len(values) > 1 else values[0] if values else True


def _parse_word(word: str) -> Any:
    if _NUMBER.fullmatch(word):
        return int(word)
    return float(word) if _FRACTION.fullmatch(word) else word


MAX_NUMBER = 10**9
"""The largest count that a file may have."""


@dataclass(frozen=True)
class ConfigValues:
    """The values of a file by dotted key, with its document for their places."""

    document: Document
    values: dict[str, Any]

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def build_error(self, key: str, message: str) -> ScenarioError:
        """Return an error at the place of a key, or of the section that lacks it."""
        fault = self.document.fault(split_key(key), message)
        return ScenarioError((Fault(fault.file, fault.line, fault.column, key, message),))

    def forbid(self, keys: Iterable[str], message: str) -> None:
        """Raise `ScenarioError` at the first of the keys that the file has."""
        for key in keys:
            if key in self.values:
                raise self.build_error(key, message)

    def count(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """Return a whole number of at least ``minimum``; `ScenarioError` where the value is something else."""
        value = self.get(key, default)
        if type(value) is not int or not minimum <= value <= MAX_NUMBER:
            raise self.build_error(key, f"holds a whole number of at least {minimum}, met {format_value(value)}")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return a truth value; `ScenarioError` where the value is something else."""
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.build_error(key, f"holds true or false, met {format_value(value)}")
        return value

    def word(self, key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        """Return a value that equals one of ``allowed`` and has its type; else raise `ScenarioError`."""
        value = self.get(key, default)
        if not any(type(value) is type(allowed_value) and value == allowed_value for allowed_value in allowed):
            raise self.build_error(key, f"is one of {', '.join(map(format_value, allowed))}, met {format_value(value)}")
        return value

    def choice(self, key: str, choices: Sequence[tuple[Any, Any]], default: Any = None) -> Any:
        """Return the value of pairs of value and word whose word the file has; else raise `ScenarioError`."""
        word = self.word(key, tuple(word for _, word in choices), default)
        return next(value for value, choice_word in choices if choice_word == word)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, else ``default``; `ScenarioError` where there is neither."""
        if key in self.values:
            return self.values[key]
        if default is None:
            raise self.build_error(key, "is needed, met nothing")
        return default


def split_key(key: str) -> tuple[str, ...]:
    """Return the path of a dotted key."""
    return tuple(key.split("."))


def nest_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted key as mappings within mappings.

    >>> nest_values({"a.b": 1, "a.c": 2, "d": 3})
    {'a': {'b': 1, 'c': 2}, 'd': 3}
    """
    result: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = split_key(key)
        mapping = result
        for section in sections:
            mapping = mapping.setdefault(section, {})
        mapping[name] = value
    return result


def flatten_document(document: Document) -> ConfigValues:
    """Return the values of a document by dotted keys, which flatten nested mappings."""
    if not isinstance(document.data, dict):
        message = f"holds a mapping, met {format_value(document.data)}"
        raise ScenarioError((Fault(document.file, 1, 1, "", message),))
    values: dict[str, Any] = {}
    _add_values(document, document.data, (), values)
    return ConfigValues(document, values)


def _add_values(document: Document, data: dict[str, Any], path: tuple[str, ...], values: dict[str, Any]) -> None:
    for key, value in data.items():
        if "." in key:
            raise ScenarioError((document.fault((*path, key), f"a key has no point, met {format_value(key)}"),))
        if isinstance(value, dict) and value:
            _add_values(document, value, (*path, key), values)
        else:
            values[".".join((*path, key))] = value
