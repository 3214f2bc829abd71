"""The simulator as a cost model: memory and a bound in microseconds, step time by simulation.

Each level bounds the next: ``bound(plan) <= evaluate(plan).step_time``, and
``peak_memory(plan)`` is exactly the peak that the simulation reaches, because memory
changes only on each rank's in-order compute stream.
"""

from math import inf
from typing import Protocol

from simulator.engine import step_time
from simulator.units import to_seconds
from strategies.evaluation import Evaluation
from strategies.lowering import StageCosts, lower
from strategies.lowering.contention import exact_granularity
from strategies.lowering.data import buckets, gradient_step, overlaps, parameter_step
from strategies.lowering.memory import peak_activations, resident
from strategies.lowering.optimizer import optimizer_step
from strategies.lowering.pipeline import send_step
from strategies.lowering.stage import PlanCosts, idle_ticks
from strategies.mesh import DATA
from strategies.plan import Plan
from strategies.problem import Problem


class CostModel(Protocol):
    """What a search asks of a plan."""

    def peak_memory(self, plan: Plan) -> float:
        """Return the bytes of the fullest device."""
        ...

    def fits(self, plan: Plan) -> bool:
        """Return whether the fullest device has that memory."""
        ...

    def bound(self, plan: Plan) -> float:
        """Return seconds that the step time is never below."""
        ...

    def evaluate(self, plan: Plan) -> Evaluation:
        """Return step time and memory by simulation."""
        ...


class SimulatedCost:
    """The discrete-event simulation of one problem, with what it has computed kept."""

    def __init__(self, problem: Problem, engine: str = "discrete_event") -> None:
        self.problem, self.engine = problem, engine
        self.costs = StageCosts(problem)
        self._sends: dict[tuple[object, ...], int] = {}

    def peak_memory(self, plan: Plan) -> float:
        """Return the bytes of the fullest device, exactly as the simulation would reach them."""
        costs = self.costs.of(plan)
        return max(self._rank_memory(plan, costs, position) for position in range(plan.pipeline))

    def fits(self, plan: Plan) -> bool:
        """Return whether the fullest device has that memory."""
        return self.peak_memory(plan) <= self.problem.cluster.accelerator.memory

    def evaluate(self, plan: Plan) -> Evaluation:
        """Return step time and memory; a plan that does not fit is not simulated."""
        peak = self.peak_memory(plan)
        if peak > self.problem.cluster.accelerator.memory:
            return Evaluation(inf, peak, False)
        program = lower(self.problem, plan, exact_granularity(self.costs, plan), costs=self.costs)
        return Evaluation(step_time(program, self.engine), peak, True)

    def bound(self, plan: Plan) -> float:
        """Return the length in seconds of a path through the step: a lower bound.

        For every pipeline rank: the first microbatch reaches it, it does all its work, the
        last gradient runs back to the first stage, and the optimizer steps.
        """
        costs = self.costs.of(plan)
        tails = [self._tail(plan, costs, position) for position in range(plan.pipeline)]
        fill = drain = best = 0
        for position in range(plan.pipeline):
            own = range(position, len(plan.stages), plan.pipeline)
            forward, backward = zip(*(self._ticks(plan, costs, stage) for stage in own), strict=True)
            work = plan.num_microbatches * (sum(forward) + sum(backward))
            best = max(best, fill + work + max(tails[position], drain + tails[0]))
            if position < plan.pipeline - 1:
                fill += forward[0] + self._send_ticks(plan, position, position, 1)
                drain += backward[0] + self._send_ticks(plan, position, position + 1, -1)
        return to_seconds(best)

    def _ticks(self, plan: Plan, costs: PlanCosts, stage: int) -> tuple[int, int]:
        """Return the least ticks of a stage's forward and backward over its rank classes."""
        position = stage % plan.pipeline
        shapes = {self.costs.tensor_shape(plan, index) for index in self._on(plan, position)}
        found = [costs.stages[stage]] if len(shapes) == 1 else [self.costs.stage(plan, stage, s) for s in shapes]
        return min(cost.forward_ticks for cost in found), min(cost.backward_ticks for cost in found)

    def _on(self, plan: Plan, position: int) -> tuple[int, ...]:
        return self.costs.classes(plan.mesh).on_pipeline_rank(position)

    def _rank_memory(self, plan: Plan, costs: PlanCosts, position: int) -> float:
        cluster, training = self.problem.cluster, self.problem.training
        held = resident(cluster.accelerator, training, plan, costs.parameters[position], 0)
        chunks = costs.stages[position :: plan.pipeline]
        return sum(change.size for change in held) + peak_activations(plan, position, chunks)

    def _send_ticks(self, plan: Plan, stage: int, sender: int, direction: int) -> int:
        """Return the least ticks of a transfer of ``stage``'s boundary from a pipeline position."""
        table, size = self.costs.classes(plan.mesh), self.costs.boundary_bytes(plan, stage)
        key = (plan.mesh, plan.scatter_gather, plan.sequence_parallel, size, sender, direction)
        if key not in self._sends:
            pairs = [(index, table.neighbour(index, direction)[0]) for index in self._on(plan, sender)]
            shapes = {table.pair_shape(index, rank) for index, rank in pairs}
            steps = [send_step(self.problem, plan, shape, size, "") for shape in shapes]
            self._sends[key] = min(idle_ticks(self.problem.cluster, step) for step in steps)
        return self._sends[key]

    def _tail(self, plan: Plan, costs: PlanCosts, position: int) -> int:
        """Return the ticks after a rank's last backward: the last reduction, the optimizer, ZeRO's gather."""
        cluster, training = self.problem.cluster, self.problem.training
        parameters = costs.parameters[position]
        step = optimizer_step(cluster, training, plan, parameters, costs.parameter_tensors[position])
        ticks = idle_ticks(cluster, step)
        if plan.data == 1:
            return ticks
        last = parameters
        if overlaps(cluster, plan):
            found = buckets(costs.stages[position], training.gradient_bytes)
            last = found[-1].parameters if found else 0
        table = self.costs.classes(plan.mesh)
        shapes = {table.shape(index, DATA) for index in self._on(plan, position)}
        ticks += min(idle_ticks(cluster, gradient_step(cluster, training, plan, s, last, "")) for s in shapes)
        if plan.zero:
            ticks += min(idle_ticks(cluster, parameter_step(cluster, training, s, parameters)) for s in shapes)
        return ticks
