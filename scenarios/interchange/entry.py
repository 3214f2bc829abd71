"""Entries of field maps: keys of a target's file, and the fields of a scenario that they express, both ways.

At the end are entries that the field maps of several targets share.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from meshwise.scenarios.interchange.facts import MODEL, Facts, plainly
from meshwise.scenarios.interchange.lines import Stated
from meshwise.strategies.plan.mesh import AXES
from meshwise.strategies.plan.offloading import Offloading

Values = dict[str, Any]
"""Values of a target's file by dotted key."""

NEEDED = object()
"""The default of a key without a default: a file must have it."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a target cannot express a field: what it can express, and the value of the field."""

    field: str
    can: str
    met: str

    def __str__(self) -> str:
        return f"{self.field}: {self.can}, met {self.met}"


@dataclass(frozen=True, slots=True)
class Either:
    """Several values for which a target has one word: its file does not tell which of them it means."""

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return " or ".join(map(plainly, self.values))


class Unsayable(Exception):
    """Raised where a target cannot express the values of fields; it has every reason."""

    def __init__(self, *reasons: Reason) -> None:
        super().__init__("; ".join(map(str, reasons)))
        self.reasons = reasons


class Entry(Protocol):
    """An entry of a field map: keys of a file, fields of a scenario, and the conversions between both."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that it writes and reads."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that these keys express."""

    def say(self, facts: Facts) -> Values:
        """Return values by key for the fields; `UnsayableError` where the target cannot express them."""

    def read(self, stated: Stated) -> Facts:
        """Return the fields for the values of the keys; ``ScenarioError`` where the file has faults."""


@dataclass(frozen=True, slots=True)
class _OneKey:
    """One key that expresses one field."""

    key: str
    field: str

    @property
    def keys(self) -> tuple[str, ...]:
        """The one key."""
        return (self.key,)

    @property
    def fields(self) -> tuple[str, ...]:
        """The one field."""
        return (self.field,)


@dataclass(frozen=True, slots=True)
class Count(_OneKey):
    """A whole number under a key, which is left out where the number is the ``default``."""

    default: int | None = None
    least: int = 1

    def say(self, facts: Facts) -> Values:
        """Return the number under its key."""
        value = facts[self.field]
        if type(value) is not int:
            raise Unsayable(Reason(self.field, f"one number ({self.key})", plainly(value)))
        return {} if value == self.default else {self.key: value}

    def read(self, stated: Stated) -> Facts:
        """Return the number."""
        return {self.field: stated.count(self.key, self.default, self.least)}


@dataclass(frozen=True, slots=True)
class Word(_OneKey):
    """A choice under a key in the target's words; the key is left out where the word is the ``default``.

    Parameters
    ----------
    words
        Pairs of a value of the field and the target's word for it; a word for several values is read as `AnyOf`.
    """

    words: tuple[tuple[Any, Any], ...]
    default: Any = NEEDED

    def say(self, facts: Facts) -> Values:
        """Return the word under its key."""
        for value, word in self.words:
            if facts[self.field] == value:
                return {} if self.default is not NEEDED and word == self.default else {self.key: word}
        can = " or ".join(plainly(value) for value, _ in self.words)
        raise Unsayable(Reason(self.field, f"{can} ({self.key})", plainly(facts[self.field])))

    def read(self, stated: Stated) -> Facts:
        """Return the value that the word stands for."""
        default = None if self.default is NEEDED else self.default
        met = stated.word(self.key, tuple(word for _, word in self.words), default)
        # 1 == True and 0 == False in Python: types have to agree too
        values = tuple(value for value, word in self.words if type(word) is type(met) and word == met)
        return {self.field: values[0] if len(values) == 1 else Either(values)}


