"""Meshes whose stages are divided anew: that of the best plan and near ones, the most promising first."""

from dataclasses import replace

from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.search.algorithms.auto import MOST_MESHES, list_nearby_meshes
from meshwise.strategies.search.space import Space, layouts, neighbours

from ...problems import problem

SMALL, SPACE = problem(layers=4, batch=8, devices=4), Space(core=True, zero=(0, 1), tensor=(1, 2))


def test_meshes_recompute_nothing_are_near_and_come_by_their_bounds() -> None:
    costs = SimulatedCost(SMALL)
    for layout in list(layouts(SMALL, SPACE))[::5]:
        found = list_nearby_meshes(SMALL, SPACE, costs, layout)
        assert 0 < len(found) <= MOST_MESHES and len(set(found)) == len(found)
        near = {replace(each, recompute=Recompute.NONE) for each in (layout, *neighbours(SMALL, SPACE, layout))}
        assert set(found) <= near
        bounds = [costs.plan_bound(complete(SMALL, mesh)) for mesh in found]
        assert bounds == sorted(bounds)
        if len(found) < MOST_MESHES:
            assert set(found) == near


def test_schedules_whose_critical_paths_are_not_known_are_left_out() -> None:
    costs = SimulatedCost(SMALL)
    layout = Layout(data=2, pipeline=2, schedule="1f1b")
    space = replace(SPACE, schedule=("1f1b", "naive", "zbv"))
    walked = {mesh.schedule for mesh in list_nearby_meshes(SMALL, space, costs, layout)}
    assert "1f1b" in walked and "zbv" not in walked
