"""A model from a Hugging Face ``config.json``: strict JSON, and every error one message of that file."""

from pathlib import Path
from typing import Any

from scenarios.errors import Fault, ScenarioError, shown
from scenarios.reader import MAX_BYTES, parse
from simulator import strict_json
from simulator.models.hugging_face import ConfigError, spec_from_config
from simulator.models.model import Model
from simulator.plain_text import unsafe_character

_PLACED = 200_000
"""Bytes of a configuration whose fields are placed."""


def load_model(path: str | Path) -> Model:
    """Return the model that a ``config.json`` states.

    Raises
    ------
    ScenarioError
        Where the file cannot be read, is not JSON, or states no model known here; never another error.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ScenarioError((Fault(str(path), 0, 0, "", f"the file cannot be read: {reason}"),)) from None
    return model_in(content, str(path))


def model_in(content: bytes, file: str) -> Model:
    """Return the model that the content of a ``config.json`` states; ``file`` is what messages call it."""
    if len(content) > MAX_BYTES:
        raise ScenarioError((Fault(file, 0, 0, "", f"a file has at most {MAX_BYTES} bytes, met more"),))
    try:
        return spec_from_config(_mapping(strict_json.parse(content)))
    except strict_json.JsonError as error:
        raise ScenarioError((Fault(file, error.line, error.column, "", str(error)),)) from None
    except ConfigError as error:
        line, column = _place(content, error.field)
        raise ScenarioError((Fault(file, line, column, error.field, error.message),)) from None


def _mapping(data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise strict_json.JsonError(f"a configuration is a mapping, met {shown(data)}")
    met = next(filter(None, map(unsafe_character, strict_json.strings(data))), None)
    if met is not None:
        raise strict_json.JsonError(f"text is printable, met {met}")
    return data


def _place(content: bytes, field: str) -> tuple[int, int]:
    """Return the line and column of a field, or of the configuration where it leaves the field out.

    Of a long file, which lists the names of many classes, no place is told.
    """
    if len(content) > _PLACED:
        return 0, 0
    try:
        return parse(content).places.get((field,), (1, 1))
    except ScenarioError:  # JSON that is no strict YAML: a character written as two halves
        return 0, 0
