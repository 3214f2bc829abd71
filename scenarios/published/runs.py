"""Files of published training runs, one JSON object per line.

A row states model, hardware, plan and measured step in flat fields: ``n_layers``, ``hidden``, ``dp``, ``tp``, ``pp``,
``micro_batch``, ``step_time_s`` and so on. `meshwise.scenarios.published` turns it into a scenario.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwise.scenarios.files.errors import Fault, ScenarioError, format_value
from meshwise.scenarios.published.row import ALLOCATED, Row, read_measurement
from meshwise.scenarios.published.scenario import build_scenario
from meshwise.scenarios.scenario import Scenario
from meshwise.simulator.brief import brief_repr
from meshwise.simulator.files import JsonError, escape_text, parse_json

MAX_ROWS = 100_000
MAX_ROW_BYTES = 2**20
GROUP = ("model", "accelerator", "n_devices", "global_batch", "seq_len")
"""Fields that identify a problem: plans of rows in which these are equal can be compared."""


@dataclass(frozen=True, slots=True)
class Run:
    """One published run: its measurements, and its scenario or, in ``skipped``, the reason why it has none.

    Parameters
    ----------
    assumed
        Assumptions of the scenario that the row does not state.
    memory_kind
        What ``peak_memory`` is: one of `MEMORY_KINDS`.
    reserved_memory
        Peak bytes that the allocator reserved, where ``peak_memory`` is what it allocated to tensors.
    """

    row_id: str
    source: str
    group: str
    step_time: float | None
    peak_memory: float | None
    status: str
    scenario: Scenario | None = None
    skipped: str = ""
    assumed: tuple[str, ...] = ()
    memory_kind: str = ALLOCATED
    reserved_memory: float | None = None

    __repr__ = brief_repr()


def read_runs(path: str | Path) -> tuple[Run, ...]:
    """Return the runs in a file of JSON lines; `ScenarioError` names every faulty line."""
    try:
        with open(path, "rb") as file:
            return parse_runs(iter(lambda: file.readline(MAX_ROW_BYTES + 1), b""), str(path))
    except ScenarioError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ScenarioError((Fault(str(path), 0, 0, "", f"the file cannot be read: {reason}"),)) from None


def parse_runs(lines: Iterable[bytes], file: str) -> tuple[Run, ...]:
    """Return the runs in lines of JSON; ``file`` is their name in messages."""
    faults: list[Fault] = []
    runs: list[Run] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            _append_run(runs, faults, file, number, line)
        if len(faults) >= 100 or number > MAX_ROWS:
            break
    if not runs and not faults:
        faults.append(Fault(file, 1, 1, "", "a file of runs has one JSON object a line, met none"))
    if faults:
        raise ScenarioError(tuple(faults))
    return tuple(runs)


def _append_run(runs: list[Run], faults: list[Fault], file: str, number: int, line: bytes) -> None:
    if len(line) > MAX_ROW_BYTES:
        faults.append(Fault(file, number, 1, "", f"a row has at most {MAX_ROW_BYTES} bytes, met more"))
        return
    try:
        row = parse_json(line)
    except JsonError as error:
        faults.append(Fault(file, number, max(1, error.column), "", f"a row is a JSON object: {error}"))
        return
    if not isinstance(row, dict):
        faults.append(Fault(file, number, 1, "", f"a row is a JSON object, met {format_value(row)}"))
        return
    runs.append(build_run(row, f"{file}:{number}"))


def _clean_name(value: Any) -> str:
    return escape_text(str(value)[:200])


def build_run(fields: Mapping[str, Any], place: str = "row") -> Run:
    """Return the run of a row, with its scenario or the reason why it has none."""
    row = Row(fields)
    step_time, peak, status, kind, reserved = read_measurement(row)
    run = Run(
        row_id=_clean_name(fields.get("row_id", place)),
        source=_clean_name(fields.get("source_id", "unknown")),
        group=", ".join(escape_text(str(fields.get(key))[:100]) for key in GROUP),
        step_time=step_time,
        peak_memory=peak,
        status=status,
        memory_kind=kind,
        reserved_memory=reserved,
    )
    try:
        scenario = build_scenario(row, place)
    except ScenarioError as error:
        fault = error.faults[0]
        return replace(run, skipped=f"{fault.field}: {fault.message}")
    except ValueError as error:
        return replace(run, skipped=str(error))
    return replace(run, scenario=scenario, assumed=tuple(row.assumed))
