"""Quantities with units: parse text into SI floats, and format SI floats for people.

Only this module tells bits from bytes and GB from GiB. Everywhere else numbers are in s, byte, FLOP, byte/s or FLOP/s.
"""

import re
from enum import StrEnum

TICKS_PER_SECOND = 10**12
"""Ticks of the engines in a second: they count time in whole picoseconds, so that sums are exact in any order."""


class Dimension(StrEnum):
    """What a quantity measures."""

    TIME = "time"
    SIZE = "size"
    BANDWIDTH = "bandwidth"
    COMPUTE_RATE = "compute rate"


_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def _bytes_and_bits(suffix: str) -> dict[str, float]:
    table = {f"{prefix}B{suffix}": factor for prefix, factor in (_DECIMAL | _BINARY).items()}
    return table | {f"{prefix}b{suffix}": factor / 8 for prefix, factor in _DECIMAL.items()}


UNITS: dict[Dimension, dict[str, float]] = {
    Dimension.TIME: {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
    | {"min": 60.0, "h": 3600.0, "day": 86400.0, "days": 86400.0},
    Dimension.SIZE: _bytes_and_bits("") | {"byte": 1.0, "bytes": 1.0},
    Dimension.BANDWIDTH: _bytes_and_bits("/s"),
    Dimension.COMPUTE_RATE: {f"{p}FLOP/s": f for p, f in _DECIMAL.items()}
    | {f"{p}FLOPS": f for p, f in _DECIMAL.items()},
}
_EXAMPLES = {
    Dimension.TIME: "2 us",
    Dimension.SIZE: "80 GiB",
    Dimension.BANDWIDTH: "400 Gb/s",
    Dimension.COMPUTE_RATE: "312 TFLOP/s",
}
_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-zµ/]+)\s*")


def parse(text: str, dimension: Dimension) -> float:
    """Return ``text`` as a float in SI units.

    Raises
    ------
    ValueError
        If the text is not a number with a unit of that dimension.

    Examples
    --------
    >>> parse("400 Gb/s", Dimension.BANDWIDTH)
    50000000000.0
    >>> parse("80 GiB", Dimension.SIZE)
    85899345920.0
    """
    example = f"write a number and a unit, as in '{_EXAMPLES[dimension]}'"
    # Text comes from users' files: the limit keeps a hostile one from costing time or filling a message.
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) and len(text) < 100 else None
    if match is None:
        raise ValueError(f"a {dimension} has a unit, met {_format_foreign(text)}; {example}")
    number, unit = match.groups()
    factor = UNITS[dimension].get(unit)
    if factor is None:
        raise ValueError(f"{unit!r} is no unit of {dimension}, met {text!r}; {example}")
    value = float(number) * factor
    if value == float("inf"):
        raise ValueError(f"a {dimension} is finite, met {text!r}; {example}")
    return value


def _format_foreign(value: object) -> str:
    """Return a value from outside as text for a message: printable, and at most 60 characters."""
    text = ascii(value) if not isinstance(value, dict | list) else f"a {type(value).__name__} of {len(value)}"
    return text if len(text) <= 60 else text[:57] + "..."


def _format_scaled(value: float, scales: tuple[tuple[float, str], ...]) -> str:
    """Return a value with 3 digits in the largest unit of ``scales`` that it reaches, else in the smallest one."""
    for factor, unit in scales:
        if abs(value) >= factor:
            # ".3g" would write 1000 as 1e+03.
            return f"{value / factor:.3g} {unit}" if abs(value / factor) < 999.5 else f"{value / factor:.0f} {unit}"
    factor, unit = scales[-1]
    return f"{value / factor:.3g} {unit}"


def format_time(seconds: float) -> str:
    """Return seconds as text in s, ms, us or ns.

    >>> format_time(0.0248)
    '24.8 ms'
    """
    return _format_scaled(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")))


def format_duration(seconds: float) -> str:
    """Return seconds as text in s, min, h or days, for times of whole runs.

    >>> format_duration(5400), format_duration(54 * 86400)
    ('1.5 h', '54 days')
    """
    if abs(seconds) < 120:
        return format_time(seconds)
    days = ((86400.0, "days"),) if abs(seconds) >= 2 * 86400 else ()
    return _format_scaled(seconds, (*days, (3600.0, "h"), (60.0, "min")))


def format_size(size: float) -> str:
    """Return bytes as text in binary units.

    >>> format_size(80 * 2**30)
    '80 GiB'
    """
    return _format_scaled(
        size, tuple((2.0 ** (10 * i), u) for i, u in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB"), (0, "B")))
    )


def format_bandwidth(rate: float) -> str:
    """Return byte/s as text in decimal units.

    >>> format_bandwidth(25e9)
    '25 GB/s'
    """
    return _format_scaled(rate, ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1.0, "B/s")))


def format_compute_rate(rate: float) -> str:
    """Return FLOP/s as text in decimal units.

    >>> format_compute_rate(312e12)
    '312 TFLOP/s'
    """
    return _format_scaled(rate, ((1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1.0, "FLOP/s")))


def format_count(number: int, noun: str) -> str:
    """Return a count and its noun as text, in the singular or the plural.

    >>> format_count(1, "host"), format_count(2048, "host")
    ('1 host', '2,048 hosts')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


def to_ticks(seconds: float) -> int:
    """Return seconds in whole ticks, rounded up so that a bound stays a bound.

    >>> to_ticks(1.5e-12)
    2
    """
    ticks = seconds * TICKS_PER_SECOND
    whole_ticks = int(ticks)
    return whole_ticks if whole_ticks == ticks else whole_ticks + 1


def to_seconds(ticks: int) -> float:
    """Return ticks in seconds.

    >>> to_seconds(10**12)
    1.0
    """
    return ticks / TICKS_PER_SECOND
