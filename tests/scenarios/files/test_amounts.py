"""Amounts of a run as people write them, and what is none."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.scenarios.files.amounts import (
    format_amount,
    parse_amount,
    parse_counts,
    parse_dollars,
    parse_duration,
    parse_price,
)


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=20))
def test_a_list_is_read_as_its_text(numbers: list[int]) -> None:
    assert parse_counts(numbers) == parse_counts(",".join(map(str, numbers))) == tuple(dict.fromkeys(numbers))


@given(st.integers(1, 9999), st.sampled_from("MBT"))
def test_what_is_formatted_is_read_back(number: int, suffix: str) -> None:
    tokens = parse_amount(f"{number}{suffix}")
    assert parse_amount(format_amount(tokens)) == pytest.approx(tokens, rel=1e-3)


@pytest.mark.parametrize(
    "value", ["", "0", "3..1", "1..2000", [0], [True], 1.5, None, {}, "1,,2", [[1]], 10**8, "x" * 99]
)
def test_what_is_no_list_of_counts(value: Any) -> None:
    with pytest.raises(ValueError, match="holds numbers or ranges, at most 1000"):
        parse_counts(value)


@pytest.mark.parametrize("parser", [parse_amount, parse_price, parse_dollars, parse_duration])
@pytest.mark.parametrize("value", ["", "-1", "nan", "inf", None, True, [], {}, "1e", "9" * 99, "\x1b[2J"])
def test_what_is_no_amount(parser: Any, value: Any) -> None:
    with pytest.raises(ValueError, match="; met ") as error:
        parser(value)
    assert str(error.value).isprintable()


def test_days_and_prices() -> None:
    assert parse_duration("1.5 d") == parse_duration("36 h") == 129600
    assert parse_price("$2.50/h") == parse_price(2.5) == parse_price("2.5 usd/h") == 2.5
    with pytest.raises(ValueError, match="in US dollars, as in 5000"):
        parse_dollars("2 $/h")
