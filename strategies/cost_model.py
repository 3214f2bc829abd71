"""The simulator as a cost model: memory and a bound in microseconds, step time by simulation.

Each level bounds the next: ``bound(plan) <= evaluate(plan).step_time``, and
``peak_memory(plan)`` is exactly the peak that the simulation reaches, because memory
changes only on each rank's in-order compute stream.
"""

from collections.abc import Sequence
from math import inf
from typing import Protocol

from meshwise.simulator.engine import simulate, step_time
from meshwise.simulator.units import to_seconds
from meshwise.strategies.bounds.group_bounds import FloatArray, GroupBounds
from meshwise.strategies.bounds.memory import Needs
from meshwise.strategies.bounds.path_times import path_times
from meshwise.strategies.bounds.step_time import Bounds
from meshwise.strategies.evaluation import Evaluation, Resource, spent
from meshwise.strategies.lowering import StageCosts, lower
from meshwise.strategies.plan.group import Group
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem


class CostModel(Protocol):
    """What a search asks of a plan."""

    def peak_memory(self, plan: Plan) -> float:
        """Return the bytes of the fullest device."""
        ...

    def fits(self, plan: Plan) -> bool:
        """Return whether every device and every host has the memory that the plan needs there."""
        ...

    def bound(self, plan: Plan) -> float:
        """Return seconds that the step time is never below."""
        ...

    def floor(self, family: Layout) -> float:
        """Return seconds that no step of a family, whatever its schedule, is below; never above a bound."""
        ...

    def reach(self, family: Layout) -> float:
        """Return seconds that no step of a family is below whose schedule runs one pass at a time."""
        ...

    def table(self, group: Group, limit: float = inf) -> FloatArray:
        """Return for every row and column of a group seconds that are never above the bound.

        Infinite where there is no member, where it cannot fit, and where it takes ``limit`` or more.
        """
        ...

    def longest_paths(self, plans: Sequence[Plan]) -> list[float]:
        """Return for every plan seconds that its step time is never below, at least the bound."""
        ...

    def evaluate(self, plan: Plan) -> Evaluation:
        """Return step time and memory by simulation."""
        ...

    def spent(self, plan: Plan) -> dict[Resource, float]:
        """Return the seconds of a step that every resource takes."""
        ...

    def check_time(self) -> None:
        """End what asks where the time in which plans may be looked at is over."""
        ...


class SimulatedCost:
    """The discrete-event simulation of one problem, with what it has computed kept."""

    def __init__(self, problem: Problem, engine: str = "discrete_event") -> None:
        self.problem, self.engine = problem, engine
        self.costs = StageCosts(problem)
        self._needs, self._bounds = self.costs.once(Needs), self.costs.once(Bounds)
        self._groups = self.costs.once(GroupBounds)

    def __reduce__(self) -> tuple[type["SimulatedCost"], tuple[Problem, str]]:
        """Pickle without what was computed: the copy computes it again."""
        return type(self), (self.problem, self.engine)

    def check_time(self) -> None:
        """Do nothing: there is time without end."""

    def peak_memory(self, plan: Plan) -> float:
        """Return the bytes of the fullest device, exactly as the simulation would reach them."""
        return self._needs.peak(plan)

    def fits(self, plan: Plan) -> bool:
        """Return whether every device and every host has the memory that the plan needs there."""
        return self._needs.fit(plan)

    def evaluate(self, plan: Plan) -> Evaluation:
        """Return step time and memory; a plan that does not fit is simulated only where its memory asks for that."""
        peak = self.peak_memory(plan)
        if not self.fits(plan):
            return Evaluation(inf, peak, False)
        return Evaluation(self.step_time(plan), peak, True)

    def step_time(self, plan: Plan) -> float:
        """Return the seconds of a step, whatever memory it needs."""
        if self.engine == "discrete_event" and self._needs.needs_simulation(plan):
            return self._needs.simulated(plan).step_time
        return step_time(lower(self.problem, plan, costs=self.costs), self.engine)

    def hosts_fit(self, plan: Plan) -> bool:
        """Return whether every host has the memory that the plan needs there, whatever devices have."""
        return self._needs.hosts_fit(plan)

    def memory_needs_simulation(self, plan: Plan) -> bool:
        """Return whether a simulation alone tells the memory of a plan, not the order of its passes."""
        return self._needs.needs_simulation(plan)

    def bound(self, plan: Plan) -> float:
        """Return the length in seconds of a path through the step: a lower bound."""
        return to_seconds(self._bounds.ticks(plan))

    def floor(self, family: Layout) -> float:
        """Return the seconds that the devices of a family compute at least."""
        return self._groups.floor(family)

    def reach(self, family: Layout) -> float:
        """Return the seconds that the devices of a family work at least, one pass at a time."""
        return self._groups.reach(family)

    def table(self, group: Group, limit: float = inf) -> FloatArray:
        """Return bounds in seconds of all members of a group."""
        return self._groups.table(group, limit)

    def spent(self, plan: Plan) -> dict[Resource, float]:
        """Return the seconds of a step that every resource takes, by simulation."""
        return spent(simulate(lower(self.problem, plan, costs=self.costs), self.engine))

    def longest_paths(self, plans: Sequence[Plan]) -> list[float]:
        """Return for every plan the seconds of its longest path: at least the bound, at most the step time."""
        return [to_seconds(int(ticks)) for ticks in path_times(self.costs, plans)]
