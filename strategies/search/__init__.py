"""Search: one driver, and one algorithm a file.

What is named here is imported when it is asked for: names of algorithms alone need none of them.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from strategies.search.registry import Registry

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

STAGE_ALGORITHMS = Registry(
    {"pipeline_dp": "PipelineDP", "layer_dp": "LayerDP", "inter_stage_milp": "InterStageMILP", "auto": "Auto"}
)
"""Algorithms that choose a layout whose stages may differ in their layers and in what they recompute."""

LAYOUT_ALGORITHMS = (
    Registry(
        {
            "best_first": "BestFirst",
            "exhaustive": "Exhaustive",
            "breadth_first": "BreadthFirst",
            "beam": "Beam",
            "mcmc": "MCMC",
            "mcts": "MCTS",
            "reinforcement": "Reinforcement",
            "random": "RandomSearch",
            "expert": "Expert",
            "bottleneck": "Bottleneck",
        }
    )
    | STAGE_ALGORITHMS
)
"""Algorithms that choose a layout of the whole network."""

OPERATOR_ALGORITHMS = Registry(
    {
        "frontier": "Frontier",
        "integer_programming": "IntegerProgramming",
        "dynamic_programming": "DynamicProgramming",
        "recursive_programming": "RecursiveProgramming",
        "sharding_propagation": "ShardingPropagation",
    }
)
"""Algorithms that choose a sharding for every operator."""

PINNED_ALGORITHMS = tuple(name for name in OPERATOR_ALGORITHMS if name != "recursive_programming")
"""Those that heed what the user has decided of single operators."""

ALGORITHMS = LAYOUT_ALGORITHMS | OPERATOR_ALGORITHMS
"""Every algorithm by name; the fields of each are its hyper-parameters."""


def installed() -> tuple[str, ...]:
    """Return the names of the algorithms whose packages are installed: ``reinforcement`` needs torch."""
    return tuple(name for name in ALGORITHMS if name != "reinforcement" or find_spec("torch") is not None)


_HOMES = {
    **{ALGORITHMS.class_name(name): name for name in ALGORITHMS},
    "Certificate": "certificate",
    "processes": "fan_out",
    **dict.fromkeys(("Space", "layouts", "neighbours"), "space"),
    **dict.fromkeys(("Journal", "OutOfTime", "Progress", "Proof", "Proposals", "SearchAlgorithm"), "driver"),
    **dict.fromkeys(("SearchResult", "Upcoming", "search"), "driver"),
}
"""The module of every name; an algorithm's has its name."""


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"strategies.search.{_HOMES[name]}"), name)


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
