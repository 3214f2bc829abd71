"""Search algorithms by name: one algorithm, or one family of algorithms, per file.

An algorithm's module is imported when it is used, so that a scenario is checked without importing all of them.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any


class Registry(Mapping[str, type[Any]]):
    """The dataclasses of algorithms by name; each is imported when it is looked up.

    >>> found = Registry({"mcmc": "meshwise.strategies.search.algorithms.mcmc.MCMC"})
    >>> list(found), found["mcmc"].__name__
    (['mcmc'], 'MCMC')
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = dict(places)

    def __getitem__(self, name: str) -> type[Any]:
        module, _, kind = self._places[name].rpartition(".")
        algorithm: type[Any] = getattr(import_module(module), kind)
        return algorithm

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __or__(self, registry: "Registry") -> "Registry":
        return Registry(self._places | registry._places)


STAGE_ALGORITHMS = Registry(
    {
        "pipeline_dp": "meshwise.strategies.search.algorithms.stages.PipelineDP",
        "layer_dp": "meshwise.strategies.search.algorithms.stages.LayerDP",
        "inter_stage_milp": "meshwise.strategies.search.algorithms.stages.InterStageMILP",
        "metis": "meshwise.strategies.search.algorithms.metis.Metis",
        "sailor": "meshwise.strategies.search.algorithms.sailor.Sailor",
        "auto": "meshwise.strategies.search.algorithms.auto.Auto",
    }
)
"""Algorithms that choose a layout whose stages may differ in their layers and their recomputation."""

LAYOUT_ALGORITHMS = (
    Registry(
        {
            "best_first": "meshwise.strategies.search.algorithms.best_first.BestFirst",
            "exhaustive": "meshwise.strategies.search.algorithms.exhaustive.Exhaustive",
            "breadth_first": "meshwise.strategies.search.algorithms.exhaustive.BreadthFirst",
            "beam": "meshwise.strategies.search.algorithms.beam.Beam",
            "mcmc": "meshwise.strategies.search.algorithms.mcmc.MCMC",
            "simulated_annealing": "meshwise.strategies.search.algorithms.simulated_annealing.SimulatedAnnealing",
            "genetic": "meshwise.strategies.search.algorithms.genetic.Genetic",
            "mcts": "meshwise.strategies.search.algorithms.mcts.MCTS",
            "reinforcement": "meshwise.strategies.search.algorithms.reinforcement.Reinforcement",
            "tpe": "meshwise.strategies.search.algorithms.tpe.TPE",
            "random": "meshwise.strategies.search.algorithms.random.RandomSearch",
            "expert": "meshwise.strategies.search.algorithms.expert.Expert",
            "bottleneck": "meshwise.strategies.search.algorithms.bottleneck.Bottleneck",
        }
    )
    | STAGE_ALGORITHMS
)
"""Algorithms that choose a layout of the whole network."""

OPERATOR_ALGORITHMS = Registry(
    {
        "frontier": "meshwise.strategies.search.algorithms.operators.Frontier",
        "integer_programming": "meshwise.strategies.search.algorithms.operators.IntegerProgramming",
        "dynamic_programming": "meshwise.strategies.search.algorithms.operators.DynamicProgramming",
        "recursive_programming": "meshwise.strategies.search.algorithms.operators.RecursiveProgramming",
        "sharding_propagation": "meshwise.strategies.search.algorithms.operators.ShardingPropagation",
        "uniap": "meshwise.strategies.search.algorithms.uniap.UniAP",
        "joint": "meshwise.strategies.search.algorithms.joint.Joint",
    }
)
"""Algorithms that choose a sharding for every operator."""

TABLE_ALGORITHMS = Registry({"tables": "meshwise.strategies.search.algorithms.tables.Tables"})
"""Algorithms that choose where embedding tables are."""

PINNED_ALGORITHMS = tuple(name for name in OPERATOR_ALGORITHMS if name != "recursive_programming")
"""Algorithms that respect the user's decisions about single operators."""

ALGORITHMS = LAYOUT_ALGORITHMS | OPERATOR_ALGORITHMS | TABLE_ALGORITHMS
"""All algorithms by name; the fields of each are its hyper-parameters."""


NEEDED_PACKAGES = {"reinforcement": "torch", "tpe": "optuna"}
"""The package that an algorithm needs beside those of the core, by the algorithm's name."""


def list_installed() -> tuple[str, ...]:
    """Return the names of the algorithms whose packages (`NEEDED_PACKAGES`) are installed."""
    missing = {name for name, package in NEEDED_PACKAGES.items() if find_spec(package) is None}
    return tuple(name for name in ALGORITHMS if name not in missing)
