"""Algorithms that search, by name: one a file, or one family a file.

Here stands where each of them is. Its module is imported when it is asked for, so that a scenario is checked without
those of all algorithms.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any


class Registry(Mapping[str, type[Any]]):
    """The frozen dataclasses of algorithms by name, of which only the places are known without an import.

    >>> found = Registry({"mcmc": "strategies.search.mcmc.MCMC"})
    >>> list(found), found["mcmc"].__name__
    (['mcmc'], 'MCMC')
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = dict(places)

    def __getitem__(self, name: str) -> type[Any]:
        module, _, kind = self.place(name).rpartition(".")
        found: type[Any] = getattr(import_module(module), kind)
        return found

    def place(self, name: str) -> str:
        """Return the module and the name of the dataclass of an algorithm."""
        return self._places[name]

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __or__(self, other: "Registry") -> "Registry":
        return Registry(self._places | other._places)


STAGE_ALGORITHMS = Registry(
    {
        "pipeline_dp": "strategies.search.pipeline_dp.PipelineDP",
        "layer_dp": "strategies.search.layer_dp.LayerDP",
        "inter_stage_milp": "strategies.search.inter_stage_milp.InterStageMILP",
        "auto": "strategies.search.auto.Auto",
    }
)
"""Algorithms that choose a layout whose stages may differ in their layers and in what they recompute."""

LAYOUT_ALGORITHMS = (
    Registry(
        {
            "best_first": "strategies.search.best_first.BestFirst",
            "exhaustive": "strategies.search.exhaustive.Exhaustive",
            "breadth_first": "strategies.search.breadth_first.BreadthFirst",
            "beam": "strategies.search.beam.Beam",
            "mcmc": "strategies.search.mcmc.MCMC",
            "mcts": "strategies.search.mcts.MCTS",
            "reinforcement": "strategies.search.reinforcement.Reinforcement",
            "random": "strategies.search.random.RandomSearch",
            "expert": "strategies.search.expert.Expert",
            "bottleneck": "strategies.search.bottleneck.Bottleneck",
        }
    )
    | STAGE_ALGORITHMS
)
"""Algorithms that choose a layout of the whole network."""

OPERATOR_ALGORITHMS = Registry(
    {
        "frontier": "strategies.search.frontier.Frontier",
        "integer_programming": "strategies.search.integer_programming.IntegerProgramming",
        "dynamic_programming": "strategies.search.dynamic_programming.DynamicProgramming",
        "recursive_programming": "strategies.search.recursive_programming.RecursiveProgramming",
        "sharding_propagation": "strategies.search.sharding_propagation.ShardingPropagation",
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
