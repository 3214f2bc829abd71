"""Blocks are the members of lists of equal modules, and computing them again changes nothing."""

from collections import Counter
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwise.executor.modules.blocks import RecomputeError, list_blocks, recompute_blocks
from meshwise.strategies.plan.recomputation import Recompute, parse_words


class CountRuns(TorchDispatchMode):
    """Counts the runs of every operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(function.overloadpacket)] += 1
        return function(*args, **(kwargs or {}))


def make_layer() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh())


def test_blocks_are_members_of_lists_in_order() -> None:
    module = nn.ModuleDict({"head": nn.Linear(3, 3), "layers": nn.ModuleList(make_layer() for _ in range(3))})
    assert list_blocks(module) == list(module["layers"])
    assert list_blocks(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))) == []  # operators of a chain
    stages = nn.ModuleList(nn.ModuleList(make_layer() for _ in range(2)) for _ in range(2))
    assert len(list_blocks(stages)) == 4


@pytest.mark.parametrize(
    ("words", "number", "runs"),
    # of forward and backward together: 3 blocks with a product and an activation each
    [("none", 0, (3, 3)), ("full", 3, (6, 6)), ("1", 1, (4, 4)), ("selective", 3, (3, 6)), ("selective:2", 2, (3, 5))],
)
def test_blocks_that_are_computed_again_have_equal_gradients_and_statistics(
    words: str, number: int, runs: tuple[int, int]
) -> None:
    results = []
    for choice in (Recompute.NONE, parse_words(words)):
        torch.manual_seed(0)
        module = nn.Sequential(*(make_layer() for _ in range(3)))
        count = recompute_blocks(module, choice)
        with CountRuns() as calls:
            module(torch.randn(4, 3, generator=torch.Generator().manual_seed(1))).square().mean().backward()
        gradients = [parameter.grad for parameter in module.parameters()]
        results.append([*gradients, *module.buffers()])
    assert all(map(torch.equal, *results))
    assert count == number
    assert (calls.counts["aten.addmm"], calls.counts["aten.tanh"]) == runs


def test_what_is_kept_is_not_changed_in_place() -> None:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)) for _ in range(2)))
    recompute_blocks(module, Recompute.SELECTIVE)
    with pytest.raises(RecomputeError, match="nothing is changed in place, met one that is; nearest: full"):
        module(torch.ones(2, 3)).sum().backward()


@pytest.mark.parametrize(
    ("module", "words", "text"),
    [
        (nn.Sequential(*(make_layer() for _ in range(3))), "4", "at most 3 blocks, met 4; nearest: 3"),
        (nn.Linear(3, 3), "full", "equal modules in a list, met none of them; nearest: none"),
    ],
)
def test_more_blocks_than_there_are_is_refused(module: nn.Module, words: str, text: str) -> None:
    with pytest.raises(RecomputeError, match=text):
        recompute_blocks(module, parse_words(words))


class Counting(nn.Module):
    """Counts its forwards in place, and averages in a buffer that is made anew."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.tanh(self.linear(x))
        self.count += 1
        self.average = 0.5 * self.average + 0.5 * y.detach().mean(0)
        return y


@pytest.mark.parametrize("choice", [Recompute.FULL, Recompute.SELECTIVE])
def test_buffers_of_a_block_that_is_computed_again_are_renewed_once(choice: Recompute) -> None:
    averages = []
    for again in (Recompute.NONE, choice):
        torch.manual_seed(0)
        module = nn.Sequential(Counting(), Counting())
        recompute_blocks(module, again)
        for _ in range(3):
            module(torch.ones(2, 3)).sum().backward()
        assert [part.count.item() for part in module] == [3, 3]
        averages.append([part.average for part in module])
    assert all(map(torch.equal, *averages))
