from collections.abc import Callable
from dataclasses import replace
from math import exp, inf

import pytest

from strategies.evaluation import Evaluation, Trial
from strategies.explanation.machine_part import machine_parts
from strategies.explanation.ranking import fits
from strategies.explanation.sensitivity import NEARER, OFF, REACH, Outcome, _edge, memory_sensitivity, sensitivity

from .cases import CRAMPED, FAST, RANKED, RANKED_FAST, brute_force

MEMORY = CRAMPED.cluster.accelerator.memory


@pytest.mark.parametrize("part", machine_parts(FAST.cluster, "fp32"), ids=lambda part: part.name)
def test_a_plan_is_the_best_inside_its_region_and_not_outside(part) -> None:
    best = RANKED_FAST.fastest(fits)
    assert best is not None
    found = sensitivity(RANKED_FAST, best.plan, part)
    for outcome in found.outcomes:
        fastest = brute_force(replace(FAST, cluster=part.scaled(outcome.factor)), inf)[0][0]
        assert outcome.best is not None and outcome.best.evaluation.step_time == fastest
        assert outcome.stays == (outcome.step_time <= fastest * (1 + 2e-6))
        assert outcome.loses == pytest.approx(max(outcome.step_time / fastest - 1, 0), abs=2e-6)
    for edge, further, ended in zip(found.region, (1 - 2 * NEARER, 1 + 2 * NEARER), found.reached, strict=True):
        machine = RANKED_FAST.on(part.scaled(edge), edge)
        inside = machine.fastest(fits)
        assert inside is not None and machine.step_time(best.plan) <= inside.evaluation.step_time * (1 + 2e-6)
        if not ended:
            machine = RANKED_FAST.on(part.scaled(edge * further), edge * further)
            outside = machine.fastest(fits)
            assert outside is not None and machine.step_time(best.plan) > outside.evaluation.step_time


def test_somewhere_another_plan_wins() -> None:
    best = RANKED_FAST.fastest(fits)
    assert best is not None
    parts = {part.name: part for part in machine_parts(FAST.cluster, "fp32")}
    found = sensitivity(RANKED_FAST, best.plan, parts["links between nodes"])
    assert not all(found.reached)
    assert 1 / REACH <= found.region[0] <= 1 <= found.region[1] <= REACH


def test_the_region_of_memory_is_from_what_a_plan_needs_to_what_a_faster_one_needs() -> None:
    best = RANKED.fastest(fits)
    assert best is not None
    found = memory_sensitivity(RANKED, best, "")
    faster = [memory for time, memory in brute_force(CRAMPED, float("inf")) if time < best.evaluation.step_time]
    assert found.region == (best.evaluation.peak_memory / MEMORY, min(faster) / MEMORY)
    less, more = found.outcomes
    assert less.step_time is None and less.loses is None and not less.stays
    assert more.best is not None and more.best.evaluation.step_time == brute_force(CRAMPED, MEMORY * 1.2)[0][0]


Curves = dict[str, Callable[[float], float]]
"""Seconds of plans, here names, by how fast a part of the machine is."""


def edge_of(curves: Curves, far: float) -> tuple[float, bool]:
    """Return the edge of the region of plan "a" among plans whose times are known."""

    def outcome(factor: float) -> Outcome:
        best = min(curves, key=lambda plan: curves[plan](factor))
        return Outcome(factor, Trial(best, Evaluation(curves[best](factor), 0, True), 0.0), curves["a"](factor))

    return _edge(outcome, lambda plan, factor: curves[plan](factor), "a", outcome(1 + OFF if far > 1 else 1 - OFF), far)


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
        # less than a millionth faster is as fast, up to 1.3, from where on b takes half
        ({"a": lambda f: 1.0, "b": lambda f: 0.5 if f > 1.3 else 1 - 5e-7}, 1.5, 1.3),
    ],
)
def test_the_edge_of_a_region_is_where_another_plan_is_as_fast(curves: Curves, far: float, edge: float) -> None:
    found, reached = edge_of(curves, far)
    nearer = edge * exp(-NEARER if far > 1 else NEARER)
    assert min(nearer, edge) <= found <= max(nearer, edge)  # never beyond the edge, and at most `NEARER` before it
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
