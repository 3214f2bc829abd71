"""Predicted steps are the sum of what was measured, worked out by hand; memory is what the module keeps."""

import pytest

from meshwise.executor.modules.layout import ModuleLayout, parse_layout
from meshwise.scenarios.module_plans.prediction import StepPredictor, build_model
from tests.scenarios.module_plans.modules import BLOCK_ELEMENTS, KIB, build_figures

BATCH = 8
ALONE = 0.1 + 0.2 + 1.0
"""Milliseconds of a step of one rank besides its passes: reading, the loop and the optimizer."""


def predict(words: str, **changes: object) -> float:
    """Return the predicted milliseconds of a layout."""
    model = build_model(build_figures(**changes), None, BATCH, "fp32", "cpu", "no graph")
    return StepPredictor(model).predict(parse_layout(words, ModuleLayout())).step_time * 1e3


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("data=1", 2 + 8 * 0.5 + ALONE),
        ("data=1,num_microbatches=2", 2 * (2 + 4 * 0.5) + ALONE),
        # all parts together took 4 ms under their hooks, of which 1.8 ms are forward passes of blocks
        ("data=1,recompute=full", (2 + 8 * 0.5) * (1 + 1.8 / 4) + ALONE),
        # losses are added up, gradients copied and summed in one message
        ("data=2", 2 + 4 * 0.5 + ALONE + 0.3 + 0.5 + 0.25),
        ("data=2,num_microbatches=4", 4 * (2 + 0.5) + ALONE + 0.3 + 0.5 + 0.25),
    ],
)
def test_a_step_is_the_sum_of_its_parts(words: str, expected: float) -> None:
    assert predict(words) == pytest.approx(expected, rel=1e-3)


def test_ranks_that_share_states_pay_for_units_and_update_their_part() -> None:
    # the update of the elements, 0.6 ms, is halved, and sharded parameters take 0.7 ms more
    update = 0.4 + 0.3 + 0.7
    passes = 2 + 4 * 0.5
    common = passes + 0.1 + 0.2 + 0.3 + update
    # four units take 0.6 ms each for three messages; without messages this leaves those of at most four blocks
    zero2, zero3 = predict("data=2,zero=2"), predict("data=2,zero=3")
    assert zero3 == pytest.approx(common + 4 * 0.6 + 2 * 3 * 0.25, rel=1e-3)  # gathers twice, reductions once
    assert zero2 == pytest.approx(common + 4 * 0.6 * 2 / 3 + 4 * 2 * 0.25, rel=1e-3)  # blocks of any kind, once each


def test_one_rank_alone_computes_at_its_own_pace() -> None:
    assert predict("data=1", alone=3e-3) == pytest.approx((2 + 8 * 0.5) / 2 + ALONE, rel=1e-3)
    assert predict("data=2", alone=3e-3) == pytest.approx(predict("data=2"))


def test_memory_is_what_the_module_keeps() -> None:
    figures = build_figures()
    model = build_model(figures, None, BATCH, "fp32", "cpu", "no graph")

    def peak(words: str) -> float:
        return StepPredictor(model).predict(parse_layout(words, ModuleLayout())).peak_memory

    parameters = 2 * BLOCK_ELEMENTS * 4
    whole = 4 * parameters + figures.peak + 64 * 8 - parameters  # AdamW's states, and gradients are in the peak
    assert peak("data=1") == pytest.approx(whole, rel=1e-3)
    # half the samples at once keep half the bytes of passes; gradients of the first half stay meanwhile
    half = peak("data=1,num_microbatches=2")
    assert half == pytest.approx(whole - figures.peak / 2, rel=0.03)
    # of a block computed again its input stays alone: 2 blocks keep 4 KiB for a sample instead of 20
    assert whole - peak("data=1,recompute=full") == pytest.approx(8 * 2 * 16 * KIB, rel=0.6)
    assert peak("data=2,zero=3") < peak("data=2")


def test_states_of_the_optimizer_are_as_measured() -> None:
    plain = build_figures(state=0)
    adamw, sgd = (build_model(row, None, BATCH, "fp32", "cpu", "") for row in (build_figures(), plain))
    peaks = [StepPredictor(model).predict(ModuleLayout()).peak_memory for model in (adamw, sgd)]
    assert peaks[0] - peaks[1] == pytest.approx(2 * 4 * 2 * BLOCK_ELEMENTS, rel=0.1)


def test_without_figures_and_graph_nothing_is_predicted() -> None:
    with pytest.raises(ValueError, match="needs a captured module: it branches"):
        build_model(None, None, BATCH, "fp32", "cpu", "it branches")


def test_temporary_tensors_of_the_optimizer_count() -> None:
    # parameters and gradients, two states, and a temporary tensor of a million bytes beside the batch
    figures = build_figures(update_peak=1e6)
    predictor = StepPredictor(build_model(figures, None, BATCH, "fp32", "cpu", ""))
    states = 4 * 2 * BLOCK_ELEMENTS * 4
    assert predictor.predict(ModuleLayout()).peak_memory == states + 1e6 + 64 * 8
    buckets = 2 * BLOCK_ELEMENTS * 4
    assert predictor.predict(ModuleLayout(2)).peak_memory == states + buckets + 1e6 + 64 * 4
    assert predictor.predict(ModuleLayout(2, zero=3)).peak_memory == (states + 1e6) / 2 + 64 * 4


def test_reading_takes_as_long_as_samples_need() -> None:
    # a rank that reads its own 4 samples in 0.1 ms takes twice as long for 8; one that reads all takes as long for all
    assert predict("data=1", read_samples=4) == pytest.approx(2 + 8 * 0.5 + ALONE + 0.1, rel=1e-3)
    assert predict("data=2", read_samples=4) == pytest.approx(predict("data=2", read_samples=8))


def test_stages_run_at_the_same_time() -> None:
    # four microbatches of 2 samples take 2 + 1 ms each: 1.9 of 4 parts of it before the cut, 2.1 after it; the slower
    # stage begins after a forward and ends before a backward of the other
    words = "data=1,pipeline=2,num_microbatches=4,cuts=layers.1"
    first, second = 3 * 1.9 / 4, 3 * 2.1 / 4
    fixed = 0.1 + 0.2 + 0.3 + 0.4 / 2 + 0.6 / 2  # an update of half of the parameters
    sends = 0.25
    assert 4 * second + first + fixed <= predict(words) <= 4 * second + first + fixed + (2 * 4 + 2) * sends
    assert predict(words) < predict("data=1,num_microbatches=4")
