"""Types of fields of input files: counts, quantities with units, names from a list."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from meshwise.scenarios.files.errors import format_value, suggest_nearest
from meshwise.simulator import units
from meshwise.simulator.units import Dimension


class Table(BaseModel):
    """A mapping with known fields; an unknown one is an error, and so is a value of another type."""

    # a table is built when it first checks: those of which a file has none cost nothing, and parts are built with it
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


def _to_whole(value: Any) -> Any:
    """Return a float without a fraction as an int, as ``1e3`` is a float in YAML; return other values unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


@dataclass(frozen=True)
class Count:
    """Marks a whole number from ``minimum`` to ``maximum``; ``1e3`` counts as one."""

    maximum: int
    minimum: int = 1

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        bounds = core_schema.int_schema(strict=True, ge=self.minimum, le=self.maximum)
        return core_schema.no_info_before_validator_function(_to_whole, bounds)


Text = Annotated[str, Field(min_length=1, max_length=1000)]
Fraction = Annotated[float, Field(gt=0, le=1)]


MAX_NAMES = 16
"""Most names that a message lists one by one."""


@dataclass(frozen=True)
class OneOf:
    """Marks text that is one of ``names()``, which is called only when needed: a catalogue may be long.

    ``listing`` is the argument of `meshwise list` that prints the names; messages refer to it instead of listing many.
    """

    names: Callable[[], Iterable[str]]
    listing: str = ""

    def check(self, value: str) -> str:
        """Return ``value`` if it is one of the names; else raise ``ValueError``, which suggests the nearest."""
        names = list(self.names())
        if value not in names:
            listing_text = f"{len(names)} names that `meshwise list {self.listing}` shows"
            names_text = listing_text if self.listing and len(names) > MAX_NAMES else ", ".join(names)
            raise ValueError(f"holds one of {names_text}, met {format_value(value)}{suggest_nearest(value, names)}")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, core_schema.str_schema(strict=True))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"type": "string", "enum": list(self.names())}


@dataclass(frozen=True)
class Quantity:
    """Marks text that is a number with a unit of ``dimension``, in SI units once it is read.

    The number is above 0; with ``allows_zero`` it may be 0, with ``allows_bare`` it may lack a unit.
    """

    dimension: Dimension
    allows_zero: bool = False
    allows_bare: bool = False

    def check(self, value: Any) -> float:
        """Return the quantity in SI units."""
        if self.allows_bare and isinstance(value, int | float) and not isinstance(value, bool):
            number = float(value)
        else:
            number = units.parse(value, self.dimension)
        if number < 0 or (number == 0 and not self.allows_zero):
            raise ValueError(
                f"a {self.dimension} is {'at least' if self.allows_zero else 'more than'} 0, met {format_value(value)}"
            )
        return number

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        names = "|".join(units.UNITS[self.dimension])
        text = {"type": "string", "pattern": rf"^\s*[0-9.]+([eE][+-]?[0-9]+)?\s*({names})\s*$"}
        return {"anyOf": [text, {"type": "number"}]} if self.allows_bare else text


Time = Annotated[float, Quantity(Dimension.TIME)]
Delay = Annotated[float, Quantity(Dimension.TIME, allows_zero=True)]
Size = Annotated[float, Quantity(Dimension.SIZE)]
SizeOrNone = Annotated[float, Quantity(Dimension.SIZE, allows_zero=True)]
Bytes = Annotated[float, Quantity(Dimension.SIZE, allows_bare=True)]
Bandwidth = Annotated[float, Quantity(Dimension.BANDWIDTH)]
ComputeRate = Annotated[float, Quantity(Dimension.COMPUTE_RATE)]


def tag_by_key(*keys: str) -> Discriminator:
    """Return what tells tables of a union apart by their tags: the first of ``keys`` in a mapping, else "<written>"."""

    def choose(value: Any) -> str:
        return next((f"<{key}>" for key in keys if isinstance(value, dict) and key in value), "<written>")

    return Discriminator(choose)
