"""Search: one driver, and one algorithm a file.

What is named here is imported when it is asked for: names of algorithms alone need none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from strategies.search.algorithms import (
    ALGORITHMS,
    LAYOUT_ALGORITHMS,
    OPERATOR_ALGORITHMS,
    PINNED_ALGORITHMS,
    STAGE_ALGORITHMS,
    installed,
)

if TYPE_CHECKING:
    from strategies.search.auto import Auto
    from strategies.search.beam import Beam
    from strategies.search.best_first import BestFirst
    from strategies.search.bottleneck import Bottleneck
    from strategies.search.breadth_first import BreadthFirst
    from strategies.search.certificate import Certificate
    from strategies.search.driver import (
        Journal,
        OutOfTime,
        Progress,
        Proof,
        Proposals,
        SearchAlgorithm,
        SearchResult,
        Upcoming,
        search,
    )
    from strategies.search.dynamic_programming import DynamicProgramming
    from strategies.search.exhaustive import Exhaustive
    from strategies.search.expert import Expert
    from strategies.search.fan_out import processes
    from strategies.search.frontier import Frontier
    from strategies.search.integer_programming import IntegerProgramming
    from strategies.search.inter_stage_milp import InterStageMILP
    from strategies.search.layer_dp import LayerDP
    from strategies.search.mcmc import MCMC
    from strategies.search.mcts import MCTS
    from strategies.search.pipeline_dp import PipelineDP
    from strategies.search.random import RandomSearch
    from strategies.search.recursive_programming import RecursiveProgramming
    from strategies.search.reinforcement import Reinforcement
    from strategies.search.sharding_propagation import ShardingPropagation
    from strategies.search.space import Space, layouts, neighbours

_HOMES = {
    **{kind: module for module, _, kind in (ALGORITHMS.place(name).rpartition(".") for name in ALGORITHMS)},
    "Certificate": "strategies.search.certificate",
    "processes": "strategies.search.fan_out",
    **dict.fromkeys(("Space", "layouts", "neighbours"), "strategies.search.space"),
    **dict.fromkeys(("Journal", "OutOfTime", "Progress", "Proof", "Proposals"), "strategies.search.driver"),
    **dict.fromkeys(("SearchAlgorithm", "SearchResult", "Upcoming", "search"), "strategies.search.driver"),
}
"""The module of every name that is imported when it is asked for."""


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


__all__ = [
    "ALGORITHMS",
    "LAYOUT_ALGORITHMS",
    "MCMC",
    "MCTS",
    "OPERATOR_ALGORITHMS",
    "PINNED_ALGORITHMS",
    "STAGE_ALGORITHMS",
    "Auto",
    "Beam",
    "BestFirst",
    "Bottleneck",
    "BreadthFirst",
    "Certificate",
    "DynamicProgramming",
    "Exhaustive",
    "Expert",
    "Frontier",
    "IntegerProgramming",
    "InterStageMILP",
    "Journal",
    "LayerDP",
    "OutOfTime",
    "PipelineDP",
    "Progress",
    "Proof",
    "Proposals",
    "RandomSearch",
    "RecursiveProgramming",
    "Reinforcement",
    "SearchAlgorithm",
    "SearchResult",
    "ShardingPropagation",
    "Space",
    "Upcoming",
    "installed",
    "layouts",
    "neighbours",
    "processes",
    "search",
]
