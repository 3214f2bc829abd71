"""Plans with balanced loads on devices of several kinds, against uniform plans and those that people would type."""

from dataclasses import replace
from pathlib import Path

import pytest

from meshwise.scenarios.loader import load
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.search.algorithms.auto import Auto
from meshwise.strategies.search.algorithms.metis import Metis
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import Space

from ....examples import LONG
from ...problems import problem
from ..test_speed_division import mixed

MIXED = Path(__file__).parents[4] / "scenarios/gallery/techniques/mixed-devices.yaml"
"""Llama 2 13B on 8 H100 and 8 A100."""


@pytest.mark.parametrize("layers", range(2, 8) if LONG else (3,))
def test_it_is_never_slower_than_the_plans_of_auto(layers: int) -> None:
    of = mixed(devices=2, layers=layers, batch=8)
    metis, auto = search(Metis(), of), search(Auto(), of)
    assert metis.best is not None and auto.best is not None
    assert metis.best.evaluation.step_time <= auto.best.evaluation.step_time
    assert metis.lower_bound == auto.lower_bound  # the proof is about uniform plans


def test_samples_by_speed_beat_stages_by_speed_where_a_pipeline_is_short_of_microbatches() -> None:
    # 8 sequences: 2 * 3 and 2 * 1 keep all devices busy; a pipeline of 4 microbatches on two stages waits at both ends
    of = mixed(devices=2, layers=4, batch=8, bandwidth=1e13)
    metis, auto = search(Metis(), of), search(Auto(), of)
    assert metis.best is not None and auto.best is not None
    assert metis.best.evaluation.step_time < 0.95 * auto.best.evaluation.step_time
    assert metis.best.plan.microbatch == (3, 3, 1, 1)


def test_on_devices_of_one_kind_it_is_auto() -> None:
    of = problem(nodes=2, devices=2, layers=4, batch=8)
    metis, auto = search(Metis(), of), search(Auto(), of)
    assert [trial.plan for trial in metis.trials] == [trial.plan for trial in auto.trials]


def test_limits_of_the_space_are_kept() -> None:
    of = mixed(devices=2, layers=4, batch=4)
    for space in (Space(microbatch=(2,)), Space(stages=("even",)), Space(zero=(0,), tensor=(2,))):
        for trial in search(Metis(), of, space).trials:
            plan = trial.plan
            assert space.microbatch is None or plan.microbatch == 2
            assert space.zero is None or (plan.zero, plan.tensor) == (0, 2)
            assert space.stages is None or len({len(stage.blocks) for stage in plan.stages[1:-1]}) <= 1


def typed_layouts() -> list[Layout]:
    """Return plans that an engineer would type for `MIXED`, with stages by speed, or samples."""
    overlap = Layout(sequence_parallel=True, overlap_tensor=True)
    return [
        Layout(tensor=8, pipeline=2, stages=(29, 11), sequence_parallel=True),  # the scenario's own plan
        Layout(data=8, pipeline=2, zero=3, schedule="zbv", chunks=2, stages=(15, 6, 5, 14)),  # the best uniform plan
        Layout(data=16, microbatch=(3,) * 8 + (1,) * 8, zero=3, recompute=Recompute.FULL),
        replace(overlap, data=4, tensor=4, microbatch=(6, 6, 2, 2), zero=3),
        replace(overlap, data=8, tensor=2, microbatch=(3,) * 4 + (1,) * 4, zero=3),
    ]


@pytest.mark.parametrize("tensor", [(1, 2, 4, 8) if LONG else (2,)])
def test_on_8_h100_and_8_a100_no_typed_plan_is_faster(tensor: tuple[int, ...]) -> None:
    of = load(MIXED).problem
    costs = SimulatedCost(of)
    assert not [row for layout in typed_layouts() for row in violations(of, layout)]
    typed_times = [costs.evaluate(complete(of, layout)).step_time for layout in typed_layouts()]
    result = search(Metis(), of, Space(tensor=tensor, pipeline=None if LONG else (1,)))
    assert result.best is not None and result.best.evaluation.step_time <= min(typed_times)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="choices is at least 1, met 0; nearest: 1"):
        Metis(choices=0)
