"""Results that are worked out once: of methods, by their arguments, and hashes of long tuples.

A method that is memoised sees its arguments and its object alone, so that a result can depend on nothing that its key
lacks. Arguments are frozen values: those that stand for a plan are made in
`meshwise.strategies.lowering.costs.keys`, one kind of key in one place. The object must not change in what the method
reads. Functions of values alone, as those of schedules, are kept by ``functools.lru_cache``.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import wraps
from threading import Lock
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from meshwise.simulator.brief import format_items

Arguments = ParamSpec("Arguments")
Owner = TypeVar("Owner")
Item = TypeVar("Item")
Result = TypeVar("Result")
_MISSING = object()


def memoise(
    method: Callable[Concatenate[Owner, Arguments], Result],
) -> Callable[Concatenate[Owner, Arguments], Result]:
    """Return a method that works out its result for the same arguments once, and keeps it with its object.

    Arguments are given by position alone: one given by name is a ``TypeError``.

    >>> class Squares:
    ...     count = 0
    ...     @memoise
    ...     def square(self, number: int) -> int:
    ...         self.count += 1
    ...         return number * number
    >>> squares = Squares()
    >>> squares.square(3), squares.square(3), squares.count
    (9, 9, 1)
    """
    name = f"_results_of_{method.__name__}"

    def look_up(owner: Any, /, *arguments: Any) -> Any:
        results = owner.__dict__.get(name) or owner.__dict__.setdefault(name, {})
        result = results.get(arguments, _MISSING)
        if result is _MISSING:
            result = results[arguments] = cast(Any, method)(owner, *arguments)
        return result

    return cast(Callable[Concatenate[Owner, Arguments], Result], wraps(method)(look_up))


def remember_latest(
    method: Callable[Concatenate[Owner, Arguments], Result],
) -> Callable[Concatenate[Owner, Arguments], Result]:
    """Return a method that keeps its latest result, for the arguments of the latest call alone.

    Plans are asked about many times in a row: to find that they are the very same spares hashing them. Arguments are
    given by position alone.
    """
    name = f"_latest_of_{method.__name__}"

    def look_up(owner: Owner, /, *arguments: Any) -> Result:
        latest: tuple[tuple[Any, ...], Result] | None = owner.__dict__.get(name)
        if latest is None or latest[0] != arguments:
            latest = owner.__dict__[name] = arguments, method(owner, *arguments)  # type: ignore[call-arg]
        return latest[1]

    return cast(Callable[Concatenate[Owner, Arguments], Result], wraps(method)(look_up))


class LatestResults(Generic[Result]):
    """Results by key, those used last, as many as have ``max_bytes`` in all.

    >>> squares = LatestResults(max_bytes=16)
    >>> [squares.look_up(number, lambda: (number * number, 8)) for number in (1, 2, 3)]
    [1, 4, 9]
    >>> list(squares)
    [2, 3]
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._results: OrderedDict[Any, tuple[Result, int]] = OrderedDict()
        self._lock = Lock()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._results)

    def look_up(self, key: Any, work_out: Callable[[], tuple[Result, int]]) -> Result:
        """Return the result of a key; ``work_out`` returns it with its bytes where it is not kept."""
        with self._lock:
            if key in self._results:
                self._results.move_to_end(key)
                return self._results[key][0]
        result, size = work_out()
        with self._lock:
            if key not in self._results and size <= self.max_bytes:
                self._results[key] = result, size
                self.num_bytes += size
                while self.num_bytes > self.max_bytes:
                    self.num_bytes -= self._results.popitem(last=False)[1][1]
        return result


class HashedTuple(tuple[Item, ...]):
    """A tuple that works out its hash once; it equals a plain tuple of the same items.

    >>> hash(HashedTuple("ab")) == hash(("a", "b")), HashedTuple("ab") == ("a", "b")
    (True, True)
    """

    def __hash__(self) -> int:
        result: int | None = self.__dict__.get("_hash")
        if result is None:
            result = self.__dict__["_hash"] = super().__hash__()
        return result

    def __repr__(self) -> str:
        return format_items(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the hash: another process hashes texts otherwise."""
        return HashedTuple, (tuple(self),)
