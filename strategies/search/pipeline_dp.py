"""Layers of every stage by the dynamic programs of PipeDream, DAPPLE, Piper and Alpa."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from strategies.completion import complete
from strategies.cost_model import CostModel
from strategies.layout import Layout
from strategies.lowering import StageCosts
from strategies.problem import Problem
from strategies.search.driver import Proposals
from strategies.search.per_stage import Found, best_of, dividable, divided, least_recompute, meshes, ways
from strategies.search.space import Space
from strategies.stages.critical_path import FloatArray
from strategies.stages.division import DivisionProblem
from strategies.stages.partition import Partition, least_bottleneck, pivot, sum_and_slowest
from strategies.stages.tables import division_problem

METHODS = ("alpa", "dapple", "piper", "pipedream")
"""Whose formula is used."""


@dataclass(frozen=True, slots=True)
class PipelineDP:
    """Division of layers among stages by dynamic programming (Alpa, OSDI 2022; DAPPLE, Piper, PipeDream).

    For every mesh whose schedule has one chunk a rank, the layers of stages are those for which the formula of the
    method is least, where each stage recomputes as few layers as its activations in flight leave room for. The plans
    with the least times by the formula are simulated. It proves nothing, for no formula is the simulator's.

    Parameters
    ----------
    method
        ``alpa``: sum and slowest stage; ``dapple``: sum up to the pivot; ``piper`` and ``pipedream``: slowest stage.
    choices
        Divisions that are simulated.
    spread
        Layers that a stage may have more or fewer than if all had as many.
    faithful
        As published: PipeDream and DAPPLE know no memory, and so recompute nothing.
    """

    name: ClassVar[str] = "pipeline_dp"
    most_plans: ClassVar[int] = 0

    method: str = "alpa"
    choices: int = 32
    spread: int = 16
    faithful: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"pipeline_dp: method is one of {', '.join(METHODS)}, met {self.method}")
        if self.choices < 1 or self.spread < 0:
            raise ValueError(
                f"pipeline_dp: choices is at least 1 and spread at least 0, met {self.choices} and {self.spread}"
            )

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield a uniform plan, and the divisions that the formula finds best."""
        yield from best_of(problem, space, costs, self._found(problem, space), self.choices)
        return None

    def _found(self, problem: Problem, space: Space) -> Iterator[Found | None]:
        """Yield for every mesh the division that the formula finds best."""
        tables, allowed = StageCosts(problem), ways(space)
        for layout in meshes(problem, space):
            if layout.chunks > 1 or not dividable(layout):
                continue
            given = division_problem(tables, complete(problem, layout), allowed, self.spread)
            chosen = least_recompute(given, allowed, forgets=self.faithful and self.method in ("pipedream", "dapple"))
            division = self._divided(given, chosen.times, layout)
            if division is None:
                yield None
            else:
                hows = [chosen.hows[stage][count] for stage, count in enumerate(division.counts)]
                yield division.time, divided(layout, division.counts, hows)

    def _divided(self, given: DivisionProblem, times: FloatArray, layout: Layout) -> Partition | None:
        microbatches = len(given.arranged.code) // (2 * given.stages)
        if self.method == "alpa":
            found = sum_and_slowest(times, given.layers, microbatches)
        elif self.method == "dapple":
            found = pivot(times, given.layers, microbatches)
        else:
            found = least_bottleneck(times, given.layers)
            return found and found._replace(time=found.time * microbatches)
        return found
