"""A recomputation for every layer of every stage within its memory.

References
----------
.. [1] Miao et al., "Galvatron: efficient transformer training over multiple GPUs using automatic parallelism", VLDB
   2023, section 3.3.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from strategies.completion import complete
from strategies.cost_model import CostModel
from strategies.lowering import StageCosts
from strategies.plan import Plan
from strategies.problem import Problem
from strategies.recomputation import OfStage, Recompute
from strategies.search.driver import Proposals
from strategies.search.per_stage import Found, best_of, dividable, divided, meshes, of_layers, ways
from strategies.search.space import Space
from strategies.stages.division import DivisionProblem
from strategies.stages.layer_choice import Choice, fastest_ways, fastest_ways_on_grid
from strategies.stages.tables import division_problem


@dataclass(frozen=True, slots=True)
class LayerDP:
    """Recomputation of every layer by a dynamic program over layers and memory (Galvatron, VLDB 2023).

    For every mesh whose schedule has one chunk a rank, stages have the layers that the mesh says. Of each the layers
    are recomputed or not, so that they fit and take least; a plan says how many of a stage's first layers are, in one
    way. The plans with the least critical paths are simulated. It proves nothing of other divisions.

    Parameters
    ----------
    choices
        Plans that are simulated.
    faithful
        As published: every layer's bytes are rounded up to a megabyte.
    """

    name: ClassVar[str] = "layer_dp"
    most_plans: ClassVar[int] = 0

    choices: int = 32
    faithful: bool = False

    def __post_init__(self) -> None:
        if self.choices < 1:
            raise ValueError(f"layer_dp: choices is at least 1, met {self.choices}; nearest: 1")

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield a uniform plan, and the plans whose layers are chosen best."""
        yield from best_of(problem, space, costs, self._found(problem, space), self.choices)
        return None

    def _found(self, problem: Problem, space: Space) -> Iterator[Found | None]:
        """Yield for every mesh the choice of every layer that takes least."""
        tables, allowed = StageCosts(problem), ways(space)
        for layout in meshes(problem, space):
            if layout.chunks > 1 or not dividable(layout):
                continue
            plan = complete(problem, layout)
            given = division_problem(tables, plan, allowed, 1)
            counts = _layers(problem, plan)
            chosen = [self._stage(given, allowed, stage, count) for stage, count in enumerate(counts)]
            hows = [each[0] for each in chosen if each is not None]
            if len(hows) != len(counts):
                yield None
            else:
                again = [[each[1] if each and each[2] is way else 0 for each in chosen] for way in allowed]
                yield given.step(counts, again), divided(layout, counts, hows)

    def _stage(
        self, given: DivisionProblem, allowed: Sequence[Recompute], stage: int, count: int
    ) -> tuple[OfStage, int, Recompute] | None:
        """Return what a stage recomputes, of how many layers, and in which way; ``None`` where it cannot fit."""
        best: tuple[float, OfStage, int, Recompute] | None = None
        for number, way in enumerate(allowed) if allowed else [(None, Recompute.NONE)]:
            choice = self._choice(given, stage, count, number)
            if choice is not None and (best is None or choice.time < best[0]):
                again = sum(choice.ways)
                best = choice.time, of_layers(way, again, count), again, way
        return best and best[1:]

    def _choice(self, given: DivisionProblem, stage: int, count: int, way: int | None) -> Choice | None:
        """Return the fastest choice for the layers of a stage between keeping all and one way."""
        moments = given.moments[stage]
        alive, room = (int(moments.alive[0, stage]), float(moments.room[0])) if len(moments.room) else (0, 0.0)
        limit = room - count * given.states[stage] - alive * given.kept[stage]
        plain = 0.0, alive * float(given.kept_layer[stage])
        options = [plain]
        if way is not None:
            options.append((float(given.again[way, stage]), plain[1] - alive * float(given.saved[way, stage])))
        solve = fastest_ways_on_grid if self.faithful else fastest_ways
        return solve([options] * count, limit)


def _layers(problem: Problem, plan: Plan) -> list[int]:
    """Return the layers of every stage of a plan."""
    names = {name for name, block in problem.graph.occurrences if block.layer} or {problem.graph.occurrences[0][0]}
    return [sum(name in names for name in stage.blocks) for stage in plan.stages]
