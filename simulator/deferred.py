"""Sequences that are made when they are first asked for."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Generic, TypeVar, overload

from simulator.brief import items

T = TypeVar("T")


class Deferred(Sequence[T], Generic[T]):
    """The values that ``make`` returns, when they are first asked for; equal to any sequence of the same.

    >>> from functools import partial
    >>> Deferred(partial(range, 3)) == (0, 1, 2)
    True
    """

    def __init__(self, make: Callable[[], Iterable[T]]) -> None:
        self._make = make

    @cached_property
    def _values(self) -> tuple[T, ...]:
        return tuple(self._make())

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        return self._values[index]

    def __iter__(self) -> Iterator[T]:
        return iter(self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._values == tuple(other)

    def __hash__(self) -> int:
        return hash(self._values)

    def __repr__(self) -> str:
        return items(self)
