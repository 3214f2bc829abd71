"""``meshwise doctor``: what is installed on this machine and what is missing."""

from meshwise.executor.launch.doctor import build_report
from meshwise.scenarios.commands.options import Json
from meshwise.scenarios.console import emit, print_rows
from meshwise.simulator.units import format_size


def doctor(as_json: Json = False) -> None:
    """Show versions, cores, GPUs, what is installed and what is missing."""
    facts = build_report()
    if as_json:
        emit(facts)
    else:
        rows = facts | {"memory": format_size(facts["memory"]), "missing": facts["missing"] or "nothing"}
        print_rows((key, _format_value(value)) for key, value in rows.items())


def _format_value(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_format_value(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_format_value(item) for item in value) or "none"
    return "missing" if value is None else str(value)
