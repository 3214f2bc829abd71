"""Only layouts that are kept are chosen, and where there is none that is an error."""

from dataclasses import replace
from itertools import pairwise

import pytest

pytest.importorskip("torch")

from meshwise.executor.modules.layout import ModuleLayout
from meshwise.scenarios.module_plans import prediction
from meshwise.scenarios.module_plans.choosing import choose
from meshwise.scenarios.module_plans.prediction import Prediction, StepPredictor, build_model
from meshwise.strategies.plan.recomputation import FirstLayers, Recompute
from tests.scenarios.module_plans.modules import KIB, build_figures

MODEL = build_model(build_figures(), None, 8, "fp32", "cpu", "no graph")


def test_a_layout_that_is_not_kept_is_not_chosen() -> None:
    assert choose(MODEL, [1, 2]).layout.data == 2
    assert choose(MODEL, [1, 2], keep=lambda layout: layout.data == 1).layout.data == 1


def test_a_batch_that_no_plan_divides_is_an_error() -> None:
    with pytest.raises(ValueError, match="no plan of 3 ranks divides a batch of 8"):
        choose(MODEL, [3])


def test_as_few_blocks_as_fit_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = tuple(replace(MODEL.figures.blocks[0], path=f"layers.{place}") for place in range(8))  # type: ignore[union-attr]
    figures = build_figures(blocks=blocks, peak=8.0 * (8 * 20 + 2 + 4 + 8) * KIB)
    model = build_model(figures, None, 8, "fp32", "cpu", "no graph")

    def predict(count: int) -> Prediction:
        choice = FirstLayers(Recompute.FULL, count) if count else Recompute.NONE
        return StepPredictor(model).predict(ModuleLayout(recompute=choice))

    predictions = [predict(count) for count in range(9)]
    times, peaks = ([getattr(p, name) for p in predictions] for name in ("step_time", "peak_memory"))
    assert times == sorted(times) and len(set(times)) == 9
    # of another block computed again 16 KiB a sample are not kept
    drops = [first - second for first, second in pairwise(peaks[1:8])]
    assert drops == pytest.approx([8 * 16 * KIB] * 6)
    for count in (0, 1, 4, 6):
        limit = (peaks[count] + peaks[count + 1]) / 2
        monkeypatch.setattr(prediction, "read_device_memory", lambda device, limit=limit: limit)
        planned = choose(model, [1], keep=lambda layout: layout.num_microbatches == 1)
        assert planned.prediction is not None and planned.prediction.fits
        assert planned.layout.recompute == FirstLayers(Recompute.FULL, count + 1)
        assert planned.prediction.step_time == times[count + 1]
