"""The slowdown of whole training steps on a calibrated machine, compared with its kernels and messages alone.

The calibration repeats single kernels and messages, which then find their data in caches. In a step other data have
replaced these, so products wait for memory; Python walks through modules and the schedule of a pipeline; and ranks
arrive at a message at different moments, which makes each message longer whatever its size. Plans of three reference
models, from steps of almost only launches and messages to steps of mostly products, are therefore run on all devices,
and eight factors are fitted to their step times.

A machine whose processors are shared with others also has fast and slow minutes: the same step took 1.5 times as long
half an hour later. One such plan measures that (`drift`).
"""

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwise.executor.calibration.figures import BATCH, MEASURED, SEQUENCE
from meshwise.executor.job import Job
from meshwise.executor.launch.run import WARM_UP, run_jobs, step_times, typical
from meshwise.simulator.calibration.least_squares import least_squares
from meshwise.simulator.collective import CollectiveCurve
from meshwise.simulator.engine import simulate
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.lowering import lower
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.plan.recomputation import Recompute

MODELS = (
    MEASURED,
    replace(MEASURED, hidden=96, ffn=384, name=""),
    replace(MEASURED, hidden=32, ffn=64, name=""),
)
"""Reference models: steps of the first are almost all products; of the last, almost all launches and attention."""
STEPS = 12
"""Timed steps of a plan after warm-up, whose median counts."""
_MOST = 16.0
_PRIOR = 0.001
"""Weight of the prior that a factor is 1, relative to a plan's step: it decides only where no plan tells anything."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Factors on the times that a calibration measured, by figure.

    ``compute`` is for arithmetic and ``memory`` for what kernels read and write. ``latency`` is for the time of a
    collective's fastest message, which every message has, and ``transfer`` for the further time of larger messages.
    """

    compute: float = 1.0
    memory: float = 1.0
    launch: float = 1.0
    sharded_launch: float = 1.0
    unit_launch: float = 1.0
    recompute_launch: float = 1.0
    latency: float = 1.0
    transfer: float = 1.0


def pace(machine: Cluster) -> Pace:
    """Run the reference plans on all devices of this machine and return the slowdown fitted to their step times.

    Raises
    ------
    ExecutionError
        Where a rank fails.
    """
    problems = {spec: _problem(spec, machine) for spec in MODELS}
    chosen = [(spec, plan) for spec, problem in problems.items() for plan in _plans(problem)]
    measured = _measured([_job(problems[spec], spec, plan) for spec, plan in chosen])

    # in logarithms factors stay positive, and half as long weighs the same as twice as long
    def residuals(logarithms: NDArray[np.float64]) -> NDArray[np.float64]:
        there = at_pace(machine, Pace(*np.exp(logarithms).tolist()))
        steps = [_predicted(replace(problems[spec], cluster=there), plan) for spec, plan in chosen]
        return np.array([*np.log(np.array(steps) / measured), *logarithms])

    count = len(fields(Pace))
    weights = np.array([1.0] * len(chosen) + [_PRIOR] * count)
    bounds = np.full(count, -math.log(_MOST)), np.full(count, math.log(_MOST))
    found = least_squares(residuals, np.zeros(count), bounds, weights, outlier=0.5, max_evaluations=12)[0]
    return Pace(*np.exp(found).tolist())


def drift(machine: Cluster) -> float:
    """Run one plan that almost only computes, and return its step time now over the predicted one.

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
    """Return a calibrated machine with a slowdown on its devices and measured collectives.

    >>> from meshwise.simulator.catalog import cluster
    >>> machine = cluster("dgx-h100")
    >>> slow = at_pace(machine, Pace(memory=2.0))
    >>> machine.accelerator.memory_bandwidth / slow.accelerator.memory_bandwidth
    2.0
    """
    curves = tuple(_slowed_curve(curve, pace) for curve in machine.collectives)
    return replace(machine.with_accelerators(lambda each: _slowed(each, pace)), collectives=curves)


def slower(machine: Cluster, factor: float) -> Cluster:
    """Return a calibrated machine on which everything takes ``factor`` times as long."""
    curves = tuple(curve.at_speed(1 / factor) for curve in machine.collectives)
    return replace(machine.with_accelerators(lambda each: each.at_speed(1 / factor)), collectives=curves)


def _slowed(device: Accelerator, pace: Pace) -> Accelerator:
    return replace(
        device,
        peak_flops=tuple((dtype, rate / pace.compute) for dtype, rate in device.peak_flops),
        memory_bandwidth=device.memory_bandwidth / pace.memory,
        attention=replace(device.attention, launch=device.attention.launch * pace.launch),
        launch=device.launch * pace.launch,
        optimizer_launch=device.optimizer_launch * pace.launch,
        sharded_launch=device.sharded_launch * pace.sharded_launch,
        unit_launch=device.unit_launch * pace.unit_launch,
        recompute_launch=device.recompute_launch * pace.recompute_launch,
    )


def _slowed_curve(curve: CollectiveCurve, pace: Pace) -> CollectiveCurve:
    fastest = min(seconds for _, seconds in curve.points)
    slowed = ((size, pace.latency * fastest + pace.transfer * (took - fastest)) for size, took in curve.points)
    return replace(curve, points=tuple(slowed))


def _problem(spec: Transformer, machine: Cluster) -> Problem:
    training = Training(2 * BATCH * machine.num_devices, SEQUENCE, "fp32", framework="torch")
    return Problem(build(spec, SEQUENCE, "fp32"), machine, training)


def _plans(problem: Problem) -> Iterator[Plan]:
    """Yield plans that use all ranks for one kind of parallelism each; the data-parallel one is first."""
    ranks = problem.cluster.num_devices
    yield complete(problem, Layout(data=ranks, microbatch=BATCH))
    if ranks > 1:
        yield complete(problem, Layout(data=ranks, microbatch=BATCH, zero=3))
    if 1 < ranks <= MEASURED.heads:
        yield complete(problem, Layout(tensor=ranks, microbatch=BATCH))
    if 1 < ranks <= MEASURED.layers:
        yield complete(problem, Layout(pipeline=ranks, microbatch=BATCH, schedule="1f1b"))
    yield complete(problem, Layout(data=ranks, microbatch=BATCH, recompute=Recompute.FULL))


def _job(problem: Problem, spec: Transformer, plan: Plan) -> Job:
    return Job(spec, problem.training, plan, STEPS + WARM_UP, profile=False)


def _measured(jobs: Sequence[Job]) -> list[float]:
    """Run jobs one after the other and return the typical seconds of a step of each."""
    with tempfile.TemporaryDirectory(prefix="meshwise-") as name:
        pairs = [(job, Path(name) / str(number)) for number, job in enumerate(jobs)]
        run_jobs(pairs)
        return [typical(step_times(job.plan, folder)) for job, folder in pairs]


def _predicted(problem: Problem, plan: Plan) -> float:
    return simulate(lower(problem, plan), "discrete_event").step_time
