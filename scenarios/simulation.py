"""One simulated step of a plan as a result: time, memory, and where both go."""

import time
from dataclasses import dataclass, replace
from typing import Any

from simulator.memory import CATEGORIES, MemoryProfile
from simulator.program import Category, Program, TaskKind
from simulator.timeline import Timeline
from strategies.plan import Plan
from strategies.problem import Problem

BACKWARD_AND_FORWARD = 3
"""The backward pass takes twice the FLOP of the forward pass: one product each for input and weight gradients."""

MAX_OPERATOR_TASKS = 150_000
"""Operators a step, estimated, up to which each is one task; beyond, each stretch of computing is."""

MAX_SEGMENT_TASKS = 1_000_000
"""Operators a step up to which each stretch of computing is one task; beyond, each pass through a stage is."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes on the devices of one pipeline rank at the moment of its peak, by category.

    ``stages`` are all the stages of that rank, ``stage`` the first of them; ``peak`` is the sum.
    """

    stage: int
    stages: tuple[int, ...]
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    peak: float
    host_peak: float = 0.0


@dataclass(frozen=True, slots=True)
class Simulation:
    """What the simulator says of one step of a plan; seconds, bytes, FLOP/s and fractions."""

    plan: Plan
    timeline: Timeline
    step_time: float
    tokens_per_second: float
    tokens_per_second_per_device: float
    model_flops_per_second_per_device: float
    mfu: float
    fits: bool
    peak_memory: float
    memory_capacity: float
    memory: tuple[StageMemory, ...]
    bubble: float
    exposed_communication: tuple[tuple[str, float], ...]
    engine: str
    tasks: int
    classes: int
    ranks: int
    wall_time: float
    assumptions: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON-ready data, without plan and timeline."""
        scalars = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("plan", "timeline")}
        return scalars | {
            "memory": [{name: getattr(row, name) for name in row.__dataclass_fields__} for row in self.memory],
            "exposed_communication": dict(self.exposed_communication),
            "assumptions": list(self.assumptions),
        }


def simulation(problem: Problem, plan: Plan, engine: str, assumptions: tuple[str, ...]) -> Simulation:
    """Return one simulated step of ``plan``."""
    from simulator.engine import simulate
    from strategies.lowering import lower

    start = time.perf_counter()
    fine = granularity(problem, plan)
    program = lower(problem, plan, fine)
    timeline = simulate(program, engine)
    result = _result(problem, plan, program, timeline, time.perf_counter() - start, assumptions)
    return _without_tensor_communication(result) if fine == "action" and plan.tensor > 1 else result


def granularity(problem: Problem, plan: Plan) -> str:
    """Return how fine a program is, ``operator``, ``segment`` or ``action``: as fine as takes seconds.

    Peak memory is the same in all; step time too, but where data- or pipeline-parallel
    transfers share ports with those of the tensor axis, which only ``operator`` and ``segment``
    tell apart from computing.
    """
    operators = 2 * plan.num_microbatches * sum(len(block.operators) for _, block in problem.graph.occurrences)
    if operators <= MAX_OPERATOR_TASKS:
        return "operator"
    return "segment" if operators <= MAX_SEGMENT_TASKS else "action"


def model_flops(problem: Problem) -> float:
    """Return the FLOP of one step that the model itself asks for, recomputation left out."""
    return BACKWARD_AND_FORWARD * problem.graph.flops * problem.training.global_batch


def _result(
    problem: Problem, plan: Plan, program: Program, timeline: Timeline, wall_time: float, assumptions: tuple[str, ...]
) -> Simulation:
    cluster, training = problem.cluster, problem.training
    devices = cluster.num_devices
    tokens = training.global_batch * training.sequence / timeline.step_time
    rate = model_flops(problem) / timeline.step_time / devices
    return Simulation(
        plan=plan,
        timeline=timeline,
        step_time=timeline.step_time,
        tokens_per_second=tokens,
        tokens_per_second_per_device=tokens / devices,
        model_flops_per_second_per_device=rate,
        mfu=rate / cluster.accelerator.peak(training.precision),
        fits=timeline.peak_memory <= program.capacity,
        peak_memory=timeline.peak_memory,
        memory_capacity=program.capacity,
        memory=tuple(_stage_memory(timeline, profile) for profile in timeline.memory),
        bubble=timeline.bubble,
        exposed_communication=tuple((str(kind), value) for kind, value in timeline.exposed_communication().items()),
        engine=timeline.engine,
        tasks=len(program.tasks),
        classes=len(program.rank_classes),
        ranks=sum(len(members.ranks) for members in program.rank_classes),
        wall_time=wall_time,
        assumptions=assumptions,
    )


def _without_tensor_communication(result: Simulation) -> Simulation:
    """Return ``result`` without the figure that a program of whole passes cannot give."""
    exposed = tuple(pair for pair in result.exposed_communication if pair[0] != TaskKind.TENSOR_COMMUNICATION)
    note = "tensor communication counts as computing: there are too many tasks to tell it apart"
    return replace(result, exposed_communication=exposed, assumptions=(*result.assumptions, note))


def _stage_memory(timeline: Timeline, profile: MemoryProfile) -> StageMemory:
    stages = timeline.rank_classes[profile.rank_class].stages
    row = profile.usage[profile.totals.index(profile.peak)]
    held = {str(category): row[CATEGORIES.index(category)] for category in Category}
    return StageMemory(stage=stages[0] if stages else 0, stages=stages, peak=profile.peak, **held)
