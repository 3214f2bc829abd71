"""How long training steps take on a calibrated machine over what its kernels and messages alone say.

Kernels that a calibration repeats find their inputs in caches and their memory mapped; in a step others have been
there in between, and Python walks through modules and the schedule of a pipeline; and ranks that have computed come to
a message at different moments, so that each costs more, whatever its size. So plans of two reference models are run on
all devices, one so small that launches count and one whose products do, and five factors are fitted to their step
times. And a machine of which others share the processors has fast and slow minutes: the same step took 1.5 times as
long half an hour later, which one such plan tells (`drift`).
"""

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from executor.calibration_sizes import BATCH, MEASURED, SEQUENCE
from executor.job import Job
from executor.run import WARM_UP, run_jobs, step_times, typical
from simulator.accelerator import Accelerator
from simulator.calibration.least_squares import least_squares
from simulator.cluster import Cluster
from simulator.engine import simulate
from simulator.models.transformer import Transformer, build
from strategies.completion import complete
from strategies.layout import Layout
from strategies.lowering import lower
from strategies.plan import Plan
from strategies.problem import Problem
from strategies.training import Training

SMALL = replace(MEASURED, hidden=32, ffn=64, name="")
"""A model whose steps are almost all launches."""
STEPS = 12
"""Steps of a plan of which the median counts, after some to warm up."""
_MOST = 16.0
_PRIOR = 0.001
"""Weight of a factor of 1, where a plan's step weighs 1: it decides where no plan says anything."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How many times as long as a calibration says the figures of these names take.

    ``work`` is that of kernels, ``latency`` that of the fastest message of a collective, which all its messages have.
    """

    work: float = 1.0
    launch: float = 1.0
    sharded_launch: float = 1.0
    unit_launch: float = 1.0
    latency: float = 1.0


def pace(machine: Cluster) -> Pace:
    """Return the pace of steps on all devices of a machine, now.

    Raises
    ------
    ExecutionError
        Where a rank fails.
    """
    problems = {spec: _problem(spec, machine) for spec in (SMALL, MEASURED)}
    chosen = [(spec, plan) for spec, problem in problems.items() for plan in _plans(problem)]
    measured = _measured([_job(problems[spec], spec, plan) for spec, plan in chosen])

    def residuals(logarithms: NDArray[np.float64]) -> NDArray[np.float64]:
        there = at_pace(machine, Pace(*np.exp(logarithms).tolist()))
        steps = [_predicted(replace(problems[spec], cluster=there), plan) for spec, plan in chosen]
        return np.array([*np.log(np.array(steps) / measured), *logarithms])

    count = len(fields(Pace))
    weights = np.array([1.0] * len(chosen) + [_PRIOR] * count)
    bounds = np.full(count, -math.log(_MOST)), np.full(count, math.log(_MOST))
    found = least_squares(residuals, np.zeros(count), bounds, weights, rounds=12, outlier=0.5)[0]
    return Pace(*np.exp(found).tolist())


def drift(machine: Cluster) -> float:
    """Return how many times as long as predicted a step takes now in which ranks compute almost all of the time.

    Raises
    ------
    ExecutionError
        Where a rank fails.
    """
    problem = _problem(MEASURED, machine)
    plan = next(_plans(problem))
    (measured,) = _measured([_job(problem, MEASURED, plan)])
    return measured / _predicted(problem, plan)


def at_pace(machine: Cluster, pace: Pace) -> Cluster:
    """Return a calibrated machine whose devices and measured collectives have a pace.

    >>> from simulator.catalog import cluster
    >>> machine = cluster("dgx-h100")
    >>> slow = at_pace(machine, Pace(work=2.0))
    >>> machine.accelerator.memory_bandwidth / slow.accelerator.memory_bandwidth
    2.0
    """
    curves = []
    for curve in machine.collectives:
        more = (pace.latency - 1) * min(seconds for _, seconds in curve.points)
        curves.append(replace(curve, points=tuple((size, seconds + more) for size, seconds in curve.points)))
    return replace(machine.with_accelerators(lambda each: _slowed(each, pace)), collectives=tuple(curves))


def slower(machine: Cluster, factor: float) -> Cluster:
    """Return a calibrated machine on which everything takes ``factor`` times as long."""
    curves = tuple(curve.at_speed(1 / factor) for curve in machine.collectives)
    return replace(machine.with_accelerators(lambda each: each.at_speed(1 / factor)), collectives=curves)


def _slowed(device: Accelerator, pace: Pace) -> Accelerator:
    return replace(
        device.at_speed(1 / pace.work),
        launch=device.launch * pace.launch,
        optimizer_launch=device.optimizer_launch * pace.launch,
        sharded_launch=device.sharded_launch * pace.sharded_launch,
        unit_launch=device.unit_launch * pace.unit_launch,
    )


def _problem(spec: Transformer, machine: Cluster) -> Problem:
    training = Training(2 * BATCH * machine.num_devices, SEQUENCE, "fp32", framework="torch")
    return Problem(build(spec, SEQUENCE, "fp32"), machine, training)


def _plans(problem: Problem) -> Iterator[Plan]:
    """Yield plans that use all ranks in one way each: data parallel first."""
    ranks = problem.cluster.num_devices
    yield complete(problem, Layout(data=ranks, microbatch=BATCH))
    if ranks > 1:
        yield complete(problem, Layout(data=ranks, microbatch=BATCH, zero=3))
    if 1 < ranks <= MEASURED.heads:
        yield complete(problem, Layout(tensor=ranks, microbatch=BATCH))
    if 1 < ranks <= MEASURED.layers:
        yield complete(problem, Layout(pipeline=ranks, microbatch=BATCH, schedule="1f1b"))


def _job(problem: Problem, spec: Transformer, plan: Plan) -> Job:
    return Job(spec, problem.training, plan, STEPS + WARM_UP, profile=False)


def _measured(jobs: Sequence[Job]) -> list[float]:
    """Return the seconds of a step of every job, run one after the other."""
    with tempfile.TemporaryDirectory(prefix="meshwise-") as name:
        pairs = [(job, Path(name) / str(number)) for number, job in enumerate(jobs)]
        run_jobs(pairs)
        return [typical(step_times(job.plan, folder)) for job, folder in pairs]


def _predicted(problem: Problem, plan: Plan) -> float:
    return simulate(lower(problem, plan), "discrete_event").step_time
