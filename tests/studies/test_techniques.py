"""Techniques come from the registries, and plans of one, two and three of them from techniques."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.executor.supported import find_unsupported
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.problem import OPTIMIZERS, Training
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.schedules.schedule import SCHEDULES

from . import techniques as module
from .techniques import (
    LAYERS,
    TRIPLES,
    Combination,
    Technique,
    combine,
    divide_unevenly,
    list_plans,
    techniques,
)

ALL = {technique.name: technique for technique in techniques()}
any_technique = st.sampled_from(sorted(ALL)).map(ALL.__getitem__)


@pytest.fixture(scope="module")
def every() -> tuple[Combination, ...]:
    return tuple(list_plans())


def test_no_field_of_a_layout_is_left_out_but_where_ranks_and_tables_lie() -> None:
    # the network of the matrix has no embedding tables of its own: `tests/strategies/tables` is about them
    asked = {field for technique in ALL.values() for field in technique.layout}
    assert set(Layout.__dataclass_fields__) - asked == {"order", "placement", "embeddings"}


def test_every_value_of_a_registry_has_a_technique() -> None:
    def values(field: str) -> set[object]:
        return {technique.layout[field] for technique in ALL.values() if field in technique.layout}

    assert values("schedule") > set(SCHEDULES)  # and an order that is written out
    assert values("attention") == set(Attention)
    assert values("recompute") > {how for how in Recompute if how is not Recompute.NONE}
    optimizers = {technique.training.get("optimizer", Training(1, 1).optimizer) for technique in ALL.values()}
    assert optimizers == set(OPTIMIZERS)


def test_one_two_and_three_at_a_time_in_one_order(every: tuple[Combination, ...]) -> None:
    names = [technique.name for technique in techniques()]
    chosen = [name for name in names if name in TRIPLES]
    assert len(chosen) == len(TRIPLES)
    expected = [subset for count in (1, 2) for subset in combinations(names, count)]
    assert [each.names for each in every] == [*expected, *combinations(chosen, 3)]


def test_all_that_runs_is_supported_and_all_else_has_its_reason(every: tuple[Combination, ...]) -> None:
    for each in every:
        told = bool(each.job) + bool(each.reasons) + bool(each.clash)
        assert told == 1, each
        if each.job is not None:
            assert find_unsupported(each.job.spec, each.job.training, each.job.plan) == ()
            assert each.ranks >= 2


def test_enough_runs(every: tuple[Combination, ...]) -> None:
    ran = [each for each in every if each.job is not None]
    assert len({each.job for each in ran if each.ranks in (2, 4, 8)}) >= 60
    assert sum(len(each.names) == 3 for each in ran) >= 3


@given(any_technique, any_technique)
def test_the_order_of_techniques_says_nothing(one: Technique, other: Technique) -> None:
    there, back = combine([one, other]), combine([other, one])
    assert (there.job, there.clash, there.reasons) == (back.job, back.clash, back.reasons)


@given(any_technique)
def test_a_technique_twice_is_the_technique(one: Technique) -> None:
    assert combine([one, one]).job == combine([one]).job


def test_of_two_degrees_the_larger_and_of_two_choices_none() -> None:
    together = combine([ALL["data"], ALL["ZeRO 3, hybrid"]])
    assert together.job == combine([ALL["ZeRO 3, hybrid"]]).job  # 4 data ranks are 2 and more
    assert together.ranks == 4
    assert combine([ALL["gpipe"], ALL["zbv"]]).clash == "a plan has one schedule"
    assert combine([ALL["context, ring"], ALL["unfused attention"]]).clash == ""  # a layout's and a model's attention


def test_what_becomes_supported_appears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_unsupported", lambda spec, training, plan: ())
    assert combine([ALL["tensor, 2-D"]]).ranks == 4  # 2 rows of 2 columns
    assert combine([ALL["context, ring"], ALL["expert parallel"]]).ranks == 4


@pytest.mark.parametrize("stages", [2, 4])
def test_uneven_stages_hold_all_layers(stages: int) -> None:
    assert sum(divide_unevenly(stages)) == LAYERS
    assert len(set(divide_unevenly(stages))) > 1
