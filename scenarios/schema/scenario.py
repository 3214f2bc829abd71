"""The fields of scenario files, those of a long run included, and the values that each allows.

Sizes have upper limits far beyond any machine, so that a mistyped one gives a message, not an endless computation or a
full memory.
"""

from typing import Annotated, Any

from pydantic import Discriminator, Field, PlainValidator, Tag, WithJsonSchema, model_validator

from meshwise.scenarios.files.amounts import parse_amount, parse_counts, parse_dollars, parse_duration, parse_price
from meshwise.scenarios.files.fields import Count, Delay, OneOf, Quantity, Table, Text, Time, tag_by_key
from meshwise.scenarios.schema.cluster import MAX_DEVICES, ClusterTable, ConditionsTable, MixedClusterTable
from meshwise.scenarios.schema.loads import MAX_SEED, MAX_SEQUENCE, AnyLengths, LoadsTable, Order, Packing
from meshwise.scenarios.schema.model import ModelTable
from meshwise.scenarios.schema.plan import MAX_BATCH, AnyPlan, AnySpace, SpaceTable
from meshwise.simulator.catalog import cluster_names
from meshwise.simulator.machine.casts import SCALINGS
from meshwise.simulator.reliability.failures import failure_model_names
from meshwise.simulator.units import UNITS, Dimension
from meshwise.strategies.plan.framework import ENTRIES, describe_frameworks
from meshwise.strategies.plan.problem import (
    GRADIENT_PRECISIONS,
    KERNELS,
    LOSSES,
    OPTIMIZERS,
    PRECISIONS,
    STATE_PRECISIONS,
    Training,
)
from meshwise.strategies.search.algorithms import ALGORITHMS
from meshwise.strategies.search.objective import Objective

MAX_STEPS = 10**9
MAX_SPARES = 1_000_000
MAX_RUNS = 1000


def _parse_interval(value: Any) -> float | None:
    if value == "best":
        return None
    try:
        return Quantity(Dimension.TIME).check(value)
    except ValueError as error:
        raise ValueError(f"holds a time or best; {error}") from None


def _parse_launch(value: Any) -> float | str:
    if value == "framework":
        return "framework"
    try:
        return Quantity(Dimension.TIME, allows_zero=True).check(value)
    except ValueError as error:
        raise ValueError(f"holds a time or framework; {error}") from None


_TIME_PATTERN = rf"^\s*[0-9.]+([eE][+-]?[0-9]+)?\s*({'|'.join(UNITS[Dimension.TIME])})\s*$"
_INTERVAL_SCHEMA = {"anyOf": [{"const": "best"}, {"type": "string", "pattern": _TIME_PATTERN}]}
_LAUNCH_SCHEMA = {"anyOf": [{"const": "framework"}, {"type": "string", "pattern": _TIME_PATTERN}]}


class FailuresTable(Table):
    """Mean times between failures, at least one; what is left out does not fail."""

    device_mtbf: Time | None = Field(default=None, description="Of one device; its host is replaced.")
    host_mtbf: Time | None = Field(default=None, description="Of one host; it is replaced.")
    network_mtbf: Time | None = Field(default=None, description="Of the network at one host; restart in place.")
    software_mtbf: Time | None = Field(default=None, description="Of the whole job; restart in place.")

    @model_validator(mode="after")
    def _check_not_empty(self) -> "FailuresTable":
        if not any(value is not None for _, value in self):
            raise ValueError(f"holds at least one of {', '.join(type(self).model_fields)}, met none")
        return self


Failures = Annotated[
    Annotated[str, OneOf(failure_model_names), Tag("<name>")] | Annotated[FailuresTable, Tag("<written>")],
    Discriminator(lambda value: "<name>" if isinstance(value, str) else "<written>"),
]


