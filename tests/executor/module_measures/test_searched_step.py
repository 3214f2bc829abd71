"""A layout is searched for at the first batch, and the steps are those of a plain loop."""

import copy

import pytest

torch = pytest.importorskip("torch")

from meshwise.executor.module_measures.searched_step import SearchedStep  # noqa: E402
from meshwise.scenarios.module_plans.own_loop import LiveSearch  # noqa: E402


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, values: "torch.Tensor") -> "torch.Tensor":
        for layer in self.layers:
            values = layer(values).tanh()
        return values.square().mean()


def test_steps_are_those_of_a_plain_loop_and_draws_are_kept() -> None:
    module = Network()
    plain = copy.deepcopy(module).double()
    optimizer = torch.optim.AdamW(plain.parameters())
    own_optimizer = torch.optim.AdamW(module.parameters())
    step = SearchedStep(module, LiveSearch(), 0.2, optimizer=own_optimizer, precision="fp64")
    with pytest.raises(ValueError, match="nearest: after one step"):
        _ = step.layout
    batch, draws = torch.randn(4, 4, dtype=torch.float64), torch.get_rng_state()
    for _ in range(3):
        loss = plain(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert step.global_batch(batch) == pytest.approx(loss.item(), rel=1e-12)
    assert torch.equal(draws, torch.get_rng_state())
    assert step.layout.num_ranks == 1 and step.prediction.step_time > 0
