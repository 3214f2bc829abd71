"""Search: one driver, and one algorithm a file."""

from strategies.search.best_first import BestFirst
from strategies.search.driver import OutOfTime, Progress, Proof, Proposals, SearchAlgorithm, SearchResult, search
from strategies.search.dynamic_programming import DynamicProgramming
from strategies.search.exhaustive import Exhaustive
from strategies.search.frontier import Frontier
from strategies.search.integer_programming import IntegerProgramming
from strategies.search.mcmc import MCMC
from strategies.search.recursive_programming import RecursiveProgramming
from strategies.search.sharding_propagation import ShardingPropagation
from strategies.search.space import Space, layouts, neighbours

LAYOUT_ALGORITHMS: dict[str, type[BestFirst] | type[Exhaustive] | type[MCMC]] = {
    "best_first": BestFirst,
    "exhaustive": Exhaustive,
    "mcmc": MCMC,
}
"""Algorithms that choose a layout of the whole network."""

OPERATOR_ALGORITHMS: dict[
    str,
    type[Frontier]
    | type[IntegerProgramming]
    | type[DynamicProgramming]
    | type[RecursiveProgramming]
    | type[ShardingPropagation],
] = {
    "frontier": Frontier,
    "integer_programming": IntegerProgramming,
    "dynamic_programming": DynamicProgramming,
    "recursive_programming": RecursiveProgramming,
    "sharding_propagation": ShardingPropagation,
}
"""Algorithms that choose a sharding for every operator."""

PINNED_ALGORITHMS = tuple(name for name in OPERATOR_ALGORITHMS if name != "recursive_programming")
"""Those that heed what the user has decided of single operators."""

ALGORITHMS = LAYOUT_ALGORITHMS | OPERATOR_ALGORITHMS
"""Every algorithm by name; the fields of each are its hyper-parameters."""

__all__ = [
    "ALGORITHMS",
    "LAYOUT_ALGORITHMS",
    "MCMC",
    "OPERATOR_ALGORITHMS",
    "PINNED_ALGORITHMS",
    "BestFirst",
    "DynamicProgramming",
    "Exhaustive",
    "Frontier",
    "IntegerProgramming",
    "OutOfTime",
    "Progress",
    "Proof",
    "Proposals",
    "RecursiveProgramming",
    "SearchAlgorithm",
    "SearchResult",
    "ShardingPropagation",
    "Space",
    "layouts",
    "neighbours",
    "search",
]
