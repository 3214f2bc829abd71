"""Pairs of techniques: one is simulated or refused with its reason, and the page of the documentation is current."""

import re
from pathlib import Path

import pytest

from .combinations import Outcome, _simulate_pair, list_techniques

PAGE = (Path(__file__).parents[2] / "docs" / "combinations.md").read_text("utf-8")
NAMES = [technique.name for technique in list_techniques()]
OF = dict(zip(NAMES, list_techniques(), strict=True))


def outcome(first: str, second: str) -> Outcome:
    return _simulate_pair(OF[first], OF[second])


def test_every_technique_has_a_row_of_the_page() -> None:
    rows = re.findall(r"^\| \d+ ([^|]+?) \|", PAGE, flags=re.MULTILINE)
    assert rows == NAMES


@pytest.mark.parametrize("name", NAMES[:3])
def test_a_technique_goes_with_itself(name: str) -> None:
    found = outcome(name, name)
    assert found.step_time is not None and found.step_time > 0 and found.reason == ""


def test_a_plan_has_one_schedule_and_the_rules_of_a_plan_are_reasons() -> None:
    assert outcome("1f1b", "gpipe").reason == "a plan has one schedule"
    refused = outcome("expert", "tensor, 2-D")
    assert refused.step_time is None and "expert" in refused.reason


def test_what_is_offloaded_goes_together() -> None:
    assert outcome("optimizer offload", "activations offload").step_time is not None


def test_cells_of_the_page_are_outcomes() -> None:
    for first, second in (("data", "tensor"), ("1f1b", "gpipe"), ("expert", "tensor, 2-D")):
        low, high = sorted((NAMES.index(first), NAMES.index(second)))
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| {high + 1} {NAMES[high]} "))
        cell = row.split(" | ")[low + 1].strip(" |")
        found = outcome(first, second)
        expected = "+" if found.step_time is not None else found.reason
        assert (cell == "+") == (expected == "+")
        if cell != "+":
            assert f"{cell}. {expected}" in PAGE
