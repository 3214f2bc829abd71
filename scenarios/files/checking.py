"""Checks documents against pydantic tables, and turns pydantic's errors into faults with file, line and column."""

import math
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from meshwise.scenarios.files.errors import Fault, format_value, suggest_nearest
from meshwise.scenarios.files.reader import MAX_FAULTS, Document
from meshwise.strategies.schedules.schedule import OrderError

M = TypeVar("M", bound=BaseModel)

_TYPE_WORDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "finite_number": "a finite number",
    **dict.fromkeys(("list_type", "tuple_type"), "a list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "a mapping"),
}
_LIMITS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}
_TRUTH_WORDS = dict.fromkeys(("yes", "on", "y", "1"), "true") | dict.fromkeys(("no", "off", "n", "0"), "false")


def check_table(model: type[M], document: Document) -> tuple[M | None, list[Fault]]:
    """Return the table of a document and its faults; None where there are any."""
    if not isinstance(document.data, dict):
        fields = ", ".join(model.model_fields)
        met_text = "nothing" if document.data is None else format_value(document.data)
        return None, [document.fault((), f"the file holds a mapping with the fields {fields}; met {met_text}")]
    try:
        return model.model_validate(document.data), []
    except ValidationError as error:
        return None, [
            _build_fault(model, document, detail) for detail in _select_details(model, error.errors(include_url=False))
        ]


def _select_details(model: type[BaseModel], details: list[ErrorDetails]) -> list[ErrorDetails]:
    """Return the first `MAX_FAULTS` details, and the first one of each further field of ``model``.

    So one field with very many faults hides no other field.
    """
    first_details, other_details = details[:MAX_FAULTS], details[MAX_FAULTS:]
    told_fields = {detail["loc"][0] for detail in first_details if detail["loc"]}
    details_by_field = {detail["loc"][0]: detail for detail in reversed(other_details) if detail["loc"]}
    return first_details + [
        detail for name, detail in details_by_field.items() if name in model.model_fields and name not in told_fields
    ]


def read_sound_sections(model: type[BaseModel], document: Document, faults: list[Fault]) -> dict[str, Any]:
    """Return the top-level fields of ``document`` without faults, validated one by one."""
    faulty_names = {fault.field.split(".")[0] for fault in faults}
    data = document.data if isinstance(document.data, dict) else {}
    result: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        if name in data and name not in faulty_names:
            # info.annotation alone lacks the metadata of Annotated, and so its limits
            result[name] = TypeAdapter(info.rebuild_annotation()).validate_python(data[name])
    return result


def _build_fault(model: type[BaseModel], document: Document, detail: ErrorDetails) -> Fault:
    # pydantic puts tags of unions, such as <written>, and [key] into the location: neither stands in the file
    path = tuple(part for part in detail["loc"] if not (isinstance(part, str) and part[:1] == "<"))
    path = path[:-1] if path[-1:] == ("[key]",) else path
    error = detail.get("ctx", {}).get("error")
    path = (*path, error.rank) if isinstance(error, OrderError) else path
    return document.fault(path, _format_message(model, detail))


def _format_message(model: type[BaseModel], detail: ErrorDetails) -> str:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "missing":
        return "this field is required"
    if kind == "extra_forbidden":
        return _format_unknown(model, detail["loc"])
    if kind in _TYPE_WORDS:
        return f"holds {_TYPE_WORDS[kind]}, met {format_value(value)}{_suggest_value(kind, value)}"
    if kind in _LIMITS:
        words, name = _LIMITS[kind]
        suggestion = f"; nearest: {context[name]}" if name in ("ge", "le") else ""
        return f"is {words} {context[name]}, met {format_value(value)}{suggestion}"
    if kind == "literal_error":
        names = [word.strip().strip("'") for word in str(context["expected"]).replace(" or ", ",").split(",")]
        return f"holds one of {', '.join(names)}, met {format_value(value)}{suggest_nearest(str(value), names)}"
    if kind in ("too_long", "too_short"):
        bound = f"at most {context['max_length']}" if kind == "too_long" else f"at least {context['min_length']}"
        return f"has {bound} items, met {context['actual_length']}"
    if kind == "string_too_short":
        return f"has at least {context['min_length']} character, met {len(value) or 'none'}"
    if kind == "string_too_long":
        return f"has at most {context['max_length']} characters, met {len(value)}"
    if kind == "value_error":
        return str(context["error"])
    return f"{detail['msg']}, met {format_value(value)}"


def _suggest_value(kind: str, value: Any) -> str:
    if kind == "bool_type" and str(value).lower() in _TRUTH_WORDS:
        return f"; nearest: {_TRUTH_WORDS[str(value).lower()]}"
    if kind == "int_type" and isinstance(value, float) and math.isfinite(value):
        return f"; nearest: {round(value)}"
    if kind == "int_type" and isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        return f"; nearest: {int(value)}"
    return ""


def _format_unknown(model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    table = _find_model(model, location[:-1])
    names = list(table.model_fields) if table else []
    return f"there is no such field; known: {', '.join(names)}{suggest_nearest(str(location[-1]), names)}"


def _find_model(model: type[BaseModel], location: tuple[int | str, ...]) -> type[BaseModel] | None:
    """Return the table at ``location`` of ``model``; None where there is none."""
    current: Any = model
    for index, part in enumerate(location):
        if isinstance(part, str) and part[:1] == "<":
            current = next(
                (candidate for candidate in _list_models(current) if index and _has_tag(candidate, part)), current
            )
        elif isinstance(part, int):
            current = next(iter(_list_models(current)), None)
        else:
            table = next((candidate for candidate in _list_models(current) if part in candidate.model_fields), None)
            current = table.model_fields[part].rebuild_annotation() if table else None
    return next(iter(_list_models(current)), None)


def _has_tag(model: type[BaseModel], tag: str) -> bool:
    name = tag.strip("<>")
    if "kind" in model.model_fields:
        return name in get_args(model.model_fields["kind"].annotation)
    return (
        name in model.model_fields if name != "written" else not {"preset", "file", "version"} & set(model.model_fields)
    )


def _list_models(annotation: Any) -> list[type[BaseModel]]:
    """Return the tables in an annotation, in order."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, list, tuple) or get_args(annotation):
        return [model for argument in get_args(annotation) for model in _list_models(argument)]
    return []
