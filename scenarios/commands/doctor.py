"""``meshwise doctor``: what is installed on this machine and what is missing."""

from typing import Any

from meshwise.executor.launch.doctor import report
from meshwise.scenarios.commands.options import Json
from meshwise.scenarios.console import emit, show


def doctor(as_json: Json = False) -> None:
    """Show versions, cores, GPUs, what is installed and what is missing."""
    found = report()
    if as_json:
        emit(found)
    else:
        show((key, _text(value)) for key, value in found.items())


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_text(item) for item in value) or "none"
    return "missing" if value is None else str(value)
