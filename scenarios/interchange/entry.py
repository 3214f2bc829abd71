"""One entry of a field map: keys of a target's file and the fields of a scenario that they say, both ways.

Last come entries that the field maps of several targets have in common.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from meshwise.scenarios.interchange.facts import MODEL, Facts, plainly
from meshwise.scenarios.interchange.lines import Stated
from meshwise.strategies.plan.mesh import AXES
from meshwise.strategies.plan.offloading import Offloading

Values = dict[str, Any]
"""Values by dotted key of a target's file."""

NEEDED = object()
"""The default of a key that a file must state."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a target cannot say a field: what it can say, and what was met."""

    field: str
    can: str
    met: str

    def __str__(self) -> str:
        return f"{self.field}: {self.can}, met {self.met}"


@dataclass(frozen=True, slots=True)
class Either:
    """Values for which a target has one word: a file says that it is one of them, and not which."""

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return " or ".join(map(plainly, self.values))


class Unsayable(Exception):
    """A target has no words for what fields hold."""

    def __init__(self, *reasons: Reason) -> None:
        super().__init__("; ".join(map(str, reasons)))
        self.reasons = reasons


class Entry(Protocol):
    """Keys of a file, fields of a scenario, and the way from each to the other."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that it writes and reads."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields that they say."""

    def say(self, facts: Facts) -> Values:
        """Return the keys of what the fields hold; `Unsayable` where there are none."""

    def read(self, stated: Stated) -> Facts:
        """Return the fields of what the keys hold; ``ScenarioError`` where the file is wrong."""


@dataclass(frozen=True, slots=True)
class _OneKey:
    """A key that says a field."""

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
    """A whole number under a key; where it is the ``default`` the key is left out."""

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
    """A choice under a key, in the target's words; where it is the ``default`` word the key is left out.

    Parameters
    ----------
    words
        Pairs of what the field holds and the target's word for it; a word of several values is read as `Either`.
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
        """Return what the word means."""
        default = None if self.default is NEEDED else self.default
        met = stated.word(self.key, tuple(word for _, word in self.words), default)
        values = tuple(value for value, word in self.words if type(word) is type(met) and word == met)
        return {self.field: values[0] if len(values) == 1 else Either(values)}


@dataclass(frozen=True, slots=True)
class Always:
    """What a target does always, or as its file cannot say otherwise."""

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
        """Return nothing; `Unsayable` where the field holds another value."""
        if facts[self.field] != self.value:
            raise Unsayable(Reason(self.field, f"{plainly(self.value)} alone, {self.why}", plainly(facts[self.field])))
        return {}

    def read(self, stated: Stated) -> Facts:
        """Return what the target does."""
        return {self.field: self.value}


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Fields that a target's user states outside the file, in the script or the model's own configuration."""

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
    """A key that the target needs and that says nothing of a plan; where it is ``fixed`` no other value is read."""

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
        """Return nothing; ``ScenarioError`` where a value that is fixed is another one."""
        if self.fixed:
            stated.word(self.key, (self.value,))
        return {}


@dataclass(frozen=True, slots=True)
class Together:
    """Fields that several keys say together, by a function each way."""

    keys: tuple[str, ...]
    fields: tuple[str, ...]
    says: Callable[[Facts], Values]
    reads: Callable[[Stated], Facts]

    def say(self, facts: Facts) -> Values:
        """Return the keys of what the fields hold."""
        return self.says(facts)

    def read(self, stated: Stated) -> Facts:
        """Return the fields of what the keys hold."""
        return self.reads(stated)


def always(why: str, **plan: Any) -> tuple[Always, ...]:
    """Return what a target does always of fields of a plan."""
    return tuple(Always(f"plan.{name}", value, why) for name, value in plan.items())


ONE_FORWARD_ONE_BACKWARD = "1f1b"
"""What a pipeline of one rank does: a forward and a backward pass a microbatch."""

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
"""What no target's file can say otherwise: the framework is how a step is simulated, the name what it is called, and
how torch allocates stands in the environment."""

ONE_STAGE = Elsewhere(("plan.stages",))
"""The stage of a pipeline of one rank has all layers."""

MODEL_ELSEWHERE = Elsewhere(tuple(name for name in MODEL if name != "model.name"))
"""The model is the user's, in the script."""


def one_size(facts: Facts) -> int:
    """Return the sequences of a microbatch; `Unsayable` where ranks differ."""
    value = facts["plan.microbatch"]
    if type(value) is not int:
        raise Unsayable(Reason("plan.microbatch", "the same size on all data ranks", plainly(value)))
    return value


def accumulation(facts: Facts) -> int:
    """Return the microbatches of a step."""
    return int(facts["training.global_batch"] // (facts["plan.data"] * one_size(facts)))


def no_pipeline(why: str) -> tuple[Always, ...]:
    """Return what a target without pipeline parallelism says of pipelines."""
    return always(why, pipeline=1, schedule=ONE_FORWARD_ONE_BACKWARD, chunks=1, scatter_gather=False)
