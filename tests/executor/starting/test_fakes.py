"""A copy without values runs forward and backward, and raises where values are needed."""

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

from meshwise.executor.starting.fakes import copy_without_values, make_fake_mode


def test_a_copy_runs_without_values() -> None:
    module, mode = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to("meta"), make_fake_mode()
    copy = copy_without_values(module, mode, torch.device("cpu"))
    with mode:
        loss = copy(torch.ones(5, 3)).sum()
        loss.backward()
        assert copy[0].weight.grad.shape == (4, 3) and str(copy[0].weight.device) == "cpu"
        with pytest.raises(Exception, match="_local_scalar_dense"):
            bool(loss > 0)
    assert module[0].weight.is_meta and module[0].weight.grad is None
