"""The schedule of a plan in a file of its own, as torch.distributed.pipelining's CSV."""

from dataclasses import replace
from pathlib import Path

from scenarios.errors import Fault, ScenarioError
from scenarios.named_file import referenced
from scenarios.reader import MAX_BYTES, Document, FieldPath
from strategies.schedule import OrderError
from strategies.schedule_csv import from_csv

ENDING = ".csv"


def with_schedule(document: Document, path: FieldPath = ("plan",)) -> Document:
    """Return a scenario or plan file with the order itself where its schedule names a file, beside it, in CSV.

    Raises
    ------
    ScenarioError
        Where that file lies outside the folder, cannot be read, or is no schedule.
    """
    table = document.data
    for key in path:
        table = table.get(key) if isinstance(table, dict) else None
    name = table.get("schedule") if isinstance(table, dict) else None
    if not isinstance(name, str) or not name.lower().endswith(ENDING):
        return document
    order = _order(referenced(document, (*path, "schedule"), name), document, path)
    found = {**table, "schedule": order}
    return replace(document, data=found if not path else {**document.data, path[0]: found})


def _order(file: Path, document: Document, path: FieldPath) -> str:
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ValueError(f"a schedule has at most {MAX_BYTES} bytes")
        text = file.read_text("utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        fault = document.fault((*path, "schedule"), f"{file}: the file cannot be read: {reason}")
        raise ScenarioError((fault,)) from None
    try:
        return str(from_csv(text))
    except OrderError as error:
        raise ScenarioError((Fault(str(file), error.rank + 1, 1, "schedule", str(error)),)) from None
    except ValueError as error:
        raise ScenarioError((Fault(str(file), 1, 1, "schedule", str(error)),)) from None