class CheckpointTable(Table):
    """What a checkpoint takes, and how often there is one."""

    interval: Annotated[Any, PlainValidator(_parse_interval), WithJsonSchema(_INTERVAL_SCHEMA)] = Field(
        description="Training between two checkpoints; best: the one with the highest simulated goodput."
    )
    blocking: Delay = Field(description="Training stands still.")
    save: Delay | None = Field(default=None, description="Until it is durable. Default: blocking.")
    load: Delay = Field(description="Reading one back.")

    @model_validator(mode="after")
    def _check_blocking(self) -> "CheckpointTable":
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
    spares: Annotated[int, Count(MAX_SPARES, minimum=0)] = Field(default=0, description="Hosts that stand by.")
    seed: Annotated[int, Count(MAX_SEED, minimum=0)] = 0
    runs: Annotated[int, Count(MAX_RUNS, minimum=2)] = Field(default=8, description="Simulated, for mean and error.")

    @model_validator(mode="after")
    def _check_end(self) -> "RunTable":
        if (self.duration is None) == (self.steps is None):
            met_text = "neither" if self.steps is None else "both"
            raise ValueError(f"holds one of duration and steps, met {met_text}")
        return self


MAX_ACTIONS = 1_000_000
"""Most stages times microbatches of one plan."""
MIN_STEADY_STEPS = 6
"""Least number of simulated steps of a schedule without a flush."""


class TrainingTable(Table):
    """One optimizer step."""

    global_batch: Annotated[int, Count(MAX_BATCH)] = Field(description="Sequences a step.")
    sequence: Annotated[int, Count(MAX_SEQUENCE)] | None = Field(
        default=None,
        description="Tokens a sequence. Default: of a captured graph, images and recommenders those of their samples; "
        "other models take any, and need it.",
    )
    precision: Annotated[str, OneOf(lambda: PRECISIONS)] = "bf16"
    optimizer: Annotated[str, OneOf(lambda: OPTIMIZERS)] = "adamw"
    gradient_precision: Annotated[str, OneOf(lambda: GRADIENT_PRECISIONS)] | None = Field(
        default=None,
        description="Of accumulated gradients, same as the parameters'. Default: fp32 with bf16 and fp8 and fp32 main "
        "weights, else same.",
    )
    state_precision: Annotated[str, OneOf(lambda: STATE_PRECISIONS)] = Field(
        default="fp32",
        description="Of the optimizer's moments. bf16: 16 bits, beside fp32 main weights; same: as the parameters, "
        "without main weights, as torch's optimizers on 16-bit weights; int8: 8 bits, beside fp32 main weights.",
    )
    fp8_scaling: Annotated[str, OneOf(lambda: SCALINGS)] | None = Field(
        default=None,
        description="How casts to fp8 find their scales: from earlier steps, delayed; from the largest value of a "
        "tensor; or of each row. Default: as the framework does it.",
    )
    gradient_clipping: bool = Field(default=False, description="Whether gradients are clipped by their norm.")
    framework: Annotated[str, OneOf(lambda: ENTRIES, "frameworks")] = Field(
        default="megatron",
        description="What runs the step: what it does by itself, in memory and in time. Where it is written and is a "
        "trainer that plans are exported to, such as megatron or torchtitan, a search is among what that one can say. "
        f"{describe_frameworks()}.",
    )
    kernels: Annotated[str, OneOf(lambda: KERNELS)] | None = Field(
        default=None,
        description="Whether norms, rotary positions, gates and unfused softmax are torch's operators one by one, or "
        "one kernel each. Default: as the framework that is written has them, else fused.",
    )
    loss: Annotated[str, OneOf(lambda: LOSSES)] | None = Field(
        default=None,
        description="Whether tensor ranks share the loss by the vocabulary, or each gathers the logits. Default: as "
        "the framework that is written does, else sharded.",
    )
    launch: Annotated[Any, PlainValidator(_parse_launch), WithJsonSchema(_LAUNCH_SCHEMA)] | None = Field(
        default=None,
        description="Time in which a host launches the kernels of one operator: 0 us where steps are replayed; "
        "framework: what the framework takes. Default: that of the cluster's hosts, which in the catalogue never lag.",
    )
    expandable_segments: bool = Field(
        default=False,
        description="Whether torch's allocator keeps next to nothing beside tensors: "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
    )
    frozen: bool = Field(default=False, description="Whether only low-rank adapters are trained, which cost nothing.")
    sequence_lengths: AnyLengths | None = Field(
        default=None,
        description="Lengths of samples with their shares, or a file of lengths (CSV, JSON lines) relative to the "
        "scenario. Longer ones are cut to the sequence. Default: every sample fills its sequence.",
    )
    packing: Packing | None = Field(
        default=None,
        description="What a sequence holds: none, a sample padded to the longest of its microbatch; pack, several "
        "samples that do not attend to one another; fixed, a sample padded to the sequence. Default: none.",
    )
    sequence_order: Order | None = Field(
        default=None,
        description="How sequences come to data ranks and microbatches: in order of arrival, sorted by length, or in "
        "balance, the heaviest first to the data rank with least work. Default: arrival.",
    )

    @model_validator(mode="after")
    def _check_lengths(self) -> "TrainingTable":
        for name in ("packing", "sequence_order"):
            if self.sequence_lengths is None and getattr(self, name) is not None:
                raise ValueError(f"{name} is of samples with sequence_lengths, met none; nearest: leave it out")
        return self

    @model_validator(mode="after")
    def _check_scaling(self) -> "TrainingTable":
        if self.fp8_scaling is not None and self.precision != "fp8":
            raise ValueError(f"fp8_scaling is of precision fp8, met precision {self.precision}; nearest: leave it out")
        return self


