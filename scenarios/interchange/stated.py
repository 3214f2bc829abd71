"""What a file of another trainer states, key by key: data that may be hostile."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scenarios.errors import Fault, ScenarioError, shown
from scenarios.reader import Document

MAX_NUMBER = 10**9
"""The largest count that a file may state."""


@dataclass(frozen=True)
class Stated:
    """Values by dotted key, and where each stands."""

    document: Document
    values: dict[str, Any]

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def fault(self, key: str, message: str) -> ScenarioError:
        """Return an error at a key, or at the section that lacks it."""
        return ScenarioError((self._fault(key, message),))

    def _fault(self, key: str, message: str) -> Fault:
        fault = self.document.fault(path_of(key), message)
        return Fault(fault.file, fault.line, fault.column, key, message)

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number of at least ``least``; `ScenarioError` where the file has another value."""
        value = self.get(key, default)
        if type(value) is not int or not least <= value <= MAX_NUMBER:
            raise self.fault(key, f"holds a whole number of at least {least}, met {shown(value)}")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return a truth value; `ScenarioError` where the file has another value."""
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.fault(key, f"holds true or false, met {shown(value)}")
        return value

    def word(self, key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        """Return a value that is one of ``allowed``, of the same kind; `ScenarioError` where it is none."""
        value = self.get(key, default)
        if not any(type(value) is type(one) and value == one for one in allowed):
            raise self.fault(key, f"is one of {', '.join(map(shown, allowed))}, met {shown(value)}")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key or ``default``; `ScenarioError` where there is neither."""
        if key in self.values:
            return self.values[key]
        if default is None:
            raise self.fault(key, "is needed, met nothing")
        return default


def path_of(key: str) -> tuple[str, ...]:
    """Return the path of a dotted key."""
    return tuple(key.split("."))


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted key as mappings within mappings.

    >>> nested({"a.b": 1, "a.c": 2, "d": 3})
    {'a': {'b': 1, 'c': 2}, 'd': 3}
    """
    result: dict[str, Any] = {}
    for key, value in values.items():
        *sections, last = path_of(key)
        place = result
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return result


def stated(document: Document) -> Stated:
    """Return the values of a document, those of nested mappings by dotted keys."""
    if not isinstance(document.data, dict):
        message = f"holds a mapping, met {shown(document.data)}"
        raise ScenarioError((Fault(document.file, 1, 1, "", message),))
    values: dict[str, Any] = {}
    _flatten(document, document.data, (), values)
    return Stated(document, values)


def _flatten(document: Document, data: dict[str, Any], path: tuple[str, ...], values: dict[str, Any]) -> None:
    for key, value in data.items():
        if "." in key:
            raise ScenarioError((document.fault((*path, key), f"a key has no point, met {shown(key)}"),))
        if isinstance(value, dict) and value:
            _flatten(document, value, (*path, key), values)
        else:
            values[".".join((*path, key))] = value
