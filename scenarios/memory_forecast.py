"""Memory of a plan in three ways, and whether it fits: one judgement for simulations, answers of searches and accuracy.

Tensors are allocated, the allocator reserves segments for them, and the device holds these and what the runtime and
communicators take. A plan fits where the device has that much with the probability that is asked for, and every host
what its ranks keep there. A search screens plans by their tensors and a margin
(`meshwise.scenarios.intervals.with_margin`), for it looks at thousands; the judgement of what it found replays a step.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from meshwise.scenarios.intervals import find_risk_limit, find_uncertainty
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.strategies.allocation.device import count_overhead
from meshwise.strategies.allocation.replay import PlanReplay
from meshwise.strategies.bounds.memory import PlanMemory
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.evaluation import Trial
from meshwise.strategies.explanation.uncertainty import Uncertainty
from meshwise.strategies.plan.mesh import PIPELINE, list_data_ranks
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.driver import SearchResult

FloatArray = NDArray[np.float64]

MAX_JUDGED = 20
"""Plans of a search that are judged, the fastest first, before the fastest one is kept with what is said of it."""


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """Bytes of the fullest device of a plan: of tensors, reserved for them, and in all; and whether the plan fits.

    ``capacity`` is the memory that the framework reports of that device.
    ``out_of_memory`` is the probability that a device lacks memory, ``allocated_last`` the tensors of the last pipeline
    rank.
    """

    allocated: float
    reserved: float
    device: float
    capacity: float
    out_of_memory: float
    fits: bool
    allocated_last: float


def forecast_memory(costs: SimulatedCost, plan: Plan) -> MemoryForecast:
    """Return the memory of a plan in three ways, and whether it fits.

    Without a margin a plan fits where its tensors do: then predictions are trusted, and nothing is reserved beside
    tensors.
    """
    problem = costs.problem
    smallest = min(problem.cluster.accelerators, key=lambda device: device.memory)
    overhead = count_overhead(problem, plan)
    room = smallest.memory - overhead
    uncertainty, limit = find_uncertainty(problem), find_risk_limit(problem)
    peak, capacity = costs.peak_memory(plan), smallest.memory
    if costs.memory_needs_simulation(plan):
        # what the host takes and gives back depends on times, so that there is no order of allocations to replay
        allocated = peak - smallest.reserved
        reserved = uncertainty.reserved_ratios[1] * allocated
        risk = uncertainty.estimate_cluster_risk(problem.cluster, peak)
        last = allocated
    else:
        allocated, reserved, least = costs.costs.get_shared(PlanReplay).reserve(plan, max(int(room), 0))
        risk = uncertainty.estimate_replay_risk(least, room)
        even_plan = plan.with_microbatch(max(plan.sizes))
        last = float(costs.costs.get_shared(PlanMemory).allocated(even_plan)[-1])
        if len({device.memory for device in problem.cluster.accelerators}) > 1:
            allocated, reserved, risk, capacity = _judge_positions(costs, plan, uncertainty, overhead)
    is_mixed = len(problem.cluster.accelerators) > 1
    # on devices of several kinds each position has room of its own
    fits = costs.fits(plan) if limit is None or is_mixed else risk <= limit and costs.hosts_fit(plan)
    return MemoryForecast(allocated, reserved, reserved + overhead, capacity, risk, fits, last)


def _judge_positions(
    costs: SimulatedCost, plan: Plan, uncertainty: Uncertainty, overhead: int
) -> tuple[float, float, float, float]:
    """Return the bytes of tensors and of segments of the device that most likely lacks memory, and how likely it does.

    The last value is the memory of that device. Each rank is judged by the memory of its own device.
    """
    replay, rows = costs.costs.get_shared(PlanReplay), []
    for size in plan.sizes:
        rooms = list_position_memory(costs.problem, plan, size) - overhead
        for position, bytes_of in replay.reserve_by_position(plan.with_microbatch(size), rooms.tolist()).items():
            risk = uncertainty.estimate_replay_risk(bytes_of.least, rooms[position])
            room = float(rooms[position])
            rows.append((risk, bytes_of.least / max(room, 1.0), bytes_of, room + overhead))
    risk, _, bytes_of, capacity = max(rows)
    return float(bytes_of.allocated), float(bytes_of.reserved), risk, capacity


def list_position_memory(problem: Problem, plan: Plan, size: int) -> FloatArray:
    """Return the least memory in bytes of a device of every pipeline position whose microbatches have ``size``."""
    cluster, mesh = problem.cluster, plan.mesh
    memory = np.array([node.accelerator.memory for node, _ in cluster.nodes], dtype=float)
    devices = np.array(plan.placement or range(mesh.num_ranks))
    positions, device_memory = mesh.coordinates(PIPELINE), memory[cluster.node_kinds[cluster.device_nodes[devices]]]
    if not isinstance(plan.microbatch, int):
        has_size = np.array(plan.microbatch)[list_data_ranks(mesh)] == size
        positions, device_memory = positions[has_size], device_memory[has_size]
    result = np.full(plan.pipeline, np.inf)
    np.minimum.at(result, positions, device_memory)
    return result


def list_device_peaks(problem: Problem, plan: Plan) -> dict[Accelerator, float]:
    """Return the peak in bytes of each kind of device, what its runtime reserves included.

    ``plan`` needs no simulation for its memory.
    """
    cluster, mesh, memory = problem.cluster, plan.mesh, SimulatedCost(problem).costs.get_shared(PlanMemory)
    devices = np.array(plan.placement or range(mesh.num_ranks))
    kinds, positions, data_ranks = (
        cluster.node_kinds[cluster.device_nodes[devices]],
        mesh.coordinates(PIPELINE),
        list_data_ranks(mesh),
    )
    result: dict[Accelerator, float] = {}
    for size in plan.sizes:
        allocated = memory.allocated(plan.with_microbatch(size))
        has_size = np.ones(len(devices), bool)
        if not isinstance(plan.microbatch, int):
            has_size = np.array(plan.microbatch)[data_ranks] == size
        for kind, position in sorted(set(zip(kinds[has_size].tolist(), positions[has_size].tolist(), strict=True))):
            accelerator = cluster.nodes[kind][0].accelerator
            peak = float(allocated[position]) + accelerator.reserved
            result[accelerator] = max(peak, result.get(accelerator, 0.0))
    return result


def forecast_plan(problem: Problem, plan: Plan) -> MemoryForecast:
    """Return the memory of a plan of a problem in three ways, and whether it fits."""
    return forecast_memory(SimulatedCost(problem), plan)


def pick_judged(costs: SimulatedCost, trials: Iterable[Trial]) -> Trial | None:
    """Return the first trial that fits when it is replayed, where one of `MAX_JUDGED` does; else the first of all.

    ``trials`` fit by their tensors, and the fastest is the first.
    """
    first_trial = None
    for trial in islice(trials, MAX_JUDGED):
        first_trial = first_trial or trial
        if forecast_memory(costs, trial.plan).fits:
            return trial
    return first_trial


def judge_result(costs: SimulatedCost, result: SearchResult) -> SearchResult:
    """Return the result of a search with the fastest plan that fits when it is replayed.

    Where none of the fastest plans does, the result is as it was: its probability of lacking memory says so.
    """
    if result.best is None or forecast_memory(costs, result.best.plan).fits:
        return result
    fitting_trials = sorted(
        (trial for trial in result.trials if trial.evaluation.fits), key=lambda trial: trial.evaluation.step_time
    )
    best = pick_judged(costs, fitting_trials) or result.best
    bound = result.lower_bound
    gap = None if result.gap is None or not bound else max((best.evaluation.step_time - bound) / bound, 0.0)
    return replace(result, best=best, gap=gap)
