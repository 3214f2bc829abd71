"""The fields of scenario and plan files, and what each may hold.

Sizes have upper limits far beyond any machine, so that a mistyped one is a message and
neither an endless computation nor a full memory.

The fields of a scenario's ``run``: a long run of its training step on machines that fail.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, PlainValidator, Strict, Tag, WithJsonSchema, model_validator

from meshwise.scenarios.files.errors import shown
from meshwise.scenarios.files.fields import Count, Delay, OneOf, Quantity, Table, Text, Time
from meshwise.scenarios.schema.cluster import ClusterTable, ConditionsTable, MixedClusterTable
from meshwise.scenarios.schema.model import ModelTable
from meshwise.simulator.catalog import cluster_names
from meshwise.simulator.models.hugging_face import MAX_LAYERS
from meshwise.simulator.reliability.failures import failure_model_names
from meshwise.simulator.units import UNITS, Dimension
from meshwise.strategies.plan.framework import FRAMEWORKS
from meshwise.strategies.plan.layout import GRADIENT_REDUCTIONS
from meshwise.strategies.plan.mesh import AXES
from meshwise.strategies.plan.offloading import NOTHING, OFFLOADS, Offloading, StepPlace, offloading
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.plan import PLAN_VERSION
from meshwise.strategies.plan.problem import GRADIENT_PRECISIONS, OPTIMIZERS, PRECISIONS
from meshwise.strategies.plan.recomputation import ACTIVATION, Recompute, recomputation
from meshwise.strategies.schedules.schedule import SCHEDULES, Schedule, is_text
from meshwise.strategies.search.algorithms import ALGORITHMS

MAX_STEPS = 10**9
MAX_SPARES = 1_000_000
MAX_SEED = 2**63 - 1
MAX_RUNS = 1000


def _failure_names() -> list[str]:
    return list(failure_model_names())


def _interval(value: Any) -> float | None:
    if value == "best":
        return None
    try:
        return Quantity(Dimension.TIME).check(value)
    except ValueError as error:
        raise ValueError(f"holds a time or best; {error}") from None


_TIME_PATTERN = rf"^\s*[0-9.]+([eE][+-]?[0-9]+)?\s*({'|'.join(UNITS[Dimension.TIME])})\s*$"
_INTERVAL_SCHEMA = {"anyOf": [{"const": "best"}, {"type": "string", "pattern": _TIME_PATTERN}]}


class FailuresTable(Table):
    """Mean times between failures, at least one; what is left out does not fail."""

    device_mtbf: Time | None = Field(default=None, description="Of one device; its host is replaced.")
    host_mtbf: Time | None = Field(default=None, description="Of one host; it is replaced.")
    network_mtbf: Time | None = Field(default=None, description="Of the network at one host; restart in place.")
    software_mtbf: Time | None = Field(default=None, description="Of the whole job; restart in place.")

    @model_validator(mode="after")
    def _at_least_one(self) -> "FailuresTable":
        if not any(value is not None for _, value in self):
            raise ValueError(f"holds at least one of {', '.join(type(self).model_fields)}, met none")
        return self


def _tag_failures(value: Any) -> Literal["<name>", "<written>"]:
    return "<name>" if isinstance(value, str) else "<written>"


Failures = Annotated[
    Annotated[str, OneOf(_failure_names), Tag("<name>")] | Annotated[FailuresTable, Tag("<written>")],
    Discriminator(_tag_failures),
]


class CheckpointTable(Table):
    """What a checkpoint takes, and how often there is one."""

    interval: Annotated[Any, PlainValidator(_interval), WithJsonSchema(_INTERVAL_SCHEMA)] = Field(
        description="Training between two checkpoints; best: the one with the highest simulated goodput."
    )
    blocking: Delay = Field(description="Training stands still.")
    save: Delay | None = Field(default=None, description="Until it is durable. Default: blocking.")
    load: Delay = Field(description="Reading one back.")

    @model_validator(mode="after")
    def _blocking_is_part_of_save(self) -> "CheckpointTable":
        if self.save is not None and self.save < self.blocking:
            raise ValueError(
                f"save({self.save:g} s) is at least blocking({self.blocking:g} s), of which it is the rest"
            )
        return self


class RecoveryTable(Table):
    """What lies between a failure and loading a checkpoint."""

    detection: Delay
    restart: Delay = Field(description="Scheduling and initialisation.")
    repair: Delay = Field(description="Until a broken host can be used again.")
    replacement: Delay | None = Field(
        default=None, description="Until a host from elsewhere arrives where none is left. Default: there are none."
    )


class RunTable(Table):
    """A long run; one of ``duration`` and ``steps``."""

    duration: Time | None = None
    steps: Annotated[int, Count(MAX_STEPS)] | None = None
    failures: Failures = Field(description="A published failure model, or one written out.")
    checkpoint: CheckpointTable
    recovery: RecoveryTable
    spares: Annotated[int, Count(MAX_SPARES, least=0)] = Field(default=0, description="Hosts that stand by.")
    seed: Annotated[int, Count(MAX_SEED, least=0)] = 0
    runs: Annotated[int, Count(MAX_RUNS, least=2)] = Field(default=8, description="Simulated, for mean and error.")

    @model_validator(mode="after")
    def _one_of_them(self) -> "RunTable":
        if (self.duration is None) == (self.steps is None):
            met = "neither" if self.steps is None else "both"
            raise ValueError(f"holds one of duration and steps, met {met}")
        return self


MAX_SEQUENCE = 10**8
MAX_BATCH = 10**7
MAX_DEVICES = 1_000_000
MAX_MICROBATCHES = 100_000
MAX_ACTIONS = 1_000_000
"""Stages times microbatches of one plan."""
STEPS_IN_A_ROW = 6
"""Steps that are simulated at least of a schedule without a flush."""

Degree = Annotated[int, Count(MAX_DEVICES)]


def _cluster_names() -> list[str]:
    return list(cluster_names())


def _algorithm_names() -> list[str]:
    return list(ALGORITHMS)


def _shape(*keys: str) -> Callable[[Any], str]:
    """Return which of several shapes a mapping has: that of the first of ``keys`` in it, or "<written>"."""

    def choose(value: Any) -> str:
        return next((f"<{key}>" for key in keys if isinstance(value, dict) and key in value), "<written>")

    return choose


class TrainingTable(Table):
    """One optimizer step."""

    global_batch: Annotated[int, Count(MAX_BATCH)] = Field(description="Sequences a step.")
    sequence: Annotated[int, Count(MAX_SEQUENCE)] = Field(description="Tokens a sequence.")
    precision: Annotated[str, OneOf(lambda: PRECISIONS)] = "bf16"
    optimizer: Annotated[str, OneOf(lambda: OPTIMIZERS)] = "adamw"
    gradient_precision: Annotated[str, OneOf(lambda: GRADIENT_PRECISIONS)] | None = Field(
        default=None,
        description="Of accumulated gradients, same as the parameters'. Default: fp32 with bf16 and fp8, else same.",
    )
    gradient_clipping: bool = Field(default=False, description="Whether gradients are clipped by their norm.")
    framework: Annotated[str, OneOf(lambda: FRAMEWORKS)] = Field(
        default="megatron",
        description="What runs the step: what it does by itself, in memory and in time. Where it is written and is a "
        "trainer that plans are exported to, megatron or torchtitan, a search is among what that one can say.",
    )
    expandable_segments: bool = Field(
        default=False,
        description="Whether torch's allocator keeps next to nothing beside tensors: "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
    )
    frozen: bool = Field(default=False, description="Whether only low-rank adapters are trained, which cost nothing.")


class PresetCluster(ConditionsTable):
    """A cluster of the catalogue with ``nodes`` nodes, and what holds on top."""

    preset: Annotated[str, OneOf(_cluster_names, "clusters")]
    nodes: Annotated[int, Count(MAX_DEVICES)]
    devices_per_node: Annotated[int, Count(4096)] | None = None


class FileCluster(ConditionsTable):
    """A cluster file; ``nodes`` and ``devices_per_node`` replace what it says, the rest comes on top."""

    file: Text = Field(description="Path, relative to the scenario.")
    nodes: Annotated[int, Count(MAX_DEVICES)] | None = None
    devices_per_node: Annotated[int, Count(4096)] | None = None


AnyCluster = Annotated[
    Annotated[PresetCluster, Tag("<preset>")]
    | Annotated[FileCluster, Tag("<file>")]
    | Annotated[ClusterTable, Tag("<written>")]
    | Annotated[MixedClusterTable, Tag("<node_types>")],
    Discriminator(_shape("preset", "file", "node_types")),
]


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


Devices = Annotated[
    tuple[Annotated[int, Count(MAX_DEVICES, least=0)], ...], Strict(False), Field(max_length=MAX_DEVICES)
]
GradientReduction = Annotated[str, OneOf(lambda: GRADIENT_REDUCTIONS)]
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


class PlanTable(Table):
    """How the step is laid out: degrees and choices."""

    data: Degree = 1
    tensor: Degree = 1
    tensor_rows: Degree = Field(
        default=1, description="Rows of a grid of tensor-parallel ranks, of which tensor is the columns."
    )
    pipeline: Degree = 1
    context: Degree = Field(default=1, description="Ranks that share the tokens of each sequence.")
    attention: Annotated[str, OneOf(lambda: list(Attention))] = Field(
        default="ring", description="How the ranks of a context group compute attention."
    )
    expert: Degree = Field(default=1, description="Ranks, of those along data, that share the experts.")
    sequence_parallel: bool = False
    microbatch: AnyMicrobatch = Field(
        default=1, description="Sequences per microbatch and data-parallel rank, or a list of one size a data rank."
    )
    schedule: AnySchedule = Field(
        default="1f1b", description="A schedule by name, or its order: one line a pipeline rank, as in 0F0 0F1 0B0 0B1."
    )
    chunks: Annotated[int, Count(1000)] = Field(default=1, description="Model chunks per device.")
    zero: Literal[0, 1, 2, 3] = Field(
        default=0, description="Shared by data ranks: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too."
    )
    zero_shards: Annotated[int, Count(MAX_DEVICES, least=0)] = Field(
        default=0, description="Neighbouring data ranks that share states; 0 for all of them."
    )
    reshard_after_forward: bool = Field(
        default=True, description="With zero 3, parameters are given up after forward and gathered again for backward."
    )
    recompute: AnyRecompute = Field(
        default="none",
        description="For all layers, the first of every stage, by operator, or one of these a stage.",
    )
    overlap_gradients: bool = True
    overlap_tensor: bool = Field(
        default=False,
        description="Gathers and scatters of sequence parallelism run beside the products that need or make them.",
    )
    scatter_gather: bool = Field(
        default=False, description="A stage boundary crosses in one slice a tensor rank and is gathered behind it."
    )
    offload: AnyOffload = Field(
        default=NOTHING,
        description="What is kept in host memory: names, or fractions by name.",
        json_schema_extra={"default": []},
    )
    gradient_reduction: GradientReduction = Field(
        default="all_reduce", description="Who sums gradients over the data axis: all its ranks, or a central server."
    )
    order: Annotated[tuple[AxisName, ...], Strict(False), Field(max_length=len(AXES))] = Field(
        default=AXES, description="Axes from the outermost to the innermost; those of one rank may be left out."
    )
    placement: Devices = Field(default=(), description="The device of every rank, in order of rank.")
    stages: Annotated[Any, PlainValidator(_stages), WithJsonSchema(_STAGES_SCHEMA)] = "even"


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


class PlanDocument(Table):
    """A complete plan, as ``search --out`` writes it."""

    version: Annotated[int, Count(PLAN_VERSION, least=PLAN_VERSION)]
    mesh: MeshTable
    stages: Annotated[list[StageTable], Field(max_length=MAX_LAYERS)]
    shardings: Annotated[list[ShardingTable], Field(max_length=10_000)]
    schedule_name: AnySchedule
    chunks: Annotated[int, Count(1000)]
    microbatch: AnyMicrobatch
    num_microbatches: Annotated[int, Count(MAX_MICROBATCHES)]
    zero: Literal[0, 1, 2, 3]
    sequence_parallel: bool
    recompute: AnyRecompute
    overlap_gradients: bool
    attention: Annotated[str, OneOf(lambda: list(Attention))] | None = None
    scatter_gather: bool = False
    placement: Devices = ()
    offload: AnyOffload = Field(default=NOTHING, json_schema_extra={"default": []})
    reshard_after_forward: bool = True
    gradient_reduction: GradientReduction = "all_reduce"
    overlap_tensor: bool = False


AnyPlan = Annotated[
    Annotated[PlanDocument, Tag("<version>")] | Annotated[PlanTable, Tag("<written>")],
    Discriminator(_shape("version")),
]

Degrees = Annotated[list[Degree], Field(min_length=1, max_length=64)]
Flags = Annotated[list[bool], Field(min_length=1, max_length=2)]


Orders = Annotated[
    list[Annotated[tuple[AxisName, ...], Strict(False), Field(min_length=1, max_length=len(AXES))]],
    Field(min_length=1, max_length=64),
]
Shards = Annotated[list[Annotated[int, Count(MAX_DEVICES, least=0)]], Field(min_length=1, max_length=64)]


def _stage_choice(value: Any) -> str | tuple[int, ...]:
    return "paced" if value == "paced" else _stages(value)


_STAGE_CHOICES = {"anyOf": [{"enum": ["even", "balanced", "paced"]}, _LAYERS_A_STAGE]}
StageChoices = Annotated[
    list[Annotated[Any, PlainValidator(_stage_choice), WithJsonSchema(_STAGE_CHOICES)]],
    Field(min_length=1, max_length=64),
]


class SpaceTable(Table):
    """Limits on what the search may choose; a field that is left out has what people set today."""

    wide: bool = Field(default=False, description="Whether a field that is left out may be all that a layout can be.")
    core: bool = Field(default=False, description="Whether it has the few values of 3-D parallelism with ZeRO 0 and 1.")
    devices: Degrees | None = Field(default=None, description="Free devices that have ranks, the first ones.")
    data: Degrees | None = None
    tensor: Degrees | None = None
    tensor_rows: Degrees | None = None
    tensor_depth: Degrees | None = None
    pipeline: Degrees | None = None
    context: Degrees | None = None
    attention: Annotated[list[Annotated[str, OneOf(lambda: list(Attention))]], Field(min_length=1)] | None = None
    expert: Degrees | None = None
    order: Orders | None = None
    stages: StageChoices | None = None
    microbatch: Degrees | None = None
    schedule: Annotated[list[Annotated[str, OneOf(lambda: SCHEDULES, "schedules")]], Field(min_length=1)] | None = None
    chunks: Degrees | None = None
    zero: Annotated[list[Literal[0, 1, 2, 3]], Field(min_length=1)] | None = None
    zero_shards: Shards | None = None
    reshard_after_forward: Flags | None = None
    sequence_parallel: Flags | None = None
    overlap_gradients: Flags | None = None
    overlap_tensor: Flags | None = None
    scatter_gather: Flags | None = None
    recompute: Annotated[list[AnyRecompute], Field(min_length=1, max_length=256)] | None = None
    offload: Annotated[list[AnyOffload], Field(min_length=1, max_length=256)] | None = None
    gradient_reduction: Annotated[list[GradientReduction], Field(min_length=1)] | None = None


AnySpace = Annotated[
    Annotated[Literal["wide", "core"], Tag("<extent>")] | Annotated[SpaceTable, Tag("<limits>")],
    Discriminator(lambda value: "<extent>" if isinstance(value, str) else "<limits>"),
]


class SearchTable(Table):
    """How a plan is looked for."""

    algorithm: Annotated[str, OneOf(_algorithm_names, "algorithms")] = "auto"
    budget: Annotated[int, Count(10**9)] | None = Field(default=None, description="Evaluations.")
    seconds: Time | None = None
    options: dict[str, Any] = Field(default={}, description="Fields of the algorithm.")
    space: AnySpace = Field(
        default=SpaceTable(), description="Limits of the search space, or its extent in a word: wide or core."
    )
    pin: dict[str, Any] = Field(
        default={},
        description="Operators that are decided: block.operator, or block.number.operator, to the axis of each dim.",
    )


class MeasuredTable(Table):
    """What a run of this very scenario took."""

    step_time: Time
    source: Text


class ScenarioTable(Table):
    """A network, a machine and a training step; a plan, or how to look for one."""

    name: Text | None = None
    model: ModelTable
    training: TrainingTable
    cluster: AnyCluster
    plan: AnyPlan | None = None
    search: SearchTable = SearchTable()
    measured: MeasuredTable | None = None
    run: RunTable | None = None
