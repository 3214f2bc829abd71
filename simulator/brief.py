"""Values as text: one short line for a person at a prompt, or the full value for a digest."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import MISSING, fields, is_dataclass
from itertools import islice
from typing import Any, TypeVar

T = TypeVar("T")

LONGEST = 200
"""Characters of one attribute; a longer value is shown as its type and size."""
_LINE = 1200
_ITEMS = 4
_DEPTH = 2


def brief(*names: str) -> Callable[[Any], str]:
    """Return a ``__repr__`` that writes one line, however large the value is.

    Its cost does not grow with the value: it reads only the first items of a sequence.

    Parameters
    ----------
    names
        Attributes to show; a method is called and its result shown. By default, all fields that differ from their
        default.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Walk:
    ...     steps: tuple[int, ...]
    ...     again: bool = False
    ...     __repr__ = brief()
    >>> Walk((1, 2)), Walk(tuple(range(1000)), again=True)
    (Walk(steps=(1, 2)), Walk(steps=(0, 1, 2, 3, ... 1,000 in all), again=True))
    """

    def line(self: Any) -> str:
        return _record(self, _DEPTH, names)

    line.names = names  # type: ignore[attr-defined]
    return line


def in_brief(kind: type[T]) -> type[T]:
    """Give a class of named tuples the ``__repr__`` of `brief_repr`; its body cannot assign one itself."""
    kind.__repr__ = brief()  # type: ignore[method-assign]
    return kind


def in_full(value: object) -> str:
    """Return a frozen value as text, in full: equal values have equal texts in every process.

    >>> in_full((1, {"size": 2.5}))
    "(1, {'size': 2.5})"
    """
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        inner = ", ".join(map(in_full, value))
        return f"{type(value).__name__ if hasattr(value, '_fields') else ''}({inner})"
    if is_dataclass(value):
        return f"{type(value).__name__}({', '.join(in_full(getattr(value, field.name)) for field in fields(value))})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {in_full(item)}" for key, item in value.items()) + "}"
    return repr(value)


def _record(value: Any, depth: int, names: Sequence[str]) -> str:
    """Return a value as its type and attributes: those in ``names``, or all fields that differ from their default."""
    kind = type(value).__name__
    if depth < 0:
        return _called(value)
    parts = [_attribute(name, getattr(value, name), depth) for name in names or _told(value)]
    text = f"{kind}({', '.join(parts)})"
    return text if len(text) <= _LINE else f"{text[: _LINE - 4]}...)"


def _attribute(name: str, value: Any, depth: int) -> str:
    return _text(value(), depth).strip("'") if callable(value) else f"{name}={_text(value, depth)}"


def _told(value: Any) -> list[str]:
    """Return the names of the fields that differ from their default."""
    if hasattr(value, "_fields"):
        defaults = {name: value._field_defaults.get(name, MISSING) for name in value._fields}
    else:
        defaults = {field.name: field.default for field in fields(value) if field.repr}
    return [name for name, default in defaults.items() if not _same(default, getattr(value, name))]


def _same(default: object, value: object) -> bool:
    # Types are compared first: comparing an array with a scalar has no truth value, and 1 equals True.
    return type(default) is type(value) and bool(default == value)


def _called(value: Any) -> str:
    """Return a value as its type and, if it has one, its name; its fields would be too long."""
    name = getattr(value, "name", None)
    return f"{type(value).__name__}({_text(name, 0)}, ...)" if isinstance(name, str) else f"{type(value).__name__}(...)"


def _text(value: Any, depth: int) -> str:
    """Return an attribute's value in at most about `MAX_CHARACTERS` characters."""
    if isinstance(value, float):
        return repr(float(f"{value:.6g}"))
    if isinstance(value, str):
        return repr(str(value) if len(value) <= LONGEST else f"{value[: LONGEST - 3]}...")
    if is_dataclass(value) or hasattr(value, "_fields"):
        text = _record(value, depth - 1, getattr(type(value).__repr__, "names", ()))
        return text if len(text) <= LONGEST else _called(value)
    # Arrays and tensors, without an import of their library.
    if hasattr(value, "dtype"):
        return f"<{value.dtype} of shape {value.shape}>"
    if isinstance(value, Sequence | Set | Mapping):
        return items(value, depth)
    text = repr(value)
    return text if len(text) <= LONGEST else f"<{type(value).__name__}>"


def items(values: Any, depth: int = _DEPTH) -> str:
    """Return the first items of a collection, and their number if there are more, as text."""
    first = list(islice(values, _ITEMS))
    if isinstance(values, Mapping):
        shown = [f"{_text(key, depth)}: {_text(values[key], depth)}" for key in first]
    else:
        shown = [_text(item, depth) for item in first]
    number = len(values)
    end = f", ... {number:,} in all" if number > _ITEMS else "," if number == 1 and isinstance(values, tuple) else ""
    left, right = "()" if isinstance(values, Sequence) else "{}"
    text = left + ", ".join(shown) + end + right
    return text if len(text) <= LONGEST else f"<{number:,} {type(first[0]).__name__}>"
