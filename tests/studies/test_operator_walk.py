"""The page that walks an MLP through operator parallelism is what the program writes, and says what is true."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from meshwise.simulator.units import to_ticks
from meshwise.strategies.operators.cost_graph import Solution

from ..strategies.operators.brute_force import brute_force
from .operator_walk import PAGE, PICTURE, Walk, write_walk

ROOT = Path(__file__).parents[2]
COMMAND = "run `python -m tests.studies.operator_walk docs`"


@pytest.fixture(scope="module")
def walk() -> Walk:
    return Walk()


def test_the_page_and_its_picture_are_what_the_command_writes(walk: Walk, tmp_path: Path) -> None:
    write_walk(walk, tmp_path)
    assert (tmp_path / PAGE).read_text("utf-8") == (ROOT / "docs" / PAGE).read_text("utf-8"), COMMAND
    drawn, kept = (imread(folder / PICTURE) for folder in (tmp_path, ROOT / "docs"))
    assert np.array_equal(drawn, kept), COMMAND


def test_the_sum_of_costs_is_the_simulated_step_and_brute_forces(walk: Walk) -> None:
    # nothing is shared and no gradient is summed: they differ by less than a tick an operator, for the update is one
    best = brute_force(walk.costs.graph, walk.costs.limit)
    assert isinstance(best, Solution)
    step = walk.scenario.simulate(walk.plan).step_time
    assert abs(to_ticks(step) - best.time) < len(walk.costs.nodes)


def test_no_gradient_of_data_is_summed(walk: Walk) -> None:
    # x is an input of the module: up, cut along its outputs, leaves a part of x's gradient that nobody reads
    moved = [s.operators for s in walk.scenario.simulate(walk.plan).timeline.spans if "communication" in s.kind.value]
    assert moved == ["down: all_reduce down"]
