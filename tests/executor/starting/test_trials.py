"""A module without values runs as one with them; what its loss is does not need the first ones where it adds up."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
import torch.nn.functional as F
from builders import LAYERS
from torch import Tensor, nn

from meshwise.executor.modules.losses import LossError, require_mean_over_samples
from meshwise.executor.starting.construction import DeferredModule, start_module
from meshwise.executor.starting.trials import PassingValues, TrialValues, WholeNeededError, try_forward

CPU = torch.device("cpu")
INPUTS: dict[str, Any] = {
    "table": torch.tensor([0, 2, 3]),
    "convolution": torch.ones(2, 3, 5, 5),
    "recurrent": torch.ones(4, 2, 3),
    "batch norm": torch.arange(6.0).view(2, 3),
    "copies": torch.ones(2, 3, 4),
    "weight norm": torch.ones(2, 3),
    "spectral norm": torch.ones(2, 3),
    "half": torch.ones(2, 3).bfloat16(),
}


class CountedValues:
    """Values that tell how often they were read, and the most bytes at a time."""

    def __init__(self, start: DeferredModule) -> None:
        self.values, self.names = start.values, list[str]()

    def read(self, name: str) -> Tensor:
        self.names.append(name)
        return self.values.read(name)


def defer(build: Callable[[], nn.Module]) -> DeferredModule:
    start = start_module(build, 3)
    assert isinstance(start, DeferredModule)
    return start


@pytest.mark.parametrize("name", INPUTS)
def test_a_forward_is_that_of_the_module_with_values(name: str) -> None:
    torch.manual_seed(0)
    start = defer(LAYERS[name])
    with PassingValues(start.module, start.values, CPU) as mode, torch.no_grad():
        found = start.module.eval()(INPUTS[name])
    assert mode.has_read and all(parameter.is_meta for parameter in start.module.parameters())
    expected = start.build().eval()(INPUTS[name])
    for one, other in zip(*(item if isinstance(item, tuple) else (item,) for item in (found, expected)), strict=True):
        if isinstance(one, Tensor):
            torch.testing.assert_close(one, other)  # a kernel may be another one with gradients


class Regression(nn.Module):
    """Its loss is a mean over samples, unless it compares them; and no number for weights that are not small."""

    def __init__(self, *, compares: bool = False, limit: float = 1e9) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.compares, self.limit = compares, limit
        nn.init.uniform_(self.last.weight, -1e-3, 1e-3)
        nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(torch.tanh(self.first(x))) * self.last.weight.new_ones(())
        if self.compares:
            return F.cross_entropy(y @ y.T * 1e3, torch.arange(len(y)))
        return (self.limit - self.last.weight.abs().max()).sqrt() * y.square().mean()


def check(module: nn.Module, values: Any) -> bool:
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    return try_forward(module, values, CPU, lambda: require_mean_over_samples(module, batch, None), bool)


def test_a_loss_that_adds_up_is_known_without_first_values() -> None:
    start = defer(Regression)
    values = CountedValues(start)
    assert check(start.module, values) and not values.names


def test_first_values_decide_where_others_make_no_number() -> None:
    start = defer(lambda: Regression(limit=0.01))
    values = CountedValues(start)
    assert check(start.module, values) and set(values.names) == dict(start.module.named_parameters()).keys()


def test_a_loss_that_does_not_add_up_is_refused_with_the_words_of_the_whole_module() -> None:
    start = defer(lambda: Regression(compares=True))
    with pytest.raises(LossError) as found:
        check(start.module, start.values)
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    with pytest.raises(LossError) as expected:
        require_mean_over_samples(start.build(), batch, None)
    assert str(found.value) == str(expected.value)


def test_what_runs_with_all_values_alone_is_told() -> None:
    start = defer(Regression)

    def run() -> None:
        raise RuntimeError("of the program")

    with pytest.raises(WholeNeededError, match="of the program"):
        try_forward(start.module, start.values, CPU, run)


def test_trial_values_keep_sizes_and_differ() -> None:
    with torch.device("meta"):
        module = nn.ModuleList([nn.Linear(2000, 900), nn.Linear(2000, 900), nn.LayerNorm(7)])
    values = TrialValues(module, CPU)
    tables = [values.read(f"{place}.weight") for place in range(2)]
    assert [tuple(table.shape) for table in tables] == [(900, 2000)] * 2
    assert not torch.equal(*tables) and int(torch.linalg.matrix_rank(tables[0])) == 900
    x = torch.randn(64, 2000, generator=torch.Generator().manual_seed(0))
    assert 0.9 < float((x @ tables[0].T).std()) < 1.1
    assert torch.equal(tables[0], values.read("0.weight"))
    assert float((values.read("2.weight") - 1).abs().max()) < 0.6


def test_few_bytes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwise.executor.starting.trials.LEAST_KEPT", 0)
    start = defer(lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))))
    mode = PassingValues(start.module, start.values, CPU)
    with mode, torch.no_grad():
        start.module(torch.ones(1, 8))
    assert sum(item.nbytes for item in mode._kept.values()) <= 8 * 8 * 4
