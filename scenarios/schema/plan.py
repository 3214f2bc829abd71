"""The fields of a plan in files, derived from the decisions of `meshwise.strategies.plan.layout`.

The values that a decision allows follow from its declaration; the few decisions whose values are not flags, words or
numbers have types of their own (`_SPECIAL_TYPES`).
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    PlainValidator,
    Strict,
    Tag,
    ValidationError,
    WithJsonSchema,
    create_model,
)
from pydantic_core import InitErrorDetails

from meshwise.scenarios.files.errors import format_value
from meshwise.scenarios.files.fields import Count, OneOf, Table, Text
from meshwise.scenarios.schema.cluster import MAX_DEVICES
from meshwise.simulator.models.hugging_face import MAX_LAYERS
from meshwise.strategies.plan.layout import DECISIONS, STEP_DECISIONS, UNLIMITED, Decision
from meshwise.strategies.plan.mesh import AXES
from meshwise.strategies.plan.offloading import OFFLOADS, Offloading, StepPlace, offloading
from meshwise.strategies.plan.plan import PLAN_VERSION
from meshwise.strategies.plan.recomputation import ACTIVATION, Recompute, recomputation
from meshwise.strategies.schedules.schedule import SCHEDULES, Schedule, is_text
from meshwise.strategies.tables.embeddings import (
    HOST_WORD,
    TABLE_OPTIMIZERS,
    Embeddings,
    EmbeddingsError,
    TableCut,
    parse_embeddings,
)

MAX_BATCH = 10**7
MAX_MICROBATCHES = 100_000
Degree = Annotated[int, Count(MAX_DEVICES)]


def _check_recompute(value: Any) -> Any:
    recomputation(value)
    return value


_STAGE_RECOMPUTE_SCHEMAS: list[dict[str, Any]] = [
    {"enum": [*map(str, Recompute), ACTIVATION]},
    *(
        {
            "type": "object",
            "properties": {word: {"type": "integer", "minimum": 1, "description": "Layers of every stage."}},
            "required": [word],
            "additionalProperties": False,
        }
        for word in ("full", "selective")
    ),
    {
        "type": "object",
        "properties": {"operators": {"type": "array", "items": {"type": "string"}, "minItems": 1}},
        "required": ["operators"],
        "additionalProperties": False,
    },
]
_RECOMPUTE_SCHEMA = {
    "anyOf": [
        *_STAGE_RECOMPUTE_SCHEMAS,
        {
            "type": "array",
            "items": {"anyOf": _STAGE_RECOMPUTE_SCHEMAS},
            "minItems": 1,
            "description": "One for every stage.",
        },
    ]
}
AnyRecompute = Annotated[Any, PlainValidator(_check_recompute), WithJsonSchema(_RECOMPUTE_SCHEMA)]


def _parse_offload(value: Any) -> Offloading:
    return offloading(value)


_FRACTION_SCHEMA = {"type": "number", "minimum": 0, "maximum": 1}
_FRACTIONS_SCHEMA = {
    "anyOf": [
        _FRACTION_SCHEMA,
        {"type": "array", "items": _FRACTION_SCHEMA, "minItems": 1, "description": "One a pipeline rank."},
    ]
}
_STEPPED_SCHEMA = {
    "type": "object",
    "properties": {"fraction": _FRACTIONS_SCHEMA, "step": {"enum": list(map(str, StepPlace))}},
    "additionalProperties": False,
}
_OFFLOAD_SCHEMA = {
    "anyOf": [
        {"type": "array", "items": {"enum": list(OFFLOADS)}},
        {
            "type": "object",
            "properties": dict.fromkeys(OFFLOADS, _FRACTIONS_SCHEMA)
            | {"optimizer": {"anyOf": [_FRACTIONS_SCHEMA, _STEPPED_SCHEMA]}},
            "additionalProperties": False,
        },
    ]
}
AnyOffload = Annotated[Any, PlainValidator(_parse_offload), WithJsonSchema(_OFFLOAD_SCHEMA)]


_PLACEMENT_SCHEMA = {
    "anyOf": [
        {"enum": [*TableCut, HOST_WORD]},
        {
            "type": "object",
            "properties": {
                "cut": {"enum": list(TableCut)},
                "device": {"type": "integer", "minimum": 0, "description": "The data rank of a whole table."},
                "placement": {"enum": ["device", HOST_WORD]},
                "cache": _FRACTION_SCHEMA | {"description": "Share of the rows of a table on hosts on devices."},
            },
            "additionalProperties": False,
        },
    ]
}
_EMBEDDINGS_SCHEMA = {
    "anyOf": [
        _PLACEMENT_SCHEMA,
        {
            "type": "object",
            "properties": {
                "default": _PLACEMENT_SCHEMA,
                "optimizer": {"enum": list(TABLE_OPTIMIZERS)},
                "pipelined": {"type": "boolean"},
            },
            "additionalProperties": _PLACEMENT_SCHEMA,
        },
    ]
}


def _check_embeddings(value: Any) -> Embeddings:
    """Return the embeddings of a field; all faults at once, each at the line of its own name."""
    try:
        return parse_embeddings(value)
    except EmbeddingsError as error:
        details = [
            InitErrorDetails(type="value_error", loc=fault.path, input=value, ctx={"error": fault.message})
            for fault in error.faults
        ]
        raise ValidationError.from_exception_data("embeddings", details) from None


AnyEmbeddings = Annotated[Any, PlainValidator(_check_embeddings), WithJsonSchema(_EMBEDDINGS_SCHEMA)]


def _parse_stages(value: Any) -> str | tuple[int, ...]:
    if value in ("even", "balanced"):
        return str(value)
    is_counts = isinstance(value, list) and all(type(count) is int and 0 <= count <= MAX_LAYERS for count in value)
    if is_counts and 0 < len(value) <= MAX_LAYERS:
        return tuple(value)
    raise ValueError(f"holds even, balanced or a list of layers a stage, met {format_value(value)}; nearest: even")


_STAGE_LAYERS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_STAGES_SCHEMA = {"anyOf": [{"enum": ["even", "balanced"]}, _STAGE_LAYERS_SCHEMA]}


Placement = Annotated[
    tuple[Annotated[int, Count(MAX_DEVICES, minimum=0)], ...], Strict(False), Field(max_length=MAX_DEVICES)
]
AxisName = Annotated[str, OneOf(lambda: AXES)]


Sequences = Annotated[int, Count(MAX_BATCH)]
LocalBatches = Annotated[tuple[Sequences, ...], Strict(False), Field(min_length=1, max_length=MAX_DEVICES)]
AnyMicrobatch = Annotated[
    Annotated[Sequences, Tag("<number>")] | Annotated[LocalBatches, Tag("<list>")],
    Discriminator(lambda value: "<list>" if isinstance(value, list | tuple) else "<number>"),
]


def _parse_schedule(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"holds text, met {format_value(value)}")
    return str(Schedule.parse(value)) if is_text(value) else OneOf(lambda: SCHEDULES, "schedules").check(value)


_SCHEDULE_SCHEMA = {"anyOf": [{"enum": list(SCHEDULES)}, {"type": "string", "pattern": "[0-9]+[FBIW][0-9]+"}]}
AnySchedule = Annotated[str, PlainValidator(_parse_schedule), WithJsonSchema(_SCHEDULE_SCHEMA)]


Order = Annotated[tuple[AxisName, ...], Strict(False), Field(max_length=len(AXES))]

_SPECIAL_TYPES: dict[str, Any] = {
    "microbatch": AnyMicrobatch,
    "schedule": AnySchedule,
    "recompute": AnyRecompute,
    "offload": AnyOffload,
    "embeddings": AnyEmbeddings,
    "placement": Placement,
    "order": Order,
    "stages": Annotated[Any, PlainValidator(_parse_stages), WithJsonSchema(_STAGES_SCHEMA)],
}
"""Types of the decisions whose values are not flags, words or numbers."""


def _find_type(decision: Decision) -> Any:
    """Return the type that validates a decision's values in a file."""
    if decision.name in _SPECIAL_TYPES:
        return _SPECIAL_TYPES[decision.name]
    if isinstance(decision.default, bool):
        return bool
    if isinstance(decision.default, str):
        return Annotated[str, OneOf(lambda: list(decision.values))]
    if decision.values:
        return Literal[decision.values]
    return Annotated[int, Count(MAX_DEVICES if decision.most is None else decision.most, decision.least)]


