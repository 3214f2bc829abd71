"""Entries of field maps: keys of a target's file, and the fields of a scenario that they express, both ways.

At the end are entries that the field maps of several targets share.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshwise.scenarios.interchange.facts import MODEL, Facts, format_fact
from meshwise.scenarios.interchange.lines import ConfigValues
from meshwise.strategies.plan.mesh import AXES
from meshwise.strategies.plan.offloading import Offloading

Values = dict[str, Any]
"""Values of a target's file by dotted key."""

REQUIRED = object()
"""The default of a key without a default: a file must have it."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a target cannot express a field: what it can express, and the value of the field."""

    field: str
    limit: str
    value: str

    def __str__(self) -> str:
        return f"{self.field}: {self.limit}, met {self.value}"


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Several values for which a target has one word: its file does not tell which of them it means."""

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return " or ".join(map(format_fact, self.values))


class UnsayableError(Exception):
    """Raised where a target cannot express the values of fields; it has every reason."""

    def __init__(self, *reasons: Reason) -> None:
        super().__init__("; ".join(map(str, reasons)))
        self.reasons = reasons


def build_reason(facts: Facts, field: str, limit: str) -> Reason:
    """Return the reason that a target's ``limit`` on a field excludes its value."""
    return Reason(field, limit, format_fact(facts[field]))


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a field map: the keys that it writes and reads, and the fields that these keys express.

    Without functions, users of the target set the fields outside the file, in a script or the model's configuration.

    Parameters
    ----------
    say
        Returns values by key for the fields; raises `UnsayableError` where the target cannot express them.
    read
        Returns the fields for the values of the keys; raises ``ScenarioError`` where the file has faults.
    """

    keys: tuple[str, ...]
    fields: tuple[str, ...]
    say: Callable[[Facts], Values] = lambda facts: {}
    read: Callable[[ConfigValues], Facts] = lambda config: {}


def map_count(key: str, field: str, default: int | None = None) -> Entry:
    """Return the entry of a positive whole number under a key, which is left out where it is the ``default``."""

    def say(facts: Facts) -> Values:
        if type(facts[field]) is not int:
            raise UnsayableError(build_reason(facts, field, f"one number ({key})"))
        return {} if facts[field] == default else {key: facts[field]}

    return Entry((key,), (field,), say, lambda config: {field: config.count(key, default)})


def map_word(key: str, field: str, words: tuple[tuple[Any, Any], ...], default: Any = REQUIRED) -> Entry:
    """Return the entry of a choice in the target's words; the key is left out where the word is the ``default``.

    Parameters
    ----------
    words
        Pairs of a value of the field and the target's word for it; a word for several values is read as `AnyOf`.
    """

    def say(facts: Facts) -> Values:
        for value, word in words:
            if facts[field] == value:
                return {} if default is not REQUIRED and word == default else {key: word}
        limit = " or ".join(format_fact(value) for value, _ in words)
        raise UnsayableError(build_reason(facts, field, f"{limit} ({key})"))

    def read(config: ConfigValues) -> Facts:
        file_word = config.word(key, tuple(word for _, word in words), None if default is REQUIRED else default)
        # 1 == True and 0 == False in Python: types have to agree too
        values = tuple(value for value, word in words if type(word) is type(file_word) and word == file_word)
        return {field: values[0] if len(values) == 1 else AnyOf(values)}

    return Entry((key,), (field,), say, read)


def map_flag(key: str, field: str, on_value: Any = True, off_value: Any = False) -> Entry:
    """Return the entry of a choice between two values, of which a key states the first and its absence the second."""
    return map_word(key, field, ((on_value, True), (off_value, False)), False)


def fix_field(field: str, value: Any, reason: str) -> Entry:
    """Return the entry of a field with one value: the target has no other, or its file cannot express another."""

    def say(facts: Facts) -> Values:
        if facts[field] != value:
            raise UnsayableError(build_reason(facts, field, f"{format_fact(value)} alone, {reason}"))
        return {}

    return Entry((), (field,), say, lambda config: {field: value})


def require_key(key: str, value: Any, is_fixed: bool = False) -> Entry:
    """Return the entry of a key that a target requires; with ``is_fixed``, a file may not have another value."""

    def read(config: ConfigValues) -> Facts:
        if is_fixed:
            config.word(key, (value,))
        return {}

    return Entry((key,), (), lambda facts: {key: value}, read)


def list_fixed(reason: str, **plan: Any) -> tuple[Entry, ...]:
    """Return entries for fields of a plan that have one fixed value in a target, for one reason."""
    return tuple(fix_field(f"plan.{name}", value, reason) for name, value in plan.items())


ONE_FORWARD_ONE_BACKWARD = "1f1b"
"""The schedule that stands for a pipeline of one rank: a forward and a backward pass for each microbatch."""

HOST_STATES = Offloading(optimizer=(1.0,))
HOST_OPTIMIZER_AND_PARAMETERS = Offloading(optimizer=(1.0,), parameters=(1.0,))
"""What ``torch.distributed.fsdp.CPUOffloadPolicy`` keeps on the host: parameters, gradients and states."""

COMMON_ENTRIES = (
    *list_fixed("its rank order is fixed", order=AXES, placement=()),
    *list_fixed("its collectives are decentralised", gradient_reduction="all_reduce"),
    *list_fixed("its tensor parallelism has one axis", tensor_rows=1),
    fix_field("training.state_precision", "fp32", "moments in other precisions are not in the field map"),
    fix_field("training.fp8_scaling", None, "recipes of fp8 are not in the field map"),
    fix_field("training.frozen", False, "adapters are not in the field map"),
    Entry((), ("training.framework", "training.composed", "training.gathers_logits")),
    Entry((), ("model.name", "training.expandable_segments")),
)
"""Entries of every target. No file expresses the framework with its kernels and its loss, which is how a step is
simulated, the name of the model, or the settings of torch's allocator, which are environment variables."""

ONE_STAGE = Entry((), ("plan.stages",))
"""Without pipelines the one stage has all layers, so no key expresses stages."""

MODEL_ELSEWHERE = Entry((), tuple(name for name in MODEL if name != "model.name"))
"""The model is in the user's script, not in the file."""


def find_microbatch(facts: Facts) -> int:
    """Return the number of sequences of a microbatch; `UnsayableError` where it differs among ranks."""
    value = facts["plan.microbatch"]
    if type(value) is not int:
        raise UnsayableError(build_reason(facts, "plan.microbatch", "the same size on all data ranks"))
    return value


def count_microbatches(facts: Facts) -> int:
    """Return the number of microbatches of a step, on each data rank."""
    return int(facts["training.global_batch"] // (facts["plan.data"] * find_microbatch(facts)))


def list_fixed_pipeline(reason: str) -> tuple[Entry, ...]:
    """Return the entries about pipelines of a target without pipeline parallelism."""
    return list_fixed(reason, pipeline=1, schedule=ONE_FORWARD_ONE_BACKWARD, chunks=1, scatter_gather=False)


def build_schedule_reason(facts: Facts, limit: str) -> Reason:
    """Return the reason that a limit excludes the schedule of a plan, of whose own orders only the name is told."""
    return Reason("plan.schedule", limit, format_fact(facts["plan.schedule"]).split("\n")[0][:60])
