"""The search for placements of tables: it fits where nothing else does, and judges by simulation."""

from dataclasses import replace
from typing import Any

import pytest

from meshwise import load
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.algorithms.auto import Auto
from meshwise.strategies.search.algorithms.best_first import BestFirst
from meshwise.strategies.search.algorithms.tables import Tables
from meshwise.strategies.search.driver import SearchResult
from meshwise.strategies.search.proposals import NO_CERTIFICATE
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import Space
from meshwise.strategies.search.table_search import build_placement_problem, list_placements
from meshwise.strategies.tables.embeddings import parse_embeddings
from meshwise.strategies.tables.placement import MAX_NODES, place_greedily, place_tables
from meshwise.strategies.tables.table import list_tables

from ...problems import IDEAL, problem
from ...tables.recommender import recommender

LARGE = {"rows": (3_000_000, 2_000_000, 500_000), "popularity": 1.1}
"""Rows of 64 bytes: 352 MB in all, and 192 MB in the largest table."""


def on_memory(memory: float, **changes: Any) -> Problem:
    accelerator: Accelerator = replace(IDEAL, memory=memory)
    return recommender(accelerator=accelerator, **LARGE | changes)


def find_best(result: SearchResult) -> Any:
    assert result.best is not None
    return result.best.plan.embeddings


def test_tables_that_fit_no_device_are_cut() -> None:
    # replicas need 352 MB and more on each device, shares 90 MB
    result = search(Tables(), on_memory(150e6))
    assert find_best(result) and not find_best(result).uses_hosts
    assert result.best is not None and result.best.evaluation.peak_memory <= 150e6


def test_tables_that_fit_no_devices_go_to_hosts() -> None:
    result = search(Tables(), on_memory(60e6))
    assert find_best(result).uses_hosts
    assert search(BestFirst(), on_memory(60e6)).best is None


def test_recommenders_of_the_gallery_get_plans_that_fit() -> None:
    for name, needs_hosts in (("dlrm-dcnv2-tables-8-b300", False), ("dlrm-tables-8-h100", True)):
        scenario = load(f"gallery/models/{name}")
        graph, cluster = scenario.problem.graph, scenario.problem.cluster
        weight = sum(table.nbytes for table in list_tables(graph))
        assert (weight > cluster.num_devices * cluster.accelerator.memory) is needs_hosts
        result = search(Tables(nodes=50), scenario.problem)
        own = SimulatedCost(scenario.problem).evaluate(scenario.plan)
        assert find_best(result).uses_hosts is needs_hosts
        assert result.best is not None and result.best.evaluation.fits and own.fits
        assert result.best.evaluation.step_time < own.step_time


def test_nothing_fits_where_hosts_are_small_too() -> None:
    assert search(Tables(), on_memory(60e6, host_memory=1e8)).best is None


@pytest.mark.parametrize("memory", [60e6, 150e6, 1e12])
def test_the_default_search_is_no_worse_than_that_of_tables_and_of_uniform_plans(memory: float) -> None:
    whole = search(Auto(), on_memory(memory)).best
    others = [search(algorithm, on_memory(memory)).best for algorithm in (Tables(), BestFirst())]
    assert whole is not None
    assert all(whole.evaluation.step_time <= other.evaluation.step_time for other in others if other is not None)


def test_the_winner_is_the_fastest_simulated() -> None:
    small = on_memory(150e6)
    result = search(Tables(), small)
    costs = SimulatedCost(small)
    for words in ("table", "rows", "columns", {"default": "columns", "pipelined": True}):
        plan = complete(small, Layout(data=4, microbatch=8, embeddings=parse_embeddings(words)))
        evaluation = costs.evaluate(plan)
        assert result.best is not None
        assert not evaluation.fits or result.best.evaluation.step_time <= evaluation.step_time


def test_the_certificate_is_about_the_slowest_devices_tables() -> None:
    small, layout = on_memory(60e6), Layout(data=4, microbatch=8)
    costs, stage_costs = SimulatedCost(small), StageCosts(small)
    placement_problem = build_placement_problem(stage_costs, costs, layout)
    placed, greedy = place_tables(placement_problem, gap=0.0), place_greedily(placement_problem)
    assert placed is not None and greedy is not None
    certificates = dict(list_placements(stage_costs, costs, layout, 0.0, MAX_NODES))
    for item in (placed, greedy):
        embeddings = placement_problem.build_embeddings(item.choice)
        certificate = certificates[embeddings]
        assert certificate.subject == "slowest device's tables"
        assert certificate.gap == pytest.approx(item._replace(bound=placed.bound).gap, rel=1e-6, abs=1e-9)
        # the program knows nothing of steps that overlap
        assert certificates[replace(embeddings, pipelined=True)] == NO_CERTIFICATE


def test_a_certificate_is_that_of_the_best_plan() -> None:
    result = search(Tables(gap=0.0), on_memory(60e6))
    assert (result.certificate is None) is find_best(result).pipelined


def test_the_program_knows_the_room_to_the_byte() -> None:
    small = on_memory(60e6)
    layout = Layout(data=4, microbatch=8)
    placement_problem = build_placement_problem(StageCosts(small), SimulatedCost(small), layout)
    placed = place_tables(placement_problem)
    assert placed is not None
    embeddings = placement_problem.build_embeddings(placed.choice)
    costs = SimulatedCost(small)
    plan = complete(small, replace(layout, embeddings=embeddings))
    assert costs.fits(plan)
    device_bytes = float(placement_problem.add(placed.choice, "device_bytes").max())
    assert not any(placement.cut == "replicated" for _, placement in embeddings.tables)
    layers = 60e6 - placement_problem.device_room
    assert costs.peak_memory(plan) == pytest.approx(layers + device_bytes, abs=8)


def test_limits_of_the_space_hold() -> None:
    small = on_memory(150e6)
    assert search(Tables(), small, Space(tensor=(2,))).trials == ()
    assert {trial.plan.zero for trial in search(Tables(), small, Space(zero=(1,))).trials} == {1}
    sizes = {trial.plan.microbatch for trial in search(Tables(), small, Space(microbatch=(4,))).trials}
    assert sizes == {4}


def test_a_model_without_tables_is_searched_as_usual() -> None:
    small = problem(devices=2, layers=2, batch=4, tied=True)
    best, usual = search(Tables(), small).best, search(Auto(), small).best
    assert best is not None and usual is not None
    assert best.plan == usual.plan


@pytest.mark.parametrize(("options", "message"), [({"gap": 1.0}, "gap is at least 0"), ({"nodes": 0}, "nodes is at")])
def test_options_have_bounds(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tables(**options)
