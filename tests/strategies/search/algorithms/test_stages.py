"""Searches among divisions of layers and recomputation per stage, against all divisions and against uniform plans."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from meshwise.strategies.bounds.memory import PlanMemory
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import FirstLayers, Recompute
from meshwise.strategies.search.algorithms import ALGORITHMS
from meshwise.strategies.search.algorithms.best_first import BestFirst
from meshwise.strategies.search.algorithms.stages import InterStageMILP, LayerDP, PipelineDP
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import Space, layouts
from meshwise.strategies.search.stage_search import divide_layout, list_meshes, recompute_layers

from ...problems import problem

LAYERS = 5
SPACE = Space(schedule=("1f1b",), microbatch=(64,), recompute=(Recompute.NONE, Recompute.FULL))


def slow_and_full(counts: tuple[int, int] = (4, 1), again: int = 3) -> Problem:
    """Return a problem on two devices, one of half the speed, with room for a division that recomputes some layers."""
    found = problem(devices=2, batch=512, layers=LAYERS)
    mesh = next(each for each in list_meshes(found, SPACE) if each.pipeline == 2)
    hows = (FirstLayers(Recompute.FULL, again), Recompute.NONE)
    most = PlanMemory(StageCosts(found)).peak(complete(found, divide_layout(mesh, counts, hows)))
    (node, count), *rest = found.cluster.nodes
    small = replace(node, accelerator=replace(node.accelerator, memory=float(most)))
    return replace(found, cluster=replace(found.cluster, nodes=((small, count), *rest), speeds=((1, 0.5),)))


def least(found: Problem) -> float:
    """Return the least step time of all divisions of all meshes, with the first layers of stages recomputed."""
    costs, best = SimulatedCost(found), float("inf")
    for mesh in list_meshes(found, SPACE):
        for counts in product(range(1, LAYERS + 1), repeat=mesh.pipeline):
            if sum(counts) == LAYERS:
                for again in product(*(range(count + 1) for count in counts)):
                    hows = [recompute_layers(Recompute.FULL, n, count) for n, count in zip(again, counts, strict=True)]
                    plan = complete(found, divide_layout(mesh, counts, hows))
                    if costs.fits(plan):
                        best = min(best, costs.evaluate(plan).step_time)
    return best


@pytest.mark.parametrize("algorithm", [InterStageMILP(tolerance=1e-4), ALGORITHMS["auto"]()])
def test_what_is_proven_holds_for_every_division_and_the_best_is_near(algorithm: Any) -> None:
    small = slow_and_full()
    result, optimum = search(algorithm, small, SPACE), least(small)
    assert result.best is not None
    assert result.lower_bound is not None
    if algorithm.name != "auto":  # which proves what its uniform plans take, and may find faster ones beside them
        assert result.lower_bound <= optimum * (1 + 1e-9)
    assert optimum <= result.best.evaluation.step_time <= optimum * 1.02


def test_on_unequal_devices_the_division_beats_every_uniform_plan() -> None:
    small = slow_and_full()
    uniform, each = search(BestFirst(), small, SPACE), search(InterStageMILP(), small, SPACE)
    assert uniform.best is not None and each.best is not None
    assert each.best.evaluation.step_time < 0.95 * uniform.best.evaluation.step_time
    assert len(each.best.plan.stages[0].blocks) > len(each.best.plan.stages[1].blocks)


@pytest.mark.parametrize("method", ["alpa", "dapple", "piper"])
def test_stages_recompute_no_more_than_they_must(method: str) -> None:
    small = slow_and_full()
    costs = SimulatedCost(small)
    result = search(PipelineDP(method=method), small, SPACE)
    assert result.best is not None
    optimum = least(small)
    assert optimum <= result.best.evaluation.step_time <= 1.1 * optimum
    assert all(costs.fits(trial.plan) for trial in result.trials)


def test_faithful_pipedream_knows_no_memory() -> None:
    # what it chooses keeps all activations and does not fit, so that only the uniform plan is left
    small = slow_and_full()
    faithful, corrected = (search(PipelineDP("pipedream", faithful=each), small, SPACE) for each in (True, False))
    assert faithful.best is not None and corrected.best is not None
    assert faithful.evaluations == 1
    assert corrected.best.evaluation.step_time < faithful.best.evaluation.step_time


@pytest.mark.parametrize("faithful", [False, True])
def test_layers_are_recomputed_only_as_far_as_memory_asks(faithful: bool) -> None:
    # 3 and 2 layers a stage: there is room if one of the first stage's is recomputed; uniform plans recompute all
    small, space = slow_and_full((3, 2), 1), replace(SPACE, pipeline=(2,))
    result = search(LayerDP(faithful=faithful), small, space)
    assert result.best is not None
    hows = (FirstLayers(Recompute.FULL, 1), Recompute.NONE)
    wanted = complete(small, divide_layout(next(list_meshes(small, space)), (3, 2), hows))
    assert (result.best.plan == wanted) == (not faithful)  # the grid of a megabyte sees too little room
    costs = SimulatedCost(small)
    uniform = [costs.evaluate(complete(small, each)).step_time for each in layouts(small, space)]
    assert result.best.evaluation.step_time <= min(uniform)


def test_mist_as_published_divides_too_but_proves_nothing() -> None:
    small = slow_and_full()
    result = search(InterStageMILP(faithful=True), small, SPACE)
    assert result.best is not None
    assert result.lower_bound is None
    assert result.best.evaluation.step_time <= 1.1 * least(small)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (PipelineDP, {"method": "alpha"}, "method is one of alpa, dapple, piper, pipedream, met alpha"),
        (PipelineDP, {"choices": 0}, "choices is at least 1"),
        (LayerDP, {"choices": 0}, "choices is at least 1, met 0; nearest: 1"),
        (InterStageMILP, {"nodes": 0}, "nodes and choices 1"),
    ],
)
def test_nonsense_is_refused(kind: type, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**fields)
