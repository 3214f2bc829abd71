"""A clock of blocks notes each once, in the order of forward, with the bytes that its backward reads."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from meshwise.executor.module_measures.block_clock import BlockClock


class Squares(nn.Module):
    """Keeps its input, and its input's sine, each of 4 bytes an element."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x.sin().square()


def test_blocks_keep_what_backward_reads() -> None:
    module = nn.Sequential(Squares(), Squares(), Squares())
    clock = BlockClock(module, list(module)[::-1])
    x = torch.ones(8, 16, requires_grad=True)
    with clock.watch():
        module(x).sum().backward()
    assert clock.order == [2, 1, 0]
    results = {storage for storage, _ in clock.results.values()}
    for place in clock.order:
        sizes = [size for storage, (saver, size) in clock.saved.items() if saver == place and storage not in results]
        inputs = place == 2  # the first one also keeps the module's input, which is no block's result
        assert sum(sizes) == (2 + inputs) * x.numel() * 4  # its sine, and that squared
    assert clock.gradients[0] <= clock.gradients[1] <= clock.gradients[2]
    assert all(seconds > 0 for seconds in clock.forward)


def test_nothing_is_left_behind() -> None:
    module = nn.Sequential(Squares())
    clock = BlockClock(module, list(module))
    with clock.watch():
        module(torch.ones(2)).sum().backward()
    module(torch.ones(2))
    assert len(clock.order) == 1 and not module[0]._forward_hooks
    with clock.watch():
        pass
    assert not clock.order and not clock.saved
