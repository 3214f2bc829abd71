"""Small numbers that stand for values, which keep cache keys short."""

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

_MAX_KNOWN = 4096
"""Objects remembered by identity before the memory is cleared."""


class Numbers(Generic[T]):
    """A number for every different value, in order of first appearance.

    >>> numbers = Numbers[str]()
    >>> [numbers.number(name) for name in ("a", "b", "a")]
    [0, 1, 0]
    """

    def __init__(self) -> None:
        self._numbers: dict[T, int] = {}
        self._by_identity: dict[int, tuple[T, int]] = {}

    def number(self, value: T) -> int:
        """Return the number of a value."""
        return self._numbers.setdefault(value, len(self._numbers))

    def number_identical(self, value: T) -> int:
        """Return the number of a large value that is often the very same object as before: it is hashed once."""
        entry = self._by_identity.get(id(value))
        # An id is reused after its object has died, so the object itself is kept and compared.
        if entry is None or entry[0] is not value:
            if len(self._by_identity) >= _MAX_KNOWN:
                self._by_identity.clear()
            entry = self._by_identity[id(value)] = value, self.number(value)
        return entry[1]
