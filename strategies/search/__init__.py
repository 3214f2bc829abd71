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
    from strategies.search.algorithms.auto import Auto
    from strategies.search.algorithms.beam import Beam
    from strategies.search.algorithms.best_first import BestFirst
    from strategies.search.algorithms.bottleneck import Bottleneck
    from strategies.search.algorithms.exhaustive import BreadthFirst, Exhaustive
    from strategies.search.algorithms.expert import Expert
    from strategies.search.algorithms.mcmc import MCMC
    from strategies.search.algorithms.mcts import MCTS
    from strategies.search.algorithms.operators import (
        DynamicProgramming,
        Frontier,
        IntegerProgramming,
        RecursiveProgramming,
        ShardingPropagation,
    )
    from strategies.search.algorithms.random import RandomSearch
    from strategies.search.algorithms.reinforcement import Reinforcement
    from strategies.search.algorithms.stages import InterStageMILP, LayerDP, PipelineDP
    from strategies.search.driver import (
        Certificate,
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
    from strategies.search.fan_out import processes
    from strategies.search.space import Space, layouts, neighbours

_HOMES = {
    **{kind: module for module, _, kind in (ALGORITHMS.place(name).rpartition(".") for name in ALGORITHMS)},
    "Certificate": "strategies.search.driver",
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