def _build_field(decision: Decision, default: Any) -> Any:
    """Return the pydantic field of a decision; the JSON Schema shows its default as a file states it."""
    extra: dict[str, Any] | None = {"default": []} if isinstance(default, Offloading) else None
    if isinstance(default, Embeddings):
        extra = {"default": default.document}
    return Field(default=default, description=decision.text or None, json_schema_extra=extra)


def _build_layout_fields() -> dict[str, Any]:
    return {
        decision.name: (_find_type(decision), _build_field(decision, decision.default))
        for decision in DECISIONS.values()
    }


def _build_step_fields() -> dict[str, Any]:
    """Return the fields of a complete plan; a document may leave out those that are newer than the first format."""
    fields: dict[str, Any] = {}
    for decision in STEP_DECISIONS:
        kind = _find_type(decision)
        optional = kind if decision.absent is not None else kind | None
        fields[decision.key] = (
            (kind, _build_field(decision, ...))
            if decision.required
            else (optional, _build_field(decision, decision.absent))
        )
    return fields


Degrees = Annotated[list[Degree], Field(min_length=1, max_length=64)]


def _parse_stage_choice(value: Any) -> str | tuple[int, ...]:
    return "paced" if value == "paced" else _parse_stages(value)


_STAGE_CHOICES = {"anyOf": [{"enum": ["even", "balanced", "paced"]}, _STAGE_LAYERS_SCHEMA]}

