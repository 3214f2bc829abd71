"""A model from a Hugging Face ``config.json``: strict JSON, and every error one message of that file."""

import json
from pathlib import Path
from typing import Any

from scenarios.errors import Fault, ScenarioError, shown
from scenarios.reader import MAX_BYTES
from simulator.models.hugging_face import ConfigError, spec_from_config
from simulator.models.model import Model


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
    try:
        return spec_from_config(_mapping(content))
    except ConfigError as error:
        raise ScenarioError((Fault(file, 0, 0, error.field, error.message),)) from None
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, _NotAConfig) else f"this is not JSON: {_first_line(error)}"
    raise ScenarioError((Fault(file, 0, 0, "", reason),))


class _NotAConfig(ValueError):
    """The file as a whole is not a configuration."""


def _mapping(content: bytes) -> dict[str, Any]:
    if len(content) > MAX_BYTES:
        raise _NotAConfig(f"a file has at most {MAX_BYTES} bytes, met more")
    data = json.loads(content.decode("utf-8"), object_pairs_hook=_without_duplicates, parse_constant=_no_number)
    if not isinstance(data, dict):
        raise _NotAConfig(f"a configuration is a mapping, met {shown(data)}")
    return data


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ConfigError(shown(twice), "a field is stated once, met it twice")
    return found


def _no_number(text: str) -> float:
    raise _NotAConfig(f"a number is finite, met {text}")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
