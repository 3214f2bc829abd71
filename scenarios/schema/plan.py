"""The fields of a plan in files, derived from the decisions of `meshwise.strategies.plan.layout`.

The values that a decision allows follow from its declaration; the few decisions whose values are not flags, words or
numbers have types of their own (`_SPECIAL_TYPES`).
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, PlainValidator, Strict, Tag, WithJsonSchema, create_model

from meshwise.scenarios.files.errors import shown
from meshwise.scenarios.files.fields import Count, OneOf, Table, Text
from meshwise.scenarios.schema.cluster import MAX_DEVICES
from meshwise.simulator.models.hugging_face import MAX_LAYERS
from meshwise.strategies.plan.layout import DECISIONS, STEP_DECISIONS, Decision
from meshwise.strategies.plan.mesh import AXES
from meshwise.strategies.plan.offloading import OFFLOADS, Offloading, StepPlace, offloading
from meshwise.strategies.plan.plan import PLAN_VERSION
from meshwise.strategies.plan.recomputation import ACTIVATION, Recompute, recomputation
from meshwise.strategies.schedules.schedule import SCHEDULES, Schedule, is_text

MAX_BATCH = 10**7
MAX_MICROBATCHES = 100_000
Degree = Annotated[int, Count(MAX_DEVICES)]


def _recompute(value: Any) -> Any:
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
AnyRecompute = Annotated[Any, PlainValidator(_recompute), WithJsonSchema(_RECOMPUTE_SCHEMA)]


def _offload(value: Any) -> Offloading:
    return offloading(value)


_PART = {"type": "number", "minimum": 0, "maximum": 1}
_PARTS = {"anyOf": [_PART, {"type": "array", "items": _PART, "minItems": 1, "description": "One a pipeline rank."}]}
_STEPPED = {
    "type": "object",
    "properties": {"fraction": _PARTS, "step": {"enum": list(map(str, StepPlace))}},
    "additionalProperties": False,
}
_OFFLOAD_SCHEMA = {
    "anyOf": [
        {"type": "array", "items": {"enum": list(OFFLOADS)}},
        {
            "type": "object",
            "properties": dict.fromkeys(OFFLOADS, _PARTS) | {"optimizer": {"anyOf": [_PARTS, _STEPPED]}},
            "additionalProperties": False,
        },
    ]
}
AnyOffload = Annotated[Any, PlainValidator(_offload), WithJsonSchema(_OFFLOAD_SCHEMA)]


def _stages(value: Any) -> str | tuple[int, ...]:
    if value in ("even", "balanced"):
        return str(value)
    counts = isinstance(value, list) and all(type(count) is int and 0 <= count <= MAX_LAYERS for count in value)
    if counts and 0 < len(value) <= MAX_LAYERS:
        return tuple(value)
    raise ValueError(f"holds even, balanced or a list of layers a stage, met {shown(value)}; nearest: even")


_LAYERS_A_STAGE = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_STAGES_SCHEMA = {"anyOf": [{"enum": ["even", "balanced"]}, _LAYERS_A_STAGE]}


Placement = Annotated[
    tuple[Annotated[int, Count(MAX_DEVICES, least=0)], ...], Strict(False), Field(max_length=MAX_DEVICES)
]
AxisName = Annotated[str, OneOf(lambda: AXES)]


Sequences = Annotated[int, Count(MAX_BATCH)]
LocalBatches = Annotated[tuple[Sequences, ...], Strict(False), Field(min_length=1, max_length=MAX_DEVICES)]
AnyMicrobatch = Annotated[
    Annotated[Sequences, Tag("<number>")] | Annotated[LocalBatches, Tag("<list>")],
    Discriminator(lambda value: "<list>" if isinstance(value, list | tuple) else "<number>"),
]


def _schedule(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"holds text, met {shown(value)}")
    return str(Schedule.parse(value)) if is_text(value) else OneOf(lambda: SCHEDULES, "schedules").check(value)


_SCHEDULE_SCHEMA = {"anyOf": [{"enum": list(SCHEDULES)}, {"type": "string", "pattern": "[0-9]+[FBIW][0-9]+"}]}
AnySchedule = Annotated[str, PlainValidator(_schedule), WithJsonSchema(_SCHEDULE_SCHEMA)]


Order = Annotated[tuple[AxisName, ...], Strict(False), Field(max_length=len(AXES))]

_OWN_TYPES: dict[str, Any] = {
    "microbatch": AnyMicrobatch,
    "schedule": AnySchedule,
    "recompute": AnyRecompute,
    "offload": AnyOffload,
    "placement": Placement,
    "order": Order,
    "stages": Annotated[Any, PlainValidator(_stages), WithJsonSchema(_STAGES_SCHEMA)],
}
"""Types of the decisions whose values are not flags, words or numbers."""


def _type_of(item: Decision) -> Any:
    """Return the type that validates a decision's values in a file."""
    if item.name in _OWN_TYPES:
        return _OWN_TYPES[item.name]
    if isinstance(item.default, bool):
        return bool
    if isinstance(item.default, str):
        return Annotated[str, OneOf(lambda: list(item.values))]
    if item.values:
        return Literal[item.values]
    return Annotated[int, Count(MAX_DEVICES if item.most is None else item.most, item.least)]


