from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pytest

from meshwise.simulator.brief import brief_repr, format_items, to_full_text, with_brief_repr


@dataclass(frozen=True, slots=True)
class Box:
    values: tuple[object, ...]
    inner: "Box | None" = None
    name: str = "box"

    def told(self) -> str:
        return "one of many"

    __repr__ = brief_repr()


@dataclass(frozen=True, slots=True)
class Summary:
    values: tuple[object, ...]
    time: float

    @property
    def count(self) -> int:
        return len(self.values)

    def told(self) -> str:
        return "one of many"

    __repr__ = brief_repr("told", "count", "time")


@with_brief_repr
class Column(NamedTuple):
    array: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    table: Mapping[str, float]


def test_a_short_value_is_shown_whole_without_the_fields_that_have_their_default() -> None:
    assert repr(Box((1, 2.5, "a"))) == "Box(values=(1, 2.5, 'a'))"
    assert repr(Box((), Box((1,)), "outer")) == "Box(values=(), inner=Box(values=(1,)), name='outer')"


def test_attributes_that_are_named_are_shown_and_no_others() -> None:
    assert repr(Summary(tuple(range(7)), 2 / 3)) == "Summary(one of many, count=7, time=0.666667)"
    assert repr(Box((Summary((), 1.0),))) == "Box(values=(Summary(one of many, count=0, time=1.0),))"


def test_arrays_and_mappings_are_named_by_their_size() -> None:
    table = {f"name {i}": i / 3 for i in range(10_000)}
    text = repr(Column(np.arange(10**6), table))
    assert text.startswith("Column(array=<int64 of shape (1000000,)>, table={'name 0': 0.0, 'name 1': 0.333333, ")
    assert text.endswith(", ... 10,000 in all})")


def test_what_is_too_long_is_named_by_kind_and_number() -> None:
    long = "x" * 150
    assert repr(Box((long, long, long))) == "Box(values=<3 str>)"
    assert "... 1,000 in all" in format_items(range(1000))


def test_a_line_is_short_however_deep_and_wide_a_value_is() -> None:
    value = Box(("leaf",))
    for _ in range(50):
        value = Box(tuple([value] * 50), value, "n" * 10_000)
    assert len(repr(value)) < 2000 and "\n" not in repr(value)


@pytest.mark.parametrize(
    "other",
    [Box((1, 2), None, "other"), Box((1, 2), Box(())), Box(tuple(range(1001)))],
    ids=lambda box: box.name,
)
def test_the_text_in_full_tells_values_apart_that_look_alike(other: Box) -> None:
    value = Box(tuple(range(1000)))
    assert to_full_text(value) == to_full_text(replace(value)) != to_full_text(other)
    assert to_full_text(replace(value, values=(*range(999), -1))) != to_full_text(
        value
    )  # the 1,000th alone: the line is equal
    assert repr(replace(value, values=(*range(999), -1))) == repr(value)
