"""Algorithms by name; the module of one is imported when it is asked for."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any


class Registry(Mapping[str, type[Any]]):
    """The frozen dataclasses of algorithms; each is in the module of this package that has its name.

    Names and their number are known without an import, so that a scenario is checked without those of all algorithms.

    >>> found = Registry({"mcmc": "MCMC"})
    >>> list(found), found["mcmc"].__name__
    (['mcmc'], 'MCMC')
    """

    def __init__(self, classes: Mapping[str, str]) -> None:
        self._classes = dict(classes)

    def __getitem__(self, name: str) -> type[Any]:
        kind = self.class_name(name)
        found: type[Any] = getattr(import_module(f"strategies.search.{name}"), kind)
        return found

    def class_name(self, name: str) -> str:
        """Return the name of the dataclass of an algorithm."""
        return self._classes[name]

    def __contains__(self, name: object) -> bool:
        return name in self._classes

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)

    def __or__(self, other: "Registry") -> "Registry":
        return Registry(self._classes | other._classes)
