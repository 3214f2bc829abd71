"""Amounts of a training run as people write them: numbers of nodes, tokens, money an hour, and times in days."""

import re
from collections.abc import Sequence
from typing import Any

from meshwise.scenarios.files.errors import format_value
from meshwise.simulator.units import Dimension, parse

MAX_COUNTS = 1000
"""Most numbers of a list, and so of the setups of one question."""

_MAX_COUNT = 9_999_999
_SUFFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_AMOUNT = re.compile(r"\s*(\d+\.?\d*(?:[eE]\+?\d+)?)\s*([kKmMbBgGtT]?)\s*")
_MONEY = re.compile(r"\s*\$?\s*(\d+\.?\d*(?:[eE]\+?\d+)?)\s*(?:(?:\$|usd|USD)?\s*/\s*h)?\s*")
_COUNTS = re.compile(r"\s*([1-9]\d{0,6})\s*(?:\.\.\s*([1-9]\d{0,6})\s*)?")
_MAX_TEXT = 40
"""Most characters of an amount."""


def parse_counts(value: Any) -> tuple[int, ...]:
    """Return the numbers of a list of numbers and ranges, each once.

    >>> parse_counts("1,4..6"), parse_counts([256, "8..9"]), parse_counts(4)
    ((1, 4, 5, 6), (256, 8, 9), (4,))
    """
    items: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    parts = [part for item in items for part in (item.split(",") if isinstance(item, str) else [item])]
    result: dict[int, None] = {}
    for part in parts[: MAX_COUNTS + 1]:
        is_number = isinstance(part, int) and not isinstance(part, bool) and 0 < part <= _MAX_COUNT
        match = _COUNTS.fullmatch(str(part)) if is_number or isinstance(part, str) else None
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first or last - first >= MAX_COUNTS or len(result) >= MAX_COUNTS:
            raise ValueError(
                f"holds numbers or ranges, at most {MAX_COUNTS}, as in 8 or 1,2,4..8; met {_shorten(value)}"
            )
        result.update(dict.fromkeys(range(first, last + 1)))
    return tuple(result)


def parse_amount(value: Any) -> float:
    """Return a number of tokens, which may end in k, M, B or T.

    >>> parse_amount("1.5T"), parse_amount("300B"), parse_amount(4e6)
    (1500000000000.0, 300000000000.0, 4000000.0)
    """
    match = _AMOUNT.fullmatch(_to_text(value))
    if match is None:
        raise ValueError(f"is a number of tokens, as in 15T, 300B or 4e6; met {_shorten(value)}")
    return float(match[1]) * _SUFFIXES[match[2].upper()]


def format_amount(tokens: float) -> str:
    """Return a number of tokens as people write it.

    >>> format_amount(3e11), format_amount(1.5e12), format_amount(500.0)
    ('300B', '1.5T', '500')
    """
    for suffix in "TBM":
        if tokens >= _SUFFIXES[suffix]:
            return f"{tokens / _SUFFIXES[suffix]:.4g}{suffix}"
    return f"{tokens:.4g}"


def parse_price(value: Any) -> float:
    """Return US dollars for an hour of one device.

    >>> parse_price("2.5"), parse_price("2.5 $/h"), parse_price(2)
    (2.5, 2.5, 2.0)
    """
    match = _MONEY.fullmatch(_to_text(value))
    if match is None:
        raise ValueError(f"is in US dollars for an hour of one device, as in 2.50 or '2.50 $/h'; met {_shorten(value)}")
    return float(match[1])


def parse_dollars(value: Any) -> float:
    """Return US dollars.

    >>> parse_dollars("1e6"), parse_dollars(5000)
    (1000000.0, 5000.0)
    """
    match = _MONEY.fullmatch(_to_text(value))
    if match is None or "/" in _to_text(value):
        raise ValueError(f"is in US dollars, as in 5000 or 1e6; met {_shorten(value)}")
    return float(match[1])


def parse_duration(value: Any) -> float:
    """Return seconds; days may be written ``d``.

    >>> parse_duration("30d"), parse_duration("12 h")
    (2592000.0, 43200.0)
    """
    text = _to_text(value)
    try:
        return parse(re.sub(r"(?<=[\d\s])d$", "days", text.strip()), Dimension.TIME)
    except ValueError:
        raise ValueError(f"is a time with its unit, as in 30d or '12 h'; met {_shorten(value)}") from None


def _to_text(value: Any) -> str:
    """Return a number or short text as text; no text for other values."""
    is_plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    text = str(value) if is_plain else ""
    return text if len(text) < _MAX_TEXT else ""


def _shorten(value: Any) -> str:
    return f"{value:.40}" if isinstance(value, str) and value.isprintable() else format_value(value)