@dataclass(frozen=True, slots=True)
class Always:
    """A field with one fixed value, because the target has no other or its file cannot express another."""

    field: str
    value: Any
    why: str

    @property
    def keys(self) -> tuple[str, ...]:
        """No key."""
        return ()

    @property
    def fields(self) -> tuple[str, ...]:
        """The one field."""
        return (self.field,)

    def say(self, facts: Facts) -> Values:
        """Return no values; `UnsayableError` where the field has another value."""
        if facts[self.field] != self.value:
            raise Unsayable(Reason(self.field, f"{plainly(self.value)} alone, {self.why}", plainly(facts[self.field])))
        return {}

    def read(self, stated: Stated) -> Facts:
        """Return the fixed value."""
        return {self.field: self.value}


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Fields that users of a target set outside the file, in a script or the model's own configuration."""

    fields: tuple[str, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """No key."""
        return ()

    def say(self, facts: Facts) -> Values:
        """Return nothing."""
        return {}

    def read(self, stated: Stated) -> Facts:
        """Return nothing."""
        return {}


@dataclass(frozen=True, slots=True)
class Needed:
    """A key that the target requires and that expresses no field; with ``is_fixed``, no other value is accepted."""

    key: str
    value: Any
    fixed: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """The one key."""
        return (self.key,)

    @property
    def fields(self) -> tuple[str, ...]:
        """No field."""
        return ()

    def say(self, facts: Facts) -> Values:
        """Return the key with its value."""
        return {self.key: self.value}

    def read(self, stated: Stated) -> Facts:
        """Return no fields; ``ScenarioError`` where a fixed value differs."""
        if self.fixed:
            stated.word(self.key, (self.value,))
        return {}


@dataclass(frozen=True, slots=True)
class Together:
    """Several keys that together express several fields, with one function for each direction."""

    keys: tuple[str, ...]
    fields: tuple[str, ...]
    says: Callable[[Facts], Values]
    reads: Callable[[Stated], Facts]

    def say(self, facts: Facts) -> Values:
        """Return values by key for the fields."""
        return self.says(facts)

    def read(self, stated: Stated) -> Facts:
        """Return the fields for the values of the keys."""
        return self.reads(stated)


def always(why: str, **plan: Any) -> tuple[Always, ...]:
    """Return entries for fields of a plan that have one fixed value in a target, for one reason."""
    return tuple(Always(f"plan.{name}", value, why) for name, value in plan.items())


ONE_FORWARD_ONE_BACKWARD = "1f1b"
"""The schedule that stands for a pipeline of one rank: a forward and a backward pass for each microbatch."""

HOST_STATES = Offloading(optimizer=(1.0,))
HOST_OPTIMIZER_AND_PARAMETERS = Offloading(optimizer=(1.0,), parameters=(1.0,))
"""What ``torch.distributed.fsdp.CPUOffloadPolicy`` keeps on the host: parameters, gradients and states."""

PLAIN: tuple[Entry, ...] = (
    *always("its rank order is fixed", order=AXES, placement=()),
    *always("its collectives are decentralised", gradient_reduction="all_reduce"),
    *always("its tensor parallelism has one axis", tensor_rows=1),
    Always("training.frozen", False, "adapters are not in the field map"),
    Always("training.composes_norms", False, "which kernels norms have is not in the field map"),
    Always("training.gathers_logits", False, "how the loss is computed is not in the field map"),
    Elsewhere(("training.framework", "model.name", "training.expandable_segments")),
)
"""Entries of every target. No file expresses the framework, which is how a step is simulated, the name of the model, or
the settings of torch's allocator, which are environment variables."""

ONE_STAGE = Elsewhere(("plan.stages",))
"""Without pipelines the one stage has all layers, so no key expresses stages."""

MODEL_ELSEWHERE = Elsewhere(tuple(name for name in MODEL if name != "model.name"))
"""The model is in the user's script, not in the file."""


def one_size(facts: Facts) -> int:
    """Return the number of sequences of a microbatch; `UnsayableError` where it differs among ranks."""
    value = facts["plan.microbatch"]
    if type(value) is not int:
        raise Unsayable(Reason("plan.microbatch", "the same size on all data ranks", plainly(value)))
    return value


def accumulation(facts: Facts) -> int:
    """Return the number of microbatches of a step, on each data rank."""
    return int(facts["training.global_batch"] // (facts["plan.data"] * one_size(facts)))


def no_pipeline(why: str) -> tuple[Always, ...]:
    """Return the entries about pipelines of a target without pipeline parallelism."""
    return always(why, pipeline=1, schedule=ONE_FORWARD_ONE_BACKWARD, chunks=1, scatter_gather=False)
