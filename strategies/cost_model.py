"""The cost model of searches: memory and lower bounds of plans within microseconds, step times by simulation.

Each level bounds the next: ``plan_bound(plan) <= evaluate(plan).step_time``. ``peak_memory(plan)`` is exactly the peak
that the simulation reaches, because memory changes only on each rank's in-order compute stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from meshwise.simulator.engine import simulate, step_ticks, step_time
from meshwise.simulator.memo import memoise
from meshwise.simulator.units import to_seconds
from meshwise.strategies.bounds.group_bounds import FloatArray, GroupBounds
from meshwise.strategies.bounds.memory import PlanMemory
from meshwise.strategies.bounds.path_times import LongestPaths
from meshwise.strategies.bounds.step_time import StepBounds
from meshwise.strategies.evaluation import Evaluation, Resource, compute_resource_times
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.group import Group
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem


@dataclass(frozen=True, slots=True)
class SimulatedMemory:
    """The bytes of the fullest device and the seconds of a step that a simulation finds for a plan.

    ``fits`` says whether all devices and hosts have the memory they need, ``hosts_fit`` whether all hosts have.
    """

    peak: int
    fits: bool
    hosts_fit: bool
    step_time: float


class SimulatedCost:
    """The cost model by simulation of one problem; everything that plans share is computed once."""

    def __init__(self, problem: Problem, engine: str = "discrete_event") -> None:
        self.problem, self.engine = problem, engine
        self.costs = StageCosts(problem)
        self._plan_memory, self._bounds = self.costs.get_shared(PlanMemory), self.costs.get_shared(StepBounds)
        self._groups, self._paths = self.costs.get_shared(GroupBounds), self.costs.get_shared(LongestPaths)

    def __reduce__(self) -> tuple[type["SimulatedCost"], tuple[Problem, str]]:
        """Pickle without the caches: a copy computes them again."""
        return type(self), (self.problem, self.engine)

    def check_time(self) -> None:
        """Do nothing: time is unlimited here."""

    def peak_memory(self, plan: Plan) -> float:
        """Return the peak memory in bytes of the fullest device, exactly that of the simulation."""
        return self._simulate_plan(plan).peak if self.memory_needs_simulation(plan) else self._plan_memory.peak(plan)

    def fits(self, plan: Plan) -> bool:
        """Return whether every device and every host has the memory that the plan needs there."""
        return self._simulate_plan(plan).fits if self.memory_needs_simulation(plan) else self._plan_memory.fits(plan)

    def evaluate(self, plan: Plan) -> Evaluation:
        """Return step time and memory; a plan that does not fit is simulated only where its memory needs that."""
        peak = self.peak_memory(plan)
        if not self.fits(plan):
            return Evaluation(inf, peak, False)
        return Evaluation(self.step_time(plan), peak, True)

    def step_time(self, plan: Plan) -> float:
        """Return the step time in seconds, whether the plan fits or not."""
        if self.engine == "discrete_event" and self.memory_needs_simulation(plan):
            return self._simulate_plan(plan).step_time
        return step_time(lower(self.problem, plan, costs=self.costs), self.engine)

    def hosts_fit(self, plan: Plan) -> bool:
        """Return whether every host has the memory that the plan needs there, whatever devices need."""
        if plan.offload and self.memory_needs_simulation(plan):
            return self._simulate_plan(plan).hosts_fit
        return self._plan_memory.hosts_fit(plan)

    @memoise
    def _simulate_plan(self, plan: Plan) -> SimulatedMemory:
        """Return what a simulation of a plan finds."""
        timeline = simulate(lower(self.problem, plan, costs=self.costs))
        devices_fit, hosts_fit = (
            all(profile.peak <= profile.capacity for profile in profiles)
            for profiles in (timeline.memory, timeline.host_memory)
        )
        peak = int(max(profile.peak for profile in timeline.memory))
        return SimulatedMemory(peak, devices_fit and hosts_fit, hosts_fit, timeline.step_time)

    def memory_needs_simulation(self, plan: Plan) -> bool:
        """Return whether only a simulation tells the memory of a plan, because the order of passes does not."""
        return self._plan_memory.needs_simulation(plan)

    def plan_bound(self, plan: Plan) -> float:
        """Return a lower bound of the step time: the length in seconds of a path through the step."""
        return to_seconds(self._bounds.lower_bound(plan))

    def family_bound(self, family: Layout) -> float:
        """Return the least seconds that the devices of a family compute."""
        return self._groups.family_bound(family)

    def busy_bound(self, family: Layout) -> float:
        """Return the least seconds that the devices of a family are busy, one pass at a time."""
        return self._groups.busy_bound(family)

    def group_bounds(self, group: Group, limit: float = inf) -> FloatArray:
        """Return lower bounds in seconds of all members of a group."""
        return self._groups.group_bounds(group, limit)

    def resource_times(self, plan: Plan) -> dict[Resource, float]:
        """Return the seconds of a step that every resource takes, by simulation."""
        return compute_resource_times(simulate(lower(self.problem, plan, costs=self.costs), self.engine))

    def longest_paths(self, plans: Sequence[Plan]) -> list[float]:
        """Return for every plan the seconds of its longest path: at least the bound, at most the step time."""
        return [to_seconds(ticks) for ticks in self.list_path_ticks(plans)]

    def list_path_ticks(self, plans: Sequence[Plan]) -> list[int]:
        """Return for every plan the ticks of one step as if no two transfers shared a link.

        They are the longest path of its program, which need not be built where passes can be walked.

        Raises
        ------
        ValueError
            Where a schedule's orders cannot finish, or the work of a step exceeds 2**60 ticks.
        """
        walked_ticks = zip(plans, self._paths.ticks(plans), strict=True)
        return [self._count_path_ticks(plan) if ticks is None else ticks for plan, ticks in walked_ticks]

    def _count_path_ticks(self, plan: Plan) -> int:
        """Return the ticks of the longest path of a plan's program."""
        return step_ticks(lower(self.problem, plan, costs=self.costs), "longest_path")
