"""The fields of a scenario's ``run``: a long run of its training step on machines that fail."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, PlainValidator, Tag, WithJsonSchema, model_validator

from scenarios.fields import Count, Delay, OneOf, Quantity, Table, Time
from simulator.units import UNITS, Dimension

MAX_STEPS = 10**9
MAX_SPARES = 1_000_000
MAX_SEED = 2**63 - 1
MAX_RUNS = 1000


def _failure_names() -> list[str]:
    from simulator.reliability.published import failure_model_names

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


def _shape(value: Any) -> Literal["<name>", "<written>"]:
    return "<name>" if isinstance(value, str) else "<written>"


Failures = Annotated[
    Annotated[str, OneOf(_failure_names), Tag("<name>")] | Annotated[FailuresTable, Tag("<written>")],
    Discriminator(_shape),
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