LOAD_FIELDS = ("sequence_lengths", "packing", "sequence_order")
"""Fields of a training step that say how its loads vary."""


def build_training(table: TrainingTable) -> Training:
    """Return the training step of a table with a sequence, as the framework that it writes runs it.

    Raises
    ------
    ValueError
        As `Training` does.
    """
    fields = table.model_dump(exclude={"kernels", "loss", "launch", *LOAD_FIELDS})
    training, is_written = Training(**fields), "framework" in table.model_fields_set
    return training.run_by(table.framework, *_list_words(table, is_written=is_written))


def _list_words(table: TrainingTable, *, is_written: bool) -> tuple[str | None, str | None]:
    """Return the words for kernels and loss; those of one kernel each and of a shared loss for an assumed framework."""
    return (table.kernels, table.loss) if is_written else (table.kernels or "fused", table.loss or "sharded")


class PresetCluster(ConditionsTable):
    """A cluster of the catalogue with ``nodes`` nodes, and what holds on top."""

    preset: Annotated[str, OneOf(cluster_names, "clusters")]
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
    tag_by_key("preset", "file", "node_types"),
]


_DURATION_PATTERN = _TIME_PATTERN.replace("days", "days|d")
_COUNTS_SCHEMA = {"type": ["integer", "string", "array"], "description": "One, several, or ranges: 8, 1..4, [1, 8]."}
_NUMBER_SCHEMA = {"type": ["number", "string"]}
Counts = Annotated[Any, PlainValidator(parse_counts), WithJsonSchema(_COUNTS_SCHEMA)]
TokenCount = Annotated[Any, PlainValidator(parse_amount), WithJsonSchema(_NUMBER_SCHEMA)]
Price = Annotated[Any, PlainValidator(parse_price), WithJsonSchema(_NUMBER_SCHEMA)]
Dollars = Annotated[Any, PlainValidator(parse_dollars), WithJsonSchema(_NUMBER_SCHEMA)]
Duration = Annotated[
    Any, PlainValidator(parse_duration), WithJsonSchema({"type": "string", "pattern": _DURATION_PATTERN})
]


class SearchTable(Table):
    """How a plan is looked for, and the best machine and batch of a whole run where one of the last ten is there."""

    algorithm: Annotated[str, OneOf(lambda: ALGORITHMS, "algorithms")] = Field(
        default="auto", description="For a captured graph the default is joint."
    )
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
    minimize: Annotated[str, OneOf(lambda: list(map(str, Objective)))] | None = Field(
        default=None, description="What is made least of a whole run. Default: the time, of every setup."
    )
    nodes: Counts | None = Field(default=None, description="Numbers of nodes to choose among. Default: the cluster's.")
    batch: Counts | None = Field(default=None, description="Global batches in sequences. Default: the training's.")
    tokens: TokenCount | None = Field(default=None, description="Of the run, with the training's batch, as in 300B.")
    critical_batch: TokenCount | None = Field(
        default=None, description="Tokens of the batch at which a run needs twice the tokens of one with small batches."
    )
    deadline: Duration | None = Field(default=None, description="Time that the run may take, as in 30d.")
    budget_usd: Dollars | None = Field(default=None, description="US dollars that the run may cost.")
    price: Price | None = Field(default=None, description="US dollars for an hour of one device.")
    spot: Price | None = Field(default=None, description="The same of a spot machine, which may be reclaimed.")
    reclaim_every: Duration | None = Field(default=None, description="Mean time between reclaims of one spot node.")


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
    loads: LoadsTable | None = None
