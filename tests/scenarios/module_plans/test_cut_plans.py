"""One plan for every number of ranks over which an operator can be cut."""

import pytest

torch = pytest.importorskip("torch")

from meshwise.executor.module_measures.first_batch import capture_loss  # noqa: E402
from meshwise.scenarios.module_plans.cut_plans import choose_cut_plans  # noqa: E402


def test_plans_are_for_numbers_that_divide_some_operator() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.ReLU(), torch.nn.Linear(6, 5))
    graph = capture_loss(module, torch.ones(4, 5), lambda outputs, batch: outputs.square().mean()).graph
    plans = choose_cut_plans(graph, 4, [2, 3, 4])
    sizes = {size for ((axis, size),) in plans if axis == "tensor"}
    assert sizes <= {2, 3, 4} and {2, 3} <= sizes
    assert all(plan.mesh.size(axis) == size for ((axis, size),), plan in plans.items())
    assert not choose_cut_plans(graph, 4, [1])


class Experts(torch.nn.Module):
    """Samples are sent to one of four experts each."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(8, 4)
        self.up, self.down = torch.nn.Parameter(torch.ones(4, 8, 16)), torch.nn.Parameter(torch.ones(4, 16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.gate(x).softmax(-1)
        every = torch.relu(x.unsqueeze(0) @ self.up) @ self.down
        return torch.einsum("ebd,be->bd", every, shares)


def test_experts_are_cut_where_a_module_has_some() -> None:
    def capture_words(module: torch.nn.Module) -> set[str]:
        graph = capture_loss(module, torch.ones(4, 8), lambda outputs, batch: outputs.square().mean()).graph
        return {axis for ((axis, _),) in choose_cut_plans(graph, 4, [2])}

    assert capture_words(Experts()) == {"tensor", "tensor_depth"}
    assert capture_words(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())) == {"tensor"}


def test_sequences_are_cut_where_samples_are_too_few() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    graph = capture_loss(module, torch.ones(2, 6, 8), lambda outputs, batch: outputs.square().mean()).graph
    axes = {batch: {axis for ((axis, size),) in choose_cut_plans(graph, batch, [4]) if size == 2} for batch in (2, 4)}
    assert axes == {2: {"tensor", "tensor_rows"}, 4: {"tensor"}}
