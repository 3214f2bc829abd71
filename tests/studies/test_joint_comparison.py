"""The page of the joint search, and the networks that it is made with."""

import pytest

from meshwise.executor.capture.capture import capture
from meshwise.strategies.search.algorithms import ALGORITHMS
from meshwise.strategies.search.simulated_search import search

from .joint_comparison import NAMES, Found, build_page, capture_problem
from .joint_models import FACTORIES


def found(*times: float | None) -> dict[str, Found]:
    """Return what the three searches found: step times, ``None`` for no plan."""
    pairs = zip(NAMES, times, strict=True)
    return {
        name: Found(time, None if time is None else 2.0**30, f"plan of {name}", 0.25, 7.0, "finished")
        for name, time in pairs
    }


def test_the_page_counts_what_is_faster_than_the_better_of_both() -> None:
    # 1.2 against 1.0: 20 %; equal; 0.9 against 1.0: 10 % slower; nothing was found
    rows = {
        "a": found(1.2, 1.5, 1.0),
        "b": found(1.0, None, 1.0),
        "c": found(1.0, 0.9, 1.0),
        "d": found(1.0, 1.0, None),
    }
    page = build_page(rows, 30.0)
    assert "faster on 1 of 3 problems, slower on 1" in page
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in page.splitlines() if line.startswith("| ")}
    assert "+20.0 %" in lines["a"].replace("\\", "") and "-10.0 %" in lines["c"].replace("\\", "")
    assert "none" in lines["b"] and "25 %" in lines["a"] and "1 GiB" in lines["a"]


def test_few_evaluations_already_have_the_best_plan_of_operators_alone() -> None:
    problem = capture_problem("recommender")
    alone = search(ALGORITHMS["frontier"](), problem).best
    together = search(ALGORITHMS["joint"](), problem, budget=25).best
    assert alone is not None and together is not None
    assert together.evaluation.step_time <= alone.evaluation.step_time


@pytest.mark.parametrize("name", FACTORIES)
def test_a_network_is_captured_whole(name: str) -> None:
    module, inputs = FACTORIES[name][0]()
    graph = capture(module, inputs, name).graph
    module(*inputs).backward()
    used_parameters = [parameter for parameter in module.parameters() if parameter.grad is not None]
    assert graph.num_parameters == sum(parameter.numel() for parameter in used_parameters)
    assert len(graph.occurrences) > 4  # stages need blocks
