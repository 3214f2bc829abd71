"""Suggested plans: legal, new, and each of use."""

import numpy as np
import pytest

from meshwise.scenarios.files.checking import check_table
from meshwise.scenarios.files.reader import dump_yaml, parse_document
from meshwise.scenarios.inputs.plan_table import build_layout, list_rule_violations
from meshwise.scenarios.machine_fit.posterior import load_prior
from meshwise.scenarios.machine_fit.run_fit import fit_runs
from meshwise.scenarios.machine_fit.suggestion import describe_layout, suggest_plans
from meshwise.scenarios.schema.plan import PlanTable
from meshwise.simulator.machine.factors import Factors
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.recomputation import FirstLayers, Recompute

from .small_runs import RUNS, measure


@pytest.fixture(scope="module")
def fitted():
    return fit_runs([measure(row, Factors(other=1.2)) for row in RUNS[:2]], load_prior(), "2026-11-28")


def read(plan) -> Layout:
    """Return the layout of a suggestion, read as the ``plan`` of a scenario file."""
    table, faults = check_table(PlanTable, parse_document(dump_yaml(plan).encode(), "plan.yaml"))
    assert table is not None and not faults, faults
    return build_layout(table)


def test_suggested_plans_are_legal_and_none_was_measured(fitted) -> None:
    suggestions = suggest_plans(fitted.used_runs, fitted.posterior, 4)
    assert len(suggestions) == 4
    problem = fitted.used_runs[0].scenario.problem
    measured = [run.scenario.choose_plan() for run in fitted.used_runs]
    layouts = [read(suggestion.plan) for suggestion in suggestions]
    assert len(set(layouts)) == 4
    for layout in layouts:
        assert not list_rule_violations(problem, layout)
        assert complete(problem, layout) not in measured


def test_every_further_plan_narrows_and_the_first_ones_stay(fitted) -> None:
    few, many = (suggest_plans(fitted.used_runs, fitted.posterior, count) for count in (2, 5))
    widths = [suggestion.width for suggestion in many]
    assert widths[0] < 1 and widths == sorted(widths, reverse=True)
    assert many[:2] == few
    # no plan tells what the residual of each step is
    least = fitted.posterior.residual / np.hypot(fitted.posterior.residual, fitted.posterior.deviations.sum())
    assert widths[-1] > least


def test_a_layout_is_written_in_the_words_of_a_scenario() -> None:
    layout = Layout(data=2, tensor=4, recompute=FirstLayers(Recompute.FULL, 3), sequence_parallel=True, microbatch=2)
    assert describe_layout(layout) == {
        "data": 2, "tensor": 4, "pipeline": 1, "microbatch": 2, "sequence_parallel": True, "recompute": {"full": 3}
    }  # fmt: skip
    assert read(describe_layout(layout)) == layout
