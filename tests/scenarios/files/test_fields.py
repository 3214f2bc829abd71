"""What a field may hold: counts, quantities, and names from a list."""

from typing import Annotated, Any

import pytest
from pydantic import TypeAdapter, ValidationError

from meshwise.scenarios.files.fields import (
    MAX_NAMES,
    Count,
    OneOf,
    Quantity,
    Table,
    Time,
    suggest_nearest,
)
from meshwise.simulator.units import Dimension


def held(field: Any, value: Any) -> Any:
    return TypeAdapter(field).validate_python(value)


def test_a_whole_float_is_a_count_and_no_other_float_is() -> None:
    count = Annotated[int, Count(1000)]
    assert held(count, 1e3) == 1000 and type(held(count, 1e3)) is int
    for wrong in (1001, 0, 1.5, "3", True):
        with pytest.raises(ValidationError):
            held(count, wrong)
    assert held(Annotated[int, Count(1000, minimum=0)], 0) == 0


def test_a_quantity_has_a_unit_of_its_dimension() -> None:
    assert held(Time, "3 ms") == pytest.approx(3e-3)
    for wrong in ("3 GB", 3, "0 s", "-1 s"):
        with pytest.raises(ValidationError):
            held(Time, wrong)
    assert Quantity(Dimension.TIME, allows_zero=True).check("0 s") == 0
    assert Quantity(Dimension.SIZE, allows_bare=True).check(5) == 5.0


def test_a_wrong_name_meets_the_nearest_and_many_names_are_not_told() -> None:
    with pytest.raises(ValueError, match=r"holds one of data, tensor, met 'tensr'; nearest: tensor"):
        OneOf(lambda: ("data", "tensor")).check("tensr")
    many = [f"name-{number}" for number in range(MAX_NAMES + 1)]
    with pytest.raises(ValueError, match=r"holds one of 17 names that `meshwise list models` shows, met 'x'$"):
        OneOf(lambda: many, "models").check("x")
    assert OneOf(lambda: many).check("name-3") == "name-3"
    assert suggest_nearest("100", ["a100", "h100", "b100", "gb100"]) == "; nearest: a100, b100, h100"  # three of four


def test_an_unknown_field_and_a_value_of_another_type_are_errors() -> None:
    class Small(Table):
        size: int

    assert Small(size=1).size == 1
    for wrong in ({"size": "1"}, {"size": 1, "more": 2}, {}):
        with pytest.raises(ValidationError):
            Small(**wrong)
