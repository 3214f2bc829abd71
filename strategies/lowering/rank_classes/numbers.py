"""Small numbers that stand for values, which keep cache keys short."""

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

_SAME = 4096
"""Objects remembered by identity before the memory is cleared."""


class Numbers(Generic[T]):
    """A number for every different value, in order of first appearance.

    >>> numbers = Numbers[str]()
    >>> [numbers.of(name) for name in ("a", "b", "a")]
    [0, 1, 0]
    """

    def __init__(self) -> None:
        self._numbers: dict[T, int] = {}
        self._same: dict[int, tuple[T, int]] = {}

    def of(self, value: T) -> int:
        """Return the number of a value."""
        return self._numbers.setdefault(value, len(self._numbers))

    def of_same(self, value: T) -> int:
        """Return the number of a large value that is often the very same object as before: it is hashed once."""
        known = self._same.get(id(value))
        # An id is reused after its object has died, so the object itself is kept and compared.
        if known is None or known[0] is not value:
            if len(self._same) >= _SAME:
                self._same.clear()
            known = self._same[id(value)] = value, self.of(value)
        return known[1]
