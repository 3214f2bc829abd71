"""The edge of the region in which a plan stays the best, among plans whose times are known."""

from collections.abc import Callable
from math import exp

import pytest

from meshwise.strategies.evaluation import Evaluation, Trial
from meshwise.strategies.explanation.sensitivity import OFF_FRACTION, Outcome, _find_edge

Curves = dict[str, Callable[[float], float]]
"""Seconds of plans, here names, by how fast a part of the machine is."""


def edge_of(curves: Curves, far: float) -> tuple[float, bool]:
    """Return the edge of the region of plan "a" among plans whose times are known."""

    def outcome(factor: float) -> Outcome:
        best = min(curves, key=lambda plan: curves[plan](factor))
        return Outcome(factor, Trial(best, Evaluation(curves[best](factor), 0, True), 0.0), curves["a"](factor))

    return _find_edge(
        outcome,
        lambda plan, factor: curves[plan](factor),
        "a",
        outcome(1 + OFF_FRACTION if far > 1 else 1 - OFF_FRACTION),
        far,
    )


@pytest.mark.parametrize(
    ("curves", "far", "edge"),
    [
        # b needs 1.1 s / f and a 1 s: equal at f = 1.1, so that b is faster at 1.2 already
        ({"a": lambda f: 1.0, "b": lambda f: 1.1 / f}, 1.5, 1.1),
        # equal at f = 1.3: a is still the best at 1.2, and b at 1.5
        ({"a": lambda f: 1.0, "b": lambda f: 1.3 / f}, 1.5, 1.3),
        # on a slower part a needs 1 s / f and b 1 / 0.9 s, or 1 / 0.7 s: equal at f = 0.9, and at f = 0.7
        ({"a": lambda f: 1 / f, "b": lambda f: 1 / 0.9}, 1 / 1.5, 0.9),
        ({"a": lambda f: 1 / f, "b": lambda f: 1 / 0.7}, 1 / 1.5, 0.7),
        # at 1.2 b is the fastest, (1.15 / 1.2)**9 = 0.68 s for c's 1.08 / 1.2 = 0.9 s; but c is as fast as a at 1.08
        ({"a": lambda f: 1.0, "b": lambda f: (1.15 / f) ** 9, "c": lambda f: 1.08 / f}, 1.5, 1.08),
        # b is faster between 1.1 and 1.4 alone: the region ends where it begins, though a is the best again at the end
        ({"a": lambda f: 1.0, "b": lambda f: 0.9 if 1.1 < f < 1.4 else 1.1}, 1.5, 1.1),
        # b takes half as long from some factor on, and more before
        ({"a": lambda f: 1.0, "b": lambda f: 0.5 if f > 1.04 else 1.1}, 1.5, 1.04),
        ({"a": lambda f: 1.0, "b": lambda f: 0.5 if f > 1.14 else 1.1}, 1.5, 1.14),
        # exactly a millionth faster is as fast
        ({"a": lambda f: 1.0, "b": lambda f: 0.5 if f > 1.3 else 1 - 1e-6}, 1.5, 1.3),
        # less than a millionth faster is as fast, up to 1.3, from where on b takes half
        ({"a": lambda f: 1.0, "b": lambda f: 0.5 if f > 1.3 else 1 - 5e-7}, 1.5, 1.3),
    ],
)
def test_the_edge_of_a_region_is_where_another_plan_is_as_fast(curves: Curves, far: float, edge: float) -> None:
    found, reached = edge_of(curves, far)
    nearer = edge * exp(-0.02 if far > 1 else 0.02)
    assert min(nearer, edge) <= found <= max(nearer, edge)  # never beyond the edge, and at most 2 % before it
    assert not reached


@pytest.mark.parametrize("far", [1.5, 1 / 1.5])
def test_a_plan_that_nothing_beats_is_the_best_up_to_the_end(far: float) -> None:
    assert edge_of({"a": lambda f: 1.0, "b": lambda f: 1.1}, far) == (far, True)


def test_a_plan_that_another_beats_everywhere_has_no_region() -> None:
    assert edge_of({"a": lambda f: 1.0, "b": lambda f: 0.9}, 1.5) == (1.0, False)


def test_as_fast_is_the_best_and_what_a_plan_loses_is_a_part_of_the_best() -> None:
    def outcome(step_time: float | None, best: float | None) -> Outcome:
        return Outcome(1.2, None if best is None else Trial("b", Evaluation(best, 0, True), 0.0), step_time)

    assert outcome(3.0, 2.0).loses == 0.5  # 3 / 2 - 1
    assert not outcome(3.0, 2.0).stays
    assert outcome(1.0, 1 - 5e-7).stays and not outcome(1.0, 1 - 2e-6).stays  # whole ticks make a millionth
    for neither in (outcome(None, 2.0), outcome(2.0, None)):
        assert neither.loses is None and not neither.stays
