from dataclasses import replace

import pytest

from meshwise.simulator.engine import simulate
from meshwise.strategies.explanation.critical_path import device_time
from meshwise.strategies.explanation.ranking import fits
from meshwise.strategies.explanation.why_not import explain_why_not, find_nearest
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.search.space import Space, layouts

from .cases import CRAMPED, RANKED, brute_force

BEST = RANKED.find_fastest(fits)
assert BEST is not None
LAYOUT = next(each.layout for each in RANKED.candidates if RANKED.complete_candidate(each) == BEST.plan)
MEMORY = CRAMPED.cluster.accelerator.memory


def test_a_rule_is_named_with_the_nearest_value() -> None:
    found = explain_why_not(RANKED, BEST, LAYOUT, {"tensor": 3})
    assert found.num_legal == 0 and found.trial is None
    assert [each.field for each in found.broken_rules] == ["tensor", "tensor", "tensor"]
    assert "tensor divides heads(8), met 3; nearest: 2" in [each.message for each in found.broken_rules]
    assert found.nearest_trial is not None
    assert found.nearest_trial.plan.tensor in (2, 4)  # log2(3 / 2) is 0.58, log2(4 / 3) is 0.42


def test_what_lacks_is_told_to_the_byte() -> None:
    asked = {"data": 8}
    found = explain_why_not(RANKED, BEST, LAYOUT, asked)
    least = min(memory for _, memory in brute_force(CRAMPED, float("inf"), Space(data=(8,))))
    assert found.shortfall is not None and found.margin is None
    assert found.shortfall.needed_memory == least
    assert found.shortfall.missing_memory == least - MEMORY
    assert sum(size for _, size in found.shortfall.memory_by_kind) == least
    assert found.nearest_trial is not None and found.nearest_trial.evaluation.fits
    assert found.nearest_trial.plan.data == max(each.layout.data for each in RANKED.candidates if each.fits)


@pytest.mark.parametrize("zero", [0, 1])
def test_what_is_left_open_stays_within_the_limits_of_the_space(zero: int) -> None:
    asked, space = {"tensor": 2}, Space(zero=(zero,), microbatch=(1,), schedule=("gpipe", "1f1b"))
    found = explain_why_not(RANKED, BEST, LAYOUT, asked, space)
    assert found.trial is not None
    plan = found.trial.plan
    assert (plan.tensor, plan.zero, plan.microbatch) == (2, zero, 1) and plan.schedule in space.schedule
    assert found.num_legal == len(list(layouts(CRAMPED, replace(space, tensor=(2,)))))


def test_limits_that_leave_nothing_of_what_is_asked_for_are_named_as_such() -> None:
    found = explain_why_not(RANKED, BEST, LAYOUT, {"tensor": 2}, Space(data=(8,)))
    assert (found.num_legal, found.is_outside, found.broken_rules, found.trial) == (0, True, (), None)
    assert not explain_why_not(
        RANKED, BEST, LAYOUT, {"tensor": 3}, Space(data=(8,))
    ).is_outside  # no space has such plans


def test_what_is_slower_is_told_by_kind_and_adds_up() -> None:
    asked = {"tensor": 2, "microbatch": 2}
    found = explain_why_not(RANKED, BEST, LAYOUT, asked)
    assert found.trial is not None and found.margin is not None
    fastest = brute_force(CRAMPED, MEMORY, Space(tensor=(2,), microbatch=(2,)))[0][0]
    assert found.trial.evaluation.step_time == fastest
    assert found.margin == fastest / BEST.evaluation.step_time - 1
    assert sum(seconds for _, seconds in found.extra_seconds) == pytest.approx(
        fastest - BEST.evaluation.step_time, rel=1e-9
    )
    spent = device_time(simulate(lower(CRAMPED, found.trial.plan)))
    own = device_time(simulate(lower(CRAMPED, BEST.plan)))
    assert dict(found.extra_seconds)["tensor communication"] == spent["tensor communication"] - own.get(
        "tensor communication", 0
    )


@pytest.mark.parametrize(
    "asked",
    [{"context": 2}, {"context": 2, "attention": Attention.ULYSSES}, {"schedule": "zb1p"}, {"scatter_gather": True}],
    ids=str,
)
def test_fields_that_a_space_does_not_have(asked: dict[str, object]) -> None:
    found = explain_why_not(RANKED, BEST, LAYOUT, asked)
    assert found.num_legal > 0 and not found.broken_rules
    if found.trial is not None and "context" in asked:
        assert found.trial.plan.context == 2
        assert found.trial.plan.mesh.num_ranks == 8


@pytest.mark.parametrize(
    "asked",
    [{"data": 8, "tensor": 1, "microbatch": 1}, {"data": 4, "tensor": 2, "zero": 0}, {"pipeline": 1, "zero": 1}],
)
def test_the_nearest_plan_differs_in_the_fewest_fields(asked: dict[str, int]) -> None:
    found = find_nearest(RANKED, asked)
    assert found is not None
    layout = next(each.layout for each in RANKED.candidates if RANKED.complete_candidate(each) == found.plan)

    def differs(layout: Layout) -> int:
        return sum(getattr(layout, name) != value for name, value in asked.items())

    assert differs(layout) == min(differs(each.layout) for each in RANKED.candidates if each.fits)
