"""Files of published training runs, one JSON object per line.

A row states model, hardware, plan and measured step in flat fields: ``n_layers``, ``hidden``, ``dp``, ``tp``, ``pp``,
``micro_batch``, ``step_time_s`` and so on. `meshwise.scenarios.published` turns it into a scenario.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from meshwise.scenarios.files.errors import Fault, ScenarioError, format_value
from meshwise.scenarios.published.row import ALLOCATED, Row, read_measurement
from meshwise.scenarios.published.scenario import draft_scenario, finish_scenario
from meshwise.scenarios.published.sweeps import Choice, Draft, SweepKey, choose_once, name_sweep
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
    tier
        How complete the row is: A, B or C; empty where it does not say.
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
    tier: str = ""

    __repr__ = brief_repr()


def read_runs(path: str | Path, *, strict: bool = False) -> tuple[Run, ...]:
    """Return the runs in a file of JSON lines; `ScenarioError` names every faulty line.

    ``strict`` makes words that are not understood faults.
    """
    try:
        with open(path, "rb") as file:
            return parse_runs(iter(lambda: file.readline(MAX_ROW_BYTES + 1), b""), str(path), strict=strict)
    except ScenarioError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ScenarioError((Fault(str(path), 0, 0, "", f"the file cannot be read: {reason}"),)) from None


def parse_runs(lines: Iterable[bytes], file: str, *, strict: bool = False) -> tuple[Run, ...]:
    """Return the runs in lines of JSON, in their order; ``file`` is their name in messages.

    What the runs of a sweep leave open is chosen once, when all lines are read.
    """
    faults: list[Fault] = []
    drafts: list[_RunDraft] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            _append_draft(drafts, faults, Place(file, number), line, strict=strict)
        if len(faults) >= 100 or number > MAX_ROWS:
            break
    if not drafts and not faults:
        faults.append(Fault(file, 1, 1, "", "a file of runs has one JSON object a line, met none"))
    if faults:
        raise ScenarioError(tuple(faults))
    return _finish_runs(drafts)


class Place(NamedTuple):
    """A line of a file, counted from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def _append_draft(drafts: list["_RunDraft"], faults: list[Fault], place: Place, line: bytes, *, strict: bool) -> None:
    if len(line) > MAX_ROW_BYTES:
        faults.append(Fault(*place, 1, "", f"a row has at most {MAX_ROW_BYTES} bytes, met more"))
        return
    try:
        fields = parse_json(line)
    except JsonError as error:
        faults.append(Fault(*place, max(1, error.column), "", f"a row is a JSON object: {error}"))
        return
    if not isinstance(fields, dict):
        faults.append(Fault(*place, 1, "", f"a row is a JSON object, met {format_value(fields)}"))
        return
    misreadings = Row(fields).misreadings() if strict else {}
    faults += (
        Fault(*place, find_column(line, name), name, f"{fault}; the words are in docs/rows.md")
        for name, fault in misreadings.items()
    )
    if not misreadings:
        drafts.append(_draft_run(fields, str(place)))


def find_column(line: bytes, name: str) -> int:
    """Return the column, counted from 1, of the value of a field in the text of a JSON object; 1 where it has none.

    >>> find_column(b'{"a": {"b": 1}, "b": 2}', "b")
    22
    """
    text = line.decode("utf-8-sig", "replace")
    decoder, position = json.JSONDecoder(), text.find("{") + 1
    try:
        while (start := text.index('"', position)) >= 0:
            key, end = decoder.raw_decode(text, start)
            value_start = text.index(":", end) + 1
            value_start += len(text[value_start:]) - len(text[value_start:].lstrip())
            if key == name:
                return value_start + 1
            _, position = decoder.raw_decode(text, value_start)
    except (ValueError, RecursionError):
        pass
    return 1


class _RunDraft(NamedTuple):
    """A run without its scenario, and the scenario without what it leaves open; None where it cannot be simulated."""

    run: Run
    draft: Draft | None
    sweep: SweepKey


def _finish_runs(drafts: Sequence[_RunDraft]) -> tuple[Run, ...]:
    """Return the runs of drafts, in order, with what they leave open chosen once a sweep."""
    sweeps: dict[SweepKey, list[Draft]] = defaultdict(list)
    for run_draft in drafts:
        if run_draft.draft is not None and run_draft.draft.openings.any:
            sweeps[run_draft.sweep].append(run_draft.draft)
    choices = {sweep: choose_once(members) for sweep, members in sweeps.items()}
    return tuple(
        _finish_run(run, draft, choices.get(sweep, Choice()), len(sweeps[sweep]) if draft and draft.openings.any else 0)
        for run, draft, sweep in drafts
    )


def _finish_run(run: Run, draft: Draft | None, choice: Choice, num_members: int) -> Run:
    if draft is None:
        return run
    sweep = f", as for all {num_members} runs of its sweep" if num_members > 1 else ""
    try:
        scenario = finish_scenario(draft, choice, sweep)
    except ValueError as error:
        return replace(run, skipped=str(error))
    return replace(run, scenario=scenario, assumed=scenario.assumptions)


def _clean_name(value: Any) -> str:
    return escape_text(str(value)[:200])


def build_run(fields: Mapping[str, Any], place: str = "row") -> Run:
    """Return the run of a row that is a sweep of its own, with its scenario or the reason why it has none."""
    return _finish_runs([_draft_run(fields, place)])[0]


def _draft_run(fields: Mapping[str, Any], place: str) -> _RunDraft:
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
        tier=row.text("tier")[:1].upper(),
    )
    sweep = name_sweep(row)
    try:
        return _RunDraft(run, draft_scenario(row, place, ran=status != "oom"), sweep)
    except ScenarioError as error:
        fault = error.faults[0]
        return _RunDraft(replace(run, skipped=f"{fault.field}: {fault.message}"), None, sweep)
    except ValueError as error:
        return _RunDraft(replace(run, skipped=str(error)), None, sweep)
