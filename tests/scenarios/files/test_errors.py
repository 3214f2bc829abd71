"""Faults as text: with their place, in the order of the file, each once, and nothing that moves the cursor."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.scenarios.files.errors import MAX_LISTED, MAX_SHOWN, Fault, ScenarioError, format_value


def test_faults_come_in_the_order_of_lines_and_once() -> None:
    late, early, whole = (
        Fault("a.yaml", 9, 1, "b", "x"),
        Fault("a.yaml", 2, 5, "", "y"),
        Fault("a.yaml", 0, 0, "c", "z"),
    )
    error = ScenarioError((late, early, whole, late))
    assert str(error).split("\n") == ["a.yaml: c: z", "a.yaml:2:5: y", "a.yaml:9:1: b: x"]
    assert error.faults == (whole, early, late)


def test_of_many_faults_the_rest_is_counted() -> None:
    faults = tuple(Fault("a.yaml", line, 1, "", "x") for line in range(1, MAX_LISTED + 4))
    lines = str(ScenarioError(faults)).split("\n")
    assert len(lines) == MAX_LISTED + 1 and lines[-1] == "... and 3 more"
    assert str(ScenarioError(faults[:MAX_LISTED])).count("\n") == MAX_LISTED - 1


def test_a_fault_is_one_line_whatever_is_in_it() -> None:
    text = str(Fault("a\n.yaml", 1, 1, "f\x1b[2J", "two\nlines"))
    assert text.isprintable() and "\\n" in text and "\x1b" not in text


@given(st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers(), max_size=40) | st.just({1: 2}))
def test_a_value_is_shown_in_one_short_line(value: object) -> None:
    text = format_value(value)
    assert len(text) <= MAX_SHOWN and text.isprintable()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": 1}, "a mapping"),
        ([0] * 17, "a list of 17"),
        ([1, 2], "[1, 2]"),
        (None, "nothing"),
        (True, "true"),
        (1, "1"),
    ],
)
def test_values_in_words(value: object, text: str) -> None:
    assert format_value(value) == text
