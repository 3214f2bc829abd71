"""A rank has its part of parameters and of what backward keeps: all of it without cuts, less with them."""

import pytest

torch = pytest.importorskip("torch")

from meshwise.executor.module_measures.first_batch import capture_loss  # noqa: E402
from meshwise.scenarios.inputs.operator_cuts import choose_cuts  # noqa: E402
from meshwise.scenarios.module_plans.cut_graphs import count_saved, find_state_fraction, share_times  # noqa: E402
from meshwise.simulator.operator_graph import (  # noqa: E402
    Block,
    MeasuredTime,
    Operator,
    OperatorGraph,
    OperatorKind,
)


def test_a_rank_has_less_of_a_module_whose_operators_are_cut() -> None:
    layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)]
    module = torch.nn.Sequential(*layers)
    graph = capture_loss(module, torch.ones(4, 64), lambda outputs, batch: outputs.square().mean()).graph
    plan = choose_cuts(graph, data=1, tensor=2, samples=4, num_microbatches=1)
    assert 0.5 <= find_state_fraction(graph, plan) < 0.6
    assert count_saved(graph, plan) <= count_saved(graph, None)


def test_operators_together_take_measured_passes() -> None:
    times = (MeasuredTime((1.0, 0.5), (2.0, 1.0)), MeasuredTime((0.0, 0.5), (1.0, 0.0)))
    operators = tuple(
        Operator(f"operator{number}", OperatorKind.ELEMENTWISE, (), (), (), measured=measured)
        for number, measured in enumerate(times)
    )
    graph = OperatorGraph("module", (Block("block", operators, (), (), (), repeat=2),), 1)
    shared = share_times(graph, (6.0, 12.0), (2, 8))

    def add(samples: int) -> float:
        lines = (
            line
            for operator in shared.blocks[0].operators
            if operator.measured is not None
            for line in (operator.measured.forward, operator.measured.backward)
        )
        return 2 * sum(fixed + slope * samples for fixed, slope in lines)

    assert add(8) == pytest.approx(12.0)
    assert 6.0 <= add(2) < 6.5  # but for what takes as long for any number of samples
