"""Checks documents against pydantic tables, and turns pydantic's errors into faults with file, line and column."""

import math
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from meshwise.scenarios.files.errors import Fault, nearest, shown
from meshwise.scenarios.files.reader import MAX_FAULTS, Document
from meshwise.strategies.schedules.schedule import OrderError

M = TypeVar("M", bound=BaseModel)

_HOLDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "finite_number": "a finite number",
}
_LIMITS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}
_YES_NO = {
    "yes": "true",
    "on": "true",
    "y": "true",
    "1": "true",
    "no": "false",
    "off": "false",
    "n": "false",
    "0": "false",
}


def check(model: type[M], document: Document) -> tuple[M | None, list[Fault]]:
    """Return the table of a document and its faults; None where there are any."""
    if not isinstance(document.data, dict):
        fields = ", ".join(model.model_fields)
        met = "nothing" if document.data is None else shown(document.data)
        return None, [document.fault((), f"the file holds a mapping with the fields {fields}; met {met}")]
    try:
        return model.model_validate(document.data), []
    except ValidationError as error:
        return None, [_fault(model, document, detail) for detail in _told(model, error.errors(include_url=False))]


def _told(model: type[BaseModel], details: list[ErrorDetails]) -> list[ErrorDetails]:
    """Return the first `MAX_FAULTS` details, and the first one of each further field of ``model``.

    So one field with very many faults hides no other field.
    """
    first, rest = details[:MAX_FAULTS], details[MAX_FAULTS:]
    told = {detail["loc"][0] for detail in first if detail["loc"]}
    others = {detail["loc"][0]: detail for detail in reversed(rest) if detail["loc"]}
    return first + [detail for name, detail in others.items() if name in model.model_fields and name not in told]


def sound_sections(model: type[BaseModel], document: Document, faults: list[Fault]) -> dict[str, Any]:
    """Return the top-level fields of ``document`` without faults, validated one by one."""
    wrong = {fault.field.split(".")[0] for fault in faults}
    data = document.data if isinstance(document.data, dict) else {}
    result: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        if name in data and name not in wrong:
            # info.annotation alone lacks the metadata of Annotated, and so its limits
            result[name] = TypeAdapter(info.rebuild_annotation()).validate_python(data[name])
    return result


def _fault(model: type[BaseModel], document: Document, detail: ErrorDetails) -> Fault:
    # pydantic puts tags of unions, such as <written>, and [key] into the location: neither stands in the file
    path = tuple(part for part in detail["loc"] if not (isinstance(part, str) and part[:1] == "<"))
    path = path[:-1] if path[-1:] == ("[key]",) else path
    error = detail.get("ctx", {}).get("error")
    path = (*path, error.rank) if isinstance(error, OrderError) else path
    return document.fault(path, _message(model, detail))


def _message(model: type[BaseModel], detail: ErrorDetails) -> str:
    kind, met, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "missing":
        return "this field is required"
    if kind == "extra_forbidden":
        return _unknown(model, detail["loc"])
    if kind in _HOLDS:
        return f"holds {_HOLDS[kind]}, met {shown(met)}{_near_value(kind, met)}"
    if kind in _LIMITS:
        words, name = _LIMITS[kind]
        near = f"; nearest: {context[name]}" if name in ("ge", "le") else ""
        return f"is {words} {context[name]}, met {shown(met)}{near}"
    if kind == "literal_error":
        names = [word.strip().strip("'") for word in str(context["expected"]).replace(" or ", ",").split(",")]
        return f"holds one of {', '.join(names)}, met {shown(met)}{nearest(str(met), names)}"
    if kind in ("too_long", "too_short"):
        bound = f"at most {context['max_length']}" if kind == "too_long" else f"at least {context['min_length']}"
        return f"has {bound} items, met {context['actual_length']}"
    if kind == "string_too_short":
        return f"has at least {context['min_length']} character, met {len(met) or 'none'}"
    if kind == "string_too_long":
        return f"has at most {context['max_length']} characters, met {len(met)}"
    if kind == "value_error":
        return str(context["error"])
    return f"{detail['msg']}, met {shown(met)}"


def _near_value(kind: str, met: Any) -> str:
    if kind == "bool_type" and str(met).lower() in _YES_NO:
        return f"; nearest: {_YES_NO[str(met).lower()]}"
    if kind == "int_type" and isinstance(met, float) and math.isfinite(met):
        return f"; nearest: {round(met)}"
    if kind == "int_type" and isinstance(met, str) and met.isascii() and met.isdigit() and len(met) < 20:
        return f"; nearest: {int(met)}"
    return ""


def _unknown(model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    known = _model_at(model, location[:-1])
    names = list(known.model_fields) if known else []
    return f"there is no such field; known: {', '.join(names)}{nearest(str(location[-1]), names)}"


def _model_at(model: type[BaseModel], location: tuple[int | str, ...]) -> type[BaseModel] | None:
    """Return the table at ``location`` of ``model``; None where there is none."""
    current: Any = model
    for index, part in enumerate(location):
        if isinstance(part, str) and part[:1] == "<":
            current = next((m for m in _models(current) if index and _has_tag(m, part)), current)
        elif isinstance(part, int):
            current = next(iter(_models(current)), None)
        else:
            table = next((m for m in _models(current) if part in m.model_fields), None)
            current = table.model_fields[part].rebuild_annotation() if table else None
    return next(iter(_models(current)), None)


def _has_tag(model: type[BaseModel], tag: str) -> bool:
    name = tag.strip("<>")
    return (
        name in model.model_fields if name != "written" else not {"preset", "file", "version"} & set(model.model_fields)
    )


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Return the tables in an annotation, in order."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, list, tuple) or get_args(annotation):
        return [model for argument in get_args(annotation) for model in _models(argument)]
    return []
