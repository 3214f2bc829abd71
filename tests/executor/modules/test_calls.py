"""A forward gets the items that it has parameters for, and the labels of a step are counted once."""

from typing import Any

import pytest

pytest.importorskip("torch")
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwise as mw
from meshwise.executor.modules.calls import CallError, call_module, count_labels


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


class Pair(Plain):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:  # type: ignore[override]
        return self.head(x) * scale


class Named(Plain):
    def forward(self, **items: Any) -> list[str]:  # type: ignore[override]
        return sorted(items)


X, Y = torch.ones(4, 3), torch.tensor([0, 1, 0, 1])


@pytest.mark.parametrize("batch", [X, (X, Y), [X, Y], {"x": X, "y": Y}])
def test_a_loss_function_gets_what_forward_leaves(batch: Any) -> None:
    torch.manual_seed(0)
    module = Plain()
    assert torch.equal(call_module(module, batch, has_loss=True), module(X))


def test_a_forward_gets_as_many_items_as_it_has_positions_for() -> None:
    module = Pair()
    assert torch.equal(call_module(module, (X, 2.0, Y), has_loss=True), module(X, 2.0))
    assert call_module(Named(), {"x": X, "y": Y}, has_loss=True) == ["x", "y"]
    assert torch.equal(call_module(nn.ReLU(), (X, Y), has_loss=True), X)


@pytest.mark.parametrize("batch", [(X, Y), {"x": X, "y": Y}, {"z": X}])
def test_a_batch_that_forward_does_not_take_is_told_with_its_line(batch: Any) -> None:
    line = Plain.forward.__code__.co_firstlineno
    with pytest.raises(CallError, match=rf"test_calls.py:{line}: forward\(x\) of Plain takes a batch, met .*nearest: "):
        call_module(Plain(), batch)


def test_an_error_inside_a_forward_is_the_users() -> None:
    with pytest.raises(TypeError):
        call_module(nn.Linear(3, 2), ("text",))


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 9)
        self.counts: list[int] = []

    def forward(self, ids: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        self.counts.append(int(num_items_in_batch))
        return F.cross_entropy(self.words(ids).flatten(0, 1), labels.flatten(), reduction="sum") / num_items_in_batch


@pytest.mark.parametrize("is_dict", [False, True])
def test_microbatches_get_the_count_of_the_step(is_dict: bool) -> None:
    torch.manual_seed(0)
    ids = torch.randint(9, (6, 5))
    labels = ids.clone()
    for row in range(6):
        labels[row, row % 4 + 1 :] = -100
    batch: Any = {"ids": ids, "labels": labels} if is_dict else (ids, labels)
    losses = []
    for parts in (1, 2, 3):
        torch.manual_seed(1)
        module = Counted()
        assert count_labels(module, batch) == (labels != -100).sum()
        step = mw.parallelize(module, f"data=1,num_microbatches={parts}", precision="fp64")
        losses.append([step(batch), step(batch)])
        assert set(module.counts[-2 * parts :]) == {int((labels != -100).sum())}
    assert losses[1] == pytest.approx(losses[0], rel=1e-12) and losses[2] == pytest.approx(losses[0], rel=1e-12)


def test_a_forward_that_takes_a_count_needs_labels() -> None:
    step = mw.parallelize(Counted(), "data=1")
    ids = torch.zeros(4, 5, dtype=torch.long)
    with pytest.raises(CallError, match="has a batch with labels, met none of that name"):
        step({"ids": ids, "targets": ids})
    with pytest.raises(CallError, match="labels other than -100, met none"):
        step({"ids": ids, "labels": ids - 100})
