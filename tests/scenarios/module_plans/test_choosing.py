"""Only layouts that are kept are chosen, and where there is none that is an error."""

import pytest

pytest.importorskip("torch")

from meshwise.scenarios.module_plans.choosing import choose
from meshwise.scenarios.module_plans.prediction import build_model
from tests.scenarios.module_plans.modules import build_figures

MODEL = build_model(build_figures(), None, 8, "fp32", "cpu", "no graph")


def test_a_layout_that_is_not_kept_is_not_chosen() -> None:
    assert choose(MODEL, [1, 2]).layout.data == 2
    assert choose(MODEL, [1, 2], keep=lambda layout: layout.data == 1).layout.data == 1


def test_a_batch_that_no_plan_divides_is_an_error() -> None:
    with pytest.raises(ValueError, match="no plan of 3 ranks divides a batch of 8"):
        choose(MODEL, [3])
