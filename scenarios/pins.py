"""Pins as a scenario writes them: ``{layers.attention: {heads: tensor}}``, or axes in the order of dims to cut."""

from typing import Any

from scenarios.errors import shown
from strategies.operators.pins import Pin

MAX_PINS = 10_000
"""Operators that a scenario may pin."""


def to_pins(values: dict[str, Any]) -> tuple[tuple[Pin, ...], list[tuple[str, str]]]:
    """Return pins, and what is wrong with others: the name of each and what holds and was met."""
    pins, wrong = [], []
    for name, value in list(values.items())[:MAX_PINS]:
        pin = _pin(name, value)
        if pin is None:
            holds = "a pin is a mapping from dim to axis, or a list of axes in the order of the dims that may be cut"
            wrong.append((name, f"{holds}; an axis is a name, a list of names, or null; met {shown(value)}"))
        else:
            pins.append(pin)
    if len(values) > MAX_PINS:
        wrong.append((list(values)[MAX_PINS], f"pin names at most {MAX_PINS} operators, met {len(values)}"))
    return tuple(pins), wrong


def _pin(name: str, value: Any) -> Pin | None:
    pairs = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else None
    )
    if pairs is None:
        return None
    cuts = [(dim, _axes(axes)) for dim, axes in pairs]
    if any(axes is None for _, axes in cuts):
        return None
    return Pin(name, tuple((dim, axes) for dim, axes in cuts if axes is not None))


def _axes(value: Any) -> tuple[str, ...] | None:
    """Return the axes that a value names; ``None`` where it names none so."""
    if value is None:
        return ()
    names = value if isinstance(value, list) else [value]
    return tuple(names) if all(isinstance(each, str) for each in names) else None
