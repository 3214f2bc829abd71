"""A graph has the names, the inputs and the results of its module; what is no graph is refused with the line."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch
from torch import Tensor, nn

from meshwise.executor.stages.export import ExportError, export_step
from tests.executor.stages.woven import build_woven
from tests.executor.user_training.zoo import Tied, Weighted


def test_names_are_those_of_the_module() -> None:
    module, step = build_woven()
    assert set(step.parameters.values()) == {name for name, _ in module.named_parameters()}
    assert list(step.buffers.values()) == ["scale"]
    assert (len(step.inputs), len(step.results), dict(step.updates)) == (2, 1, {})
    assert "frozen.weight" not in step.trained and "first.weight" in step.trained


def test_a_tied_parameter_has_one_name_and_a_weight_is_a_result() -> None:
    tied = export_step(Tied(), None, torch.zeros(2, 10, dtype=torch.int64))
    assert "words.weight" in tied.parameters.values() and "head.weight" not in tied.parameters.values()
    tokens = torch.zeros(2, 10, dtype=torch.int64)
    assert len(export_step(Weighted(), None, {"ids": tokens, "labels": tokens}).results) == 2


class Count(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum() / int((x > 0).sum())


def test_numbers_out_of_data_are_refused_with_their_line() -> None:
    line = Path(__file__).read_text().splitlines().index("        return x.sum() / int((x > 0).sum())") + 1
    with pytest.raises(ExportError, match=rf"test_export.py:{line}: "):
        export_step(Count(), None, torch.ones(2, 3))
