"""A rank has its part of parameters and of what backward keeps: all of it without cuts, less with them."""

import pytest

torch = pytest.importorskip("torch")

from meshwise.executor.module_measures.first_batch import capture_graph  # noqa: E402
from meshwise.scenarios.inputs.operator_cuts import choose_cuts  # noqa: E402
from meshwise.scenarios.module_plans.cut_graphs import count_saved, find_state_fraction  # noqa: E402


def test_a_rank_has_less_of_a_module_whose_operators_are_cut() -> None:
    layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)]
    module = torch.nn.Sequential(*layers)
    graph = capture_graph(module, torch.ones(4, 64), lambda outputs, batch: outputs.square().mean())
    plan = choose_cuts(graph, data=1, tensor=2, samples=4, num_microbatches=1)
    assert 0.5 <= find_state_fraction(graph, plan) < 0.6
    assert count_saved(graph, plan) <= count_saved(graph, None)