_SPECIAL_CHOICES: dict[str, Any] = {
    "microbatch": Degree,
    "schedule": Annotated[str, OneOf(lambda: SCHEDULES, "schedules")],
    "order": Annotated[tuple[AxisName, ...], Strict(False), Field(min_length=1, max_length=len(AXES))],
    "stages": Annotated[Any, PlainValidator(_parse_stage_choice), WithJsonSchema(_STAGE_CHOICES)],
}
"""Types of the decisions that a limit of the space writes in another way than a plan."""


def _build_limit_fields() -> dict[str, Any]:
    """Return a field with a list of values for every decision that a space limits, which are all but `UNLIMITED`."""
    fields: dict[str, Any] = {}
    for decision in DECISIONS.values():
        if decision.name not in UNLIMITED:
            kind = _SPECIAL_CHOICES.get(decision.name, _find_type(decision))
            max_values = 2 if kind is bool else 256 if decision.name in ("recompute", "offload") else 64
            list_type = Annotated[list[kind], Field(min_length=1, max_length=max_values)]  # type: ignore[valid-type]
            extent = f"{decision.extent[0].upper()}{decision.extent[1:]}." if decision.extent else None
            fields[decision.name] = (list_type | None, Field(default=None, description=extent))
    return fields


if TYPE_CHECKING:

    class _Decisions(Table):
        """A field for every decision."""

        def __getattr__(self, name: str) -> Any: ...

    class _Layout(_Decisions): ...

    class _Steps(_Decisions): ...

    class _Limits(_Decisions): ...

else:
    _Layout = create_model("_Layout", __base__=Table, **_build_layout_fields())
    _Steps = create_model("_Steps", __base__=Table, **_build_step_fields())
    _Limits = create_model("_Limits", __base__=Table, **_build_limit_fields())


class PlanTable(_Layout):
    """How the step is laid out: degrees and choices."""


Pair = Annotated[tuple[Text, Annotated[int, Count(MAX_DEVICES)]], Strict(False)]
Cut = Annotated[tuple[Text, Annotated[list[Text], Field(max_length=8)]], Strict(False)]


KeptCuts = Annotated[tuple[Text, Annotated[list[Cut], Field(max_length=16)]], Strict(False)]


class MeshTable(Table):
    """Axes from the outermost to the innermost."""

    axes: Annotated[list[Pair], Field(max_length=8)]


class StageTable(Table):
    """Blocks of one stage, by name."""

    blocks: Annotated[list[Text], Field(max_length=MAX_LAYERS + 8)]


class ShardingTable(Table):
    """Which dims of an operator are cut by which axes."""

    operator: Text
    cuts: Annotated[list[Cut], Field(max_length=16)]
    kept: Annotated[list[KeptCuts], Field(max_length=16)] = Field(default=[])


class PlanDocument(_Steps):
    """A complete plan, as ``search --out`` writes it."""

    version: Annotated[int, Count(PLAN_VERSION, minimum=PLAN_VERSION)]
    mesh: MeshTable
    stages: Annotated[list[StageTable], Field(max_length=MAX_LAYERS)]
    shardings: Annotated[list[ShardingTable], Field(max_length=10_000)]
    num_microbatches: Annotated[int, Count(MAX_MICROBATCHES)]


AnyPlan = Annotated[
    Annotated[PlanDocument, Tag("<version>")] | Annotated[PlanTable, Tag("<written>")],
    Discriminator(lambda value: "<version>" if isinstance(value, dict) and "version" in value else "<written>"),
]


class SpaceTable(_Limits):
    """Limits on what the search may choose; a field that is left out has what people set today."""

    wide: bool = Field(default=False, description="Whether a field that is left out may be all that a layout can be.")
    core: bool = Field(default=False, description="Whether it has the few values of 3-D parallelism with ZeRO 0 and 1.")
    devices: Degrees | None = Field(default=None, description="Free devices that have ranks, the first ones.")
    tensor_depth: Degrees | None = None


AnySpace = Annotated[
    Annotated[Literal["wide", "core"], Tag("<extent>")] | Annotated[SpaceTable, Tag("<limits>")],
    Discriminator(lambda value: "<extent>" if isinstance(value, str) else "<limits>"),
]
