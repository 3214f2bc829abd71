"""The first batch of a user's file is that of all ranks; its module is captured with its loss."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from meshwise.executor.module_measures.first_batch import FirstBatch
from meshwise.executor.modules.layout import ModuleLayout
from meshwise.executor.user_training.job import TrainJob

HERE = Path(__file__).parent


def read(kind: str, monkeypatch: pytest.MonkeyPatch) -> FirstBatch:
    monkeypatch.setenv("KIND", kind)
    return FirstBatch(TrainJob(str(HERE.parent / "user_training" / "zoo.py"), ModuleLayout(2), 3))


def test_a_dict_with_a_weighted_loss_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    first = read("weighted", monkeypatch)
    assert first.samples == 8 and first.tokens == 8 * 10
    # an embedding of 40 words in 8 dims, and a layer back with its bias
    assert first.capture().num_parameters == 40 * 8 + 8 * 40 + 40


def test_a_tuple_of_images_has_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read("residual", monkeypatch).tokens is None


def test_a_module_that_branches_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="control flow"):
        read("routed", monkeypatch).capture()