def _field(item: Decision, default: Any) -> Any:
    """Return the pydantic field of a decision; the JSON Schema shows its default as a file states it."""
    extra: dict[str, Any] | None = {"default": []} if isinstance(default, Offloading) else None
    return Field(default=default, description=item.text or None, json_schema_extra=extra)


def _layout_fields() -> dict[str, Any]:
    return {item.name: (_type_of(item), _field(item, item.default)) for item in DECISIONS.values()}


def _step_fields() -> dict[str, Any]:
    """Return the fields of a complete plan; a document may leave out those that are newer than the first format."""
    fields: dict[str, Any] = {}
    for item in STEP_DECISIONS:
        kind = _type_of(item)
        optional = kind if item.absent is not None else kind | None
        fields[item.key] = (kind, _field(item, ...)) if item.required else (optional, _field(item, item.absent))
    return fields


Degrees = Annotated[list[Degree], Field(min_length=1, max_length=64)]


def _stage_choice(value: Any) -> str | tuple[int, ...]:
    return "paced" if value == "paced" else _stages(value)


_STAGE_CHOICES = {"anyOf": [{"enum": ["even", "balanced", "paced"]}, _LAYERS_A_STAGE]}

_OWN_CHOICES: dict[str, Any] = {
    "microbatch": Degree,
    "schedule": Annotated[str, OneOf(lambda: SCHEDULES, "schedules")],
    "order": Annotated[tuple[AxisName, ...], Strict(False), Field(min_length=1, max_length=len(AXES))],
    "stages": Annotated[Any, PlainValidator(_stage_choice), WithJsonSchema(_STAGE_CHOICES)],
}
"""Types of the decisions that a limit of the space writes in another way than a plan."""


def _limit_fields() -> dict[str, Any]:
    """Return a field with a list of values for every decision that a space limits, which are all but placement."""
    fields: dict[str, Any] = {}
    for item in DECISIONS.values():
        if item.name != "placement":
            kind = _OWN_CHOICES.get(item.name, _type_of(item))
            most = 2 if kind is bool else 256 if item.name in ("recompute", "offload") else 64
            listed = Annotated[list[kind], Field(min_length=1, max_length=most)]  # type: ignore[valid-type]
            extent = f"{item.extent[0].upper()}{item.extent[1:]}." if item.extent else None
            fields[item.name] = (listed | None, Field(default=None, description=extent))
    return fields


if TYPE_CHECKING:

    class _Decisions(Table):
        """A field for every decision."""

        def __getattr__(self, name: str) -> Any: ...

    class _Layout(_Decisions): ...

    class _Steps(_Decisions): ...

    class _Limits(_Decisions): ...

else:
    _Layout = create_model("_Layout", __base__=Table, **_layout_fields())
    _Steps = create_model("_Steps", __base__=Table, **_step_fields())
    _Limits = create_model("_Limits", __base__=Table, **_limit_fields())


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

    version: Annotated[int, Count(PLAN_VERSION, least=PLAN_VERSION)]
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
