"""The fields that say how loads vary from step to step, and the values that each allows."""

from typing import Annotated

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from meshwise.scenarios.files.fields import Count, Fraction, OneOf, Table, Text
from meshwise.strategies.loads.assignment import ORDERS
from meshwise.strategies.loads.loads import DEFAULT_DRAWS, DEFAULT_QUANTILE, PACKINGS
from meshwise.strategies.loads.spread import LogNormal, Measured, Spread

MAX_SEQUENCE = 10**8
MAX_ROWS = 10_000
MAX_LOAD = 1e6
MAX_DRAWS = 1000
MAX_SEED = 2**63 - 1


class LengthTable(Table):
    """Samples of one length."""

    length: Annotated[int, Count(MAX_SEQUENCE)] = Field(description="Tokens.")
    share: Annotated[float, Field(gt=0, le=1e18)] = Field(description="Of the samples, or their number.")


SHARE_TOLERANCE = 2e-3
"""How far a sum of shares may be from 1: thirds are often written with three digits."""


def _check_shares(rows: list[LengthTable]) -> list[LengthTable]:
    """Check that shares are all of the samples, where they are no numbers of samples."""
    total = sum(row.share for row in rows)
    if all(row.share.is_integer() for row in rows) or abs(total - 1) <= SHARE_TOLERANCE:
        return rows
    rule = "shares sum to 1, or all are whole numbers of samples"
    raise ValueError(f"{rule}, met a sum of {total:.6g}; nearest: every share / {total:.6g}")


AnyLengths = Annotated[
    Annotated[Text, Tag("<name>")]
    | Annotated[
        list[LengthTable], Field(min_length=1, max_length=MAX_ROWS), AfterValidator(_check_shares), Tag("<rows>")
    ],
    Discriminator(lambda value: "<name>" if isinstance(value, str) else "<rows>"),
]
Packing = Annotated[str, OneOf(lambda: PACKINGS)]
Order = Annotated[str, OneOf(lambda: ORDERS)]

Load = Annotated[float, Field(ge=1, le=MAX_LOAD)]


class SpreadTable(Table):
    """A lognormal distribution."""

    median: Load = Field(description="Half of the values are below it.")
    p95: Load = Field(description="95 % of the values are below it.")

    @model_validator(mode="after")
    def _check_order(self) -> "SpreadTable":
        LogNormal(self.median, self.p95)
        return self


Values = Annotated[list[Load], Field(min_length=1, max_length=MAX_ROWS)]


def tag_spread(value: object) -> str:
    """Return the tag of a number, a distribution or a list of measured values."""
    return "<spread>" if isinstance(value, dict | SpreadTable) else "<values>" if isinstance(value, list) else "<value>"


AnySpread = Annotated[
    Annotated[Load, Tag("<value>")] | Annotated[SpreadTable, Tag("<spread>")] | Annotated[Values, Tag("<values>")],
    Discriminator(tag_spread),
]
"""One value, a distribution, or measured values of which each is as likely as another."""


def build_spread(value: "float | SpreadTable | list[float]") -> Spread:
    """Return the distribution of a field."""
    if isinstance(value, SpreadTable):
        return LogNormal(value.median, value.p95)
    return Measured(tuple(value) if isinstance(value, list) else (value,))


class StragglersTable(Table):
    """Devices that are slow in one step and not in another; devices that always are stand in ``cluster.speeds``."""

    share: Fraction = Field(description="The probability that a device is slow in a step.")
    slowdown: AnySpread = Field(description="The time of a slow device over its own time otherwise.")


class LoadsTable(Table):
    """How steps are drawn whose loads vary, and the devices that are slow in some of them."""

    stragglers: StragglersTable | None = None
    draws: Annotated[int, Count(MAX_DRAWS)] = Field(default=DEFAULT_DRAWS, description="Steps that are drawn.")
    seed: Annotated[int, Count(MAX_SEED, minimum=0)] = 0
    quantile: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=DEFAULT_QUANTILE, description="Share of steps within the step time by which a search chooses."
    )
