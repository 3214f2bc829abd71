"""Searches of tables: what may share none, what is proven, and limits of the space."""

from dataclasses import replace

from meshwise.scenarios.loader import load
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.search.algorithms.auto import Auto
from meshwise.strategies.search.algorithms.tables import Tables
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import Space
from meshwise.strategies.tables.embeddings import parse_embeddings


def load_recommender() -> Problem:
    return load("gallery/models/dlrm-tables-8-h100").problem


def test_a_model_with_experts_shares_no_tables() -> None:
    problem = load("gallery/models/mixtral-8x7b-64-h100").problem
    layout = Layout(data=64, microbatch=1, zero=3, embeddings=parse_embeddings("rows"))
    assert "embeddings" in {violation.field for violation in violations(problem, layout)}


def test_nothing_is_proven_of_the_time_where_tables_are_shared() -> None:
    result = search(Auto(), load_recommender(), Space(microbatch=(4096,)), budget=12)
    assert result.best is not None and result.best.plan.embeddings
    assert result.gap is None and result.lower_bound is None


def test_frozen_tables_are_not_shared() -> None:
    problem = load_recommender()
    frozen = replace(problem, training=replace(problem.training, frozen=True))
    result = search(Tables(), frozen, budget=3)
    assert result.best is None and not result.trials


def test_limits_of_the_space_hold() -> None:
    assert not search(Tables(), load_recommender(), Space(overlap_gradients=(False,)), budget=3).trials


def test_an_order_of_axes_has_the_one_along_which_ranks_share_tables() -> None:
    layout = Layout(data=8, microbatch=4096, order=("tensor", "data", "pipeline"), embeddings=parse_embeddings("rows"))
    assert [violation.field for violation in violations(load_recommender(), layout)] == ["order"]
