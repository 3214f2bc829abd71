"""An evaluation is over all samples at once, however they lie in batches, and leaves training as it was."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
import torch
from torch import nn

import meshwise as mw
from meshwise.executor.modules.evaluation import EvaluationBatch, EvaluationError, evaluate_module

SAMPLES = torch.arange(1.0, 13.0).view(12, 1)
CORE = torch.device("cpu")


def measure(module: nn.Module, batch: torch.Tensor) -> dict[str, Any]:
    """Return a mean over samples, and a mean over other weights."""
    return {"mean": batch.mean(), "weighted": (batch.square().sum(), batch.sum())}


@given(st.lists(st.integers(1, 11), max_size=5, unique=True).map(sorted), st.integers(0, 3))
def test_figures_do_not_depend_on_batches(cuts: list[int], num_uncounted: int) -> None:
    batches = [EvaluationBatch(SAMPLES[first:end]) for first, end in pairwise([0, *cuts, 12])]
    batches += [EvaluationBatch(SAMPLES[:1], False)] * num_uncounted
    figures = evaluate_module(nn.Identity(), measure, batches, CORE)
    assert figures == pytest.approx({"mean": 6.5, "weighted": float(SAMPLES.square().sum() / SAMPLES.sum())})


@pytest.mark.parametrize(
    ("figure", "text"),
    [
        ("good", "a number, a pair .* met str"),
        (torch.ones(3), r"met \[3\]"),
        (None, "met NoneType"),
        ((1.0, 0), "weights of value sum to more than 0 over all samples, met 0"),
        ({"loss": [1, 2, 3]}, "met list"),
    ],
)
def test_figures_that_do_not_add_up_are_refused(figure: Any, text: str) -> None:
    with pytest.raises(EvaluationError, match=text):
        evaluate_module(nn.Identity(), lambda module, batch: figure, [EvaluationBatch(SAMPLES)], CORE)


def test_no_samples_are_refused() -> None:
    with pytest.raises(EvaluationError, match="at least one sample, met none"):
        evaluate_module(nn.Identity(), measure, [], CORE)


def test_training_is_as_it_was() -> None:
    def train(*, is_evaluated: bool) -> list[float]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        module[1].eval()
        step = mw.parallelize(module, loss=lambda outputs, batch: (outputs - batch).square().mean())
        losses = []
        for _ in range(3):
            losses.append(step(SAMPLES))
            if is_evaluated:
                first, second = (step.evaluate(batches=[SAMPLES[:5], SAMPLES[5:]]) for _ in range(2))
                assert first == second and first.keys() == {"loss"}
                step.evaluate(lambda module, batch: torch.rand(()), [SAMPLES])
                assert module.training and not module[1].training and module[2].training
        return losses

    assert train(is_evaluated=True) == train(is_evaluated=False)


def test_an_evaluation_comes_after_a_step() -> None:
    with pytest.raises(ValueError, match="after at least one step, met none"):
        mw.parallelize(nn.Linear(1, 1)).evaluate(batches=[SAMPLES])
