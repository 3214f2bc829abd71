"""Search: one driver, and one file per algorithm.

Names are imported on first use: whoever needs only the names of algorithms imports none of their modules.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from meshwise.strategies.search.algorithms import (
    ALGORITHMS,
    LAYOUT_ALGORITHMS,
    OPERATOR_ALGORITHMS,
    PINNED_ALGORITHMS,
    STAGE_ALGORITHMS,
    list_installed,
)

if TYPE_CHECKING:
    from meshwise.strategies.search.algorithms.auto import Auto
    from meshwise.strategies.search.algorithms.beam import Beam
    from meshwise.strategies.search.algorithms.best_first import BestFirst
    from meshwise.strategies.search.algorithms.bottleneck import Bottleneck
    from meshwise.strategies.search.algorithms.exhaustive import BreadthFirst, Exhaustive
    from meshwise.strategies.search.algorithms.expert import Expert
    from meshwise.strategies.search.algorithms.mcmc import MCMC
    from meshwise.strategies.search.algorithms.mcts import MCTS
    from meshwise.strategies.search.algorithms.operators import (
        DynamicProgramming,
        Frontier,
        IntegerProgramming,
        RecursiveProgramming,
        ShardingPropagation,
    )
    from meshwise.strategies.search.algorithms.random import RandomSearch
    from meshwise.strategies.search.algorithms.reinforcement import Reinforcement
    from meshwise.strategies.search.algorithms.stages import InterStageMILP, LayerDP, PipelineDP
    from meshwise.strategies.search.driver import (
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
    from meshwise.strategies.search.fan_out import processes
    from meshwise.strategies.search.space import Space, layouts, neighbours

_HOMES = {
    **{kind: module for module, _, kind in (ALGORITHMS.find_place(name).rpartition(".") for name in ALGORITHMS)},
    "Certificate": "meshwise.strategies.search.driver",
    "processes": "meshwise.strategies.search.fan_out",
    **dict.fromkeys(("Space", "layouts", "neighbours"), "meshwise.strategies.search.space"),
    **dict.fromkeys(("Journal", "OutOfTime", "Progress", "Proof", "Proposals"), "meshwise.strategies.search.driver"),
    **dict.fromkeys(("SearchAlgorithm", "SearchResult", "Upcoming", "search"), "meshwise.strategies.search.driver"),
}
"""The module of every name that is imported on first use."""


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(import_module(_HOMES[name]), name)
    return globals()[name]


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
    "layouts",
    "list_installed",
    "neighbours",
    "processes",
    "search",
]
