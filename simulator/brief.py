"""Values as text: one short line for a person at a prompt, or the full value for a digest."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import MISSING, fields, is_dataclass
from itertools import islice
from typing import Any, TypeVar

T = TypeVar("T")

MAX_CHARACTERS = 200
"""Characters of one attribute; a longer value is shown as its type and size."""
_MAX_LINE = 1200
_MAX_ITEMS = 4
_MAX_DEPTH = 2


def brief_repr(*names: str) -> Callable[[Any], str]:
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
    ...     __repr__ = brief_repr()
    >>> Walk((1, 2)), Walk(tuple(range(1000)), again=True)
    (Walk(steps=(1, 2)), Walk(steps=(0, 1, 2, 3, ... 1,000 in all), again=True))
    """

    def represent(self: Any) -> str:
        return _format_record(self, _MAX_DEPTH, names)

    represent.names = names  # type: ignore[attr-defined]
    return represent


def with_brief_repr(kind: type[T]) -> type[T]:
    """Give a class of named tuples the ``__repr__`` of `brief_repr`; its body cannot assign one itself."""
    kind.__repr__ = brief_repr()  # type: ignore[method-assign]
    return kind


def to_full_text(value: object) -> str:
    """Return a frozen value as text, in full: equal values have equal texts in every process.

    >>> to_full_text((1, {"size": 2.5}))
    "(1, {'size': 2.5})"
    """
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        inner = ", ".join(map(to_full_text, value))
        return f"{type(value).__name__ if hasattr(value, '_fields') else ''}({inner})"
    if is_dataclass(value):
        return (
            f"{type(value).__name__}({', '.join(to_full_text(getattr(value, field.name)) for field in fields(value))})"
        )
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {to_full_text(item)}" for key, item in value.items()) + "}"
    return repr(value)


def _format_record(value: Any, depth: int, names: Sequence[str]) -> str:
    """Return a value as its type and attributes: those in ``names``, or all fields that differ from their default."""
    kind = type(value).__name__
    if depth < 0:
        return _format_name(value)
    parts = [_format_attribute(name, getattr(value, name), depth) for name in names or _list_changed(value)]
    text = f"{kind}({', '.join(parts)})"
    return text if len(text) <= _MAX_LINE else f"{text[: _MAX_LINE - 4]}...)"


def _format_attribute(name: str, value: Any, depth: int) -> str:
    return _format_value(value(), depth).strip("'") if callable(value) else f"{name}={_format_value(value, depth)}"


def _list_changed(value: Any) -> list[str]:
    """Return the names of the fields that differ from their default."""
    if hasattr(value, "_fields"):
        defaults = {name: value._field_defaults.get(name, MISSING) for name in value._fields}
    else:
        defaults = {field.name: field.default for field in fields(value) if field.repr}
    return [name for name, default in defaults.items() if not _is_same(default, getattr(value, name))]


def _is_same(default: object, value: object) -> bool:
    # Types are compared first: comparing an array with a scalar has no truth value, and 1 equals True.
    return type(default) is type(value) and bool(default == value)


def _format_name(value: Any) -> str:
    """Return a value as its type and, if it has one, its name; its fields would be too long."""
    name = getattr(value, "name", None)
    return (
        f"{type(value).__name__}({_format_value(name, 0)}, ...)"
        if isinstance(name, str)
        else f"{type(value).__name__}(...)"
    )


def _format_value(value: Any, depth: int) -> str:
    """Return an attribute's value in at most about `MAX_CHARACTERS` characters."""
    if isinstance(value, float):
        return repr(float(f"{value:.6g}"))
    if isinstance(value, str):
        return repr(str(value) if len(value) <= MAX_CHARACTERS else f"{value[: MAX_CHARACTERS - 3]}...")
    if is_dataclass(value) or hasattr(value, "_fields"):
        text = _format_record(value, depth - 1, getattr(type(value).__repr__, "names", ()))
        return text if len(text) <= MAX_CHARACTERS else _format_name(value)
    # Arrays and tensors, without an import of their library.
    if hasattr(value, "dtype"):
        return f"<{value.dtype} of shape {value.shape}>"
    if isinstance(value, Sequence | Set | Mapping):
        return format_items(value, depth)
    text = repr(value)
    return text if len(text) <= MAX_CHARACTERS else f"<{type(value).__name__}>"


def format_items(values: Any, depth: int = _MAX_DEPTH) -> str:
    """Return the first items of a collection, and their number if there are more, as text."""
    head = list(islice(values, _MAX_ITEMS))
    if isinstance(values, Mapping):
        texts = [f"{_format_value(key, depth)}: {_format_value(values[key], depth)}" for key in head]
    else:
        texts = [_format_value(item, depth) for item in head]
    number = len(values)
    end = (
        f", ... {number:,} in all" if number > _MAX_ITEMS else "," if number == 1 and isinstance(values, tuple) else ""
    )
    opening, closing = "()" if isinstance(values, Sequence) else "{}"
    text = opening + ", ".join(texts) + end + closing
    return text if len(text) <= MAX_CHARACTERS else f"<{number:,} {type(head[0]).__name__}>"
