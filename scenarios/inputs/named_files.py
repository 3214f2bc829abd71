"""Files that an input file refers to, in its own folder: the configuration of a model and the schedule of a plan.

The configuration is a Hugging Face ``config.json``, read as strict JSON. The schedule is a CSV file as those of
torch.distributed.pipelining.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwise.scenarios.files.errors import Fault, ScenarioError, format_value
from meshwise.scenarios.files.reader import MAX_BYTES, Document, FieldPath, parse_document
from meshwise.simulator.files import JsonError, list_strings, parse_json, unsafe_character
from meshwise.simulator.models.hugging_face import ConfigError, spec_from_config
from meshwise.simulator.models.model import Model
from meshwise.strategies.schedules.schedule import OrderError, from_csv


def resolve_reference(document: Document, path: FieldPath, name: str) -> Path:
    """Return the path of the file that the field at ``path`` names, relative to the document's folder.

    Raises
    ------
    ScenarioError
        Where the name leads out of the folder, directly or by a link, or to a pipe or device, whose content may never
        end.
    """
    folder = Path(document.file).parent
    target = folder / name
    try:
        is_outside = not target.resolve().is_relative_to(folder.resolve())
        is_special = target.exists() and not (target.is_file() or target.is_dir())
    except (OSError, ValueError, RuntimeError) as error:  # a loop of links, or a name that no file has
        raise ScenarioError((document.fault(path, f"names a file, met {format_value(name)}: {error}"),)) from None
    if is_outside:
        message = f"a path stays in the folder of its file, without links out of it; met {format_value(name)}"
        raise ScenarioError((document.fault(path, message),))
    if is_special:
        raise ScenarioError((document.fault(path, f"names a file, met a pipe or device, {format_value(name)}"),))
    return target


_MAX_PLACED = 200_000
"""Largest configuration, in bytes, for which messages look up lines and columns."""


def load_model(path: str | Path) -> Model:
    """Return the model of a ``config.json``.

    Raises
    ------
    ScenarioError
        Where the file cannot be read, is not JSON, or has no known kind of model; never another error.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ScenarioError((Fault(str(path), 0, 0, "", f"the file cannot be read: {reason}"),)) from None
    return read_model(content, str(path))


def read_model(content: bytes, file: str) -> Model:
    """Return the model of the content of a ``config.json``; ``file`` is its name in messages."""
    if len(content) > MAX_BYTES:
        raise ScenarioError((Fault(file, 0, 0, "", f"a file has at most {MAX_BYTES} bytes, met more"),))
    try:
        return spec_from_config(_check_mapping(parse_json(content)))
    except JsonError as error:
        raise ScenarioError((Fault(file, error.line, error.column, "", str(error)),)) from None
    except ConfigError as error:
        line, column = _find_place(content, error.field)
        raise ScenarioError((Fault(file, line, column, error.field, error.message),)) from None


def _check_mapping(data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise JsonError(f"a configuration is a mapping, met {format_value(data)}")
    character = next(filter(None, map(unsafe_character, list_strings(data))), None)
    if character is not None:
        raise JsonError(f"text is printable, met {character}")
    return data


def _find_place(content: bytes, field: str) -> tuple[int, int]:
    """Return the line and column of a field, of the configuration's start where the field is missing, else (0, 0).

    Long files, which list the names of many classes, have no places.
    """
    if len(content) > _MAX_PLACED:
        return 0, 0
    try:
        return parse_document(content).places.get((field,), (1, 1))
    except ScenarioError:  # JSON that is not strict YAML: a character escaped as a surrogate pair
        return 0, 0


ENDING = ".csv"


def with_schedule(document: Document, path: FieldPath = ("plan",)) -> Document:
    """Return a scenario or plan document in which a schedule that names a CSV file is replaced by the order in it.

    Raises
    ------
    ScenarioError
        Where that file lies outside the folder, cannot be read, or has no valid schedule.
    """
    table = document.data
    for key in path:
        table = table.get(key) if isinstance(table, dict) else None
    name = table.get("schedule") if isinstance(table, dict) else None
    if not isinstance(name, str) or not name.lower().endswith(ENDING):
        return document
    order = _read_order(resolve_reference(document, (*path, "schedule"), name), document, path)
    new_table = {**table, "schedule": order}
    return replace(document, data=new_table if not path else {**document.data, path[0]: new_table})


def _read_order(file: Path, document: Document, path: FieldPath) -> str:
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
    except ValueError as error:
        line = error.rank + 1 if isinstance(error, OrderError) else 1
        raise ScenarioError((Fault(str(file), line, 1, "schedule", str(error)),)) from None
