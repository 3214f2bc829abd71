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


class Halves(nn.Module):
    """Writes both halves of its values in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        values = x.new_empty(len(x), 4)
        values[:, :2], values[:, 2:] = self.up(x), x[:, :2]
        return (values * values).mean()


def test_gradients_of_values_written_in_place_are_those_of_the_module() -> None:
    torch.manual_seed(0)
    module, x = Halves(), torch.randn(5, 3)
    step = export_step(module, None, x)
    values = [
        module.get_parameter(step.parameters[n.name]) if n.name in step.parameters else x
        for n in step.graph.find_nodes(op="placeholder")
    ]
    loss = next(iter(torch.fx.Interpreter(step.root).run(*values)))
    module(x).backward()
    found = torch.autograd.grad(loss, list(module.parameters()))
    torch.testing.assert_close(found, tuple(parameter.grad for parameter in module.parameters()))


class Count(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum() / int((x > 0).sum())


def test_numbers_out_of_data_are_refused_with_their_line() -> None:
    line = Path(__file__).read_text().splitlines().index("        return x.sum() / int((x > 0).sum())") + 1
    with pytest.raises(ExportError, match=rf"test_export.py:{line}: "):
        export_step(Count(), None, torch.ones(2, 3))
