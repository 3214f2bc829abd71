"""Losses of parts add up to that of the batch, by hand-computed sums."""

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwise.executor.modules.losses import LossError, StepLoss, WeightedLoss, read_loss, require_mean_over_samples
from meshwise.executor.modules.sharding import act_alone

CPU = torch.device("cpu")


def test_means_of_microbatches_are_averaged() -> None:
    loss = StepLoss(2, 1, CPU)
    # (3 + 5) / 2 = 4, and backward begins with halves
    assert [loss.add(WeightedLoss(torch.tensor(value))).item() for value in (3.0, 5.0)] == [1.5, 2.5]
    assert loss.reduce() == (4.0, 1.0) and loss.is_mean


def test_sums_are_divided_by_all_weights() -> None:
    loss = StepLoss(2, 1, CPU)
    for total, weight in ((6.0, 1.0), (4.0, 4.0)):
        assert loss.add(WeightedLoss(torch.tensor(total), torch.tensor(weight))).item() == total
    # (6 + 4) / (1 + 4) = 2; gradients of sums are divided by 5
    assert loss.reduce() == (2.0, 1 / 5) and not loss.is_mean


def test_a_rank_without_the_last_stage_adds_nothing() -> None:
    assert StepLoss(2, 1, CPU).reduce() == (0.0, 1.0)


def test_a_rank_that_acts_alone_sends_no_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = []
    monkeypatch.setattr(dist, "all_reduce", sums.append)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with act_alone():
            StepLoss(1, 1, CPU).reduce()
        assert not sums
        StepLoss(1, 2, CPU).reduce()
        assert len(sums) == 1
    finally:
        dist.destroy_process_group()


def test_weights_of_nothing_are_refused() -> None:
    loss = StepLoss(1, 1, CPU)
    loss.add(WeightedLoss(torch.tensor(1.0), torch.tensor(0.0)))
    with pytest.raises(LossError, match="sum to more than 0, met 0"):
        loss.reduce()


@pytest.mark.parametrize(
    "outputs", [torch.tensor(2.0), {"loss": torch.tensor(2.0)}, (torch.tensor(2.0), torch.zeros(3), 1)]
)
def test_losses_are_found_in_outputs(outputs: object) -> None:
    assert read_loss(outputs, None, None).total.item() == 2


def test_a_loss_that_is_no_mean_is_refused() -> None:
    module = nn.Linear(1, 1)
    require_mean_over_samples(module, torch.arange(4.0)[:, None], lambda outputs, batch: outputs.mean())
    with pytest.raises(LossError, match="a loss is a mean over samples"):
        require_mean_over_samples(module, torch.arange(4.0)[:, None], lambda outputs, batch: outputs.sum())
