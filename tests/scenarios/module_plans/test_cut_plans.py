"""One plan for every number of ranks over which an operator can be cut."""

import pytest

torch = pytest.importorskip("torch")

from meshwise.executor.module_measures.first_batch import capture_loss  # noqa: E402
from meshwise.scenarios.module_plans.cut_plans import choose_cut_plans  # noqa: E402


def test_plans_are_for_numbers_that_divide_some_operator() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.ReLU(), torch.nn.Linear(6, 5))
    graph = capture_loss(module, torch.ones(4, 5), lambda outputs, batch: outputs.square().mean()).graph
    plans = choose_cut_plans(graph, 4, [2, 3, 4])
    assert set(plans) <= {2, 3, 4} and {2, 3} <= set(plans)
    assert all(plan.mesh.size("tensor") == tensor for tensor, plan in plans.items())
    assert not choose_cut_plans(graph, 4, [1])
