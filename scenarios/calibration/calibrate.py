"""Calibration: measures this machine as a `Cluster` with which the simulator can predict runs on it.

Single kernels and messages are measured first. A calibration repeats them, and then finds their data in caches. In a
step other data have replaced these, so products wait for memory; Python walks through modules and the schedule of a
pipeline; and ranks arrive at a message at different moments, which makes each message longer whatever its size. Plans
of three reference models, from steps of almost only launches and messages to steps of mostly products, are therefore
run on all devices, and eight factors are fitted to their step times.

A machine whose processors are shared with others also has fast and slow minutes: the same step took 1.5 times as long
half an hour later. One such plan measures that (`drift`).
"""

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwise.executor.calibration.cores import measure_cores
from meshwise.executor.calibration.figures import BATCH, MEASURED_MODEL, SEQUENCE
from meshwise.executor.job import Job
from meshwise.executor.launch.run import WARM_UP, compute_typical_time, read_step_times, run_jobs
from meshwise.scenarios.calibration.recalibration import predict_step
from meshwise.simulator.calibration.least_squares import least_squares
from meshwise.simulator.collective import CollectiveCurve
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.plan.recomputation import Recompute

MODELS = (
    MEASURED_MODEL,
    replace(MEASURED_MODEL, hidden=96, ffn=384, name=""),
    replace(MEASURED_MODEL, hidden=32, ffn=64, name=""),
)
"""Reference models: steps of the first are almost all products; of the last, almost all launches and attention."""
STEPS = 12
"""Timed steps of a plan after warm-up, whose median counts."""
_MAX_FACTOR = 16.0
_PRIOR = 0.001
"""Weight of the prior that a factor is 1, relative to a plan's step: it decides only where no plan tells anything."""


@dataclass(frozen=True, slots=True)
class Slowdown:
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


def calibrate(*, processes: int = 2, seconds: float = 20.0, progress: Callable[[str], None] | None = None) -> Cluster:
    """Measure this machine and return it as a cluster of ``processes`` accelerators: cores with one thread each.

    All cores are measured while all are busy, as in training.

    Parameters
    ----------
    seconds
        About how long to measure kernels and messages; some seconds to start and some training steps come on top.
    progress
        Called with a word about the current measurement.

    Raises
    ------
    ValueError
        Where there is no process or no time.
    """
    cores = measure_cores(processes=processes, seconds=seconds, progress=progress)
    if progress is not None:
        progress("training steps")
    return with_slowdown(cores, measure_slowdown(cores))


def measure_slowdown(machine: Cluster) -> Slowdown:
    """Run the reference plans on all devices of this machine and return the slowdown fitted to their step times.

    Raises
    ------
    ExecutionError
        Where a rank fails.
    """
    problems = {spec: _build_problem(spec, machine) for spec in MODELS}
    spec_plans = [(spec, plan) for spec, problem in problems.items() for plan in _list_plans(problem)]
    measured_times = _measured([_build_job(problems[spec], spec, plan) for spec, plan in spec_plans])

    # in logarithms factors stay positive, and half as long weighs the same as twice as long
    def residuals(logarithms: NDArray[np.float64]) -> NDArray[np.float64]:
        slowed_machine = with_slowdown(machine, Slowdown(*np.exp(logarithms).tolist()))
        steps = [predict_step(problems[spec], slowed_machine, plan) for spec, plan in spec_plans]
        return np.array([*np.log(np.array(steps) / measured_times), *logarithms])

    count = len(fields(Slowdown))
    weights = np.array([1.0] * len(spec_plans) + [_PRIOR] * count)
    bounds = np.full(count, -math.log(_MAX_FACTOR)), np.full(count, math.log(_MAX_FACTOR))
    logarithms = least_squares(residuals, np.zeros(count), bounds, weights, outlier=0.5, max_evaluations=12)[0]
    return Slowdown(*np.exp(logarithms).tolist())


def drift(machine: Cluster) -> float:
    """Run one plan that almost only computes, and return its step time now over the predicted one.

    Raises
    ------
    ExecutionError
        Where a rank fails.
    """
    problem = _build_problem(MEASURED_MODEL, machine)
    plan = next(_list_plans(problem))
    (measured_time,) = _measured([_build_job(problem, MEASURED_MODEL, plan)])
    return measured_time / predict_step(problem, machine, plan)


def with_slowdown(machine: Cluster, slowdown: Slowdown) -> Cluster:
    """Return a calibrated machine with a slowdown on its devices and measured collectives.

    >>> from meshwise.simulator.catalog import cluster
    >>> machine = cluster("dgx-h100")
    >>> slow = with_slowdown(machine, Slowdown(memory=2.0))
    >>> machine.accelerator.memory_bandwidth / slow.accelerator.memory_bandwidth
    2.0
    """
    curves = tuple(slow_curve(curve, slowdown.latency, slowdown.transfer) for curve in machine.collectives)
    return replace(machine.with_accelerators(lambda device: _slow_device(device, slowdown)), collectives=curves)


def slow_down(machine: Cluster, factor: float) -> Cluster:
    """Return a calibrated machine on which everything takes ``factor`` times as long."""
    curves = tuple(curve.at_speed(1 / factor) for curve in machine.collectives)
    return replace(machine.with_accelerators(lambda device: device.at_speed(1 / factor)), collectives=curves)


def _slow_device(device: Accelerator, slowdown: Slowdown) -> Accelerator:
    return replace(
        device,
        peak_flops=tuple((dtype, rate / slowdown.compute) for dtype, rate in device.peak_flops),
        memory_bandwidth=device.memory_bandwidth / slowdown.memory,
        attention=replace(device.attention, launch=device.attention.launch * slowdown.launch),
        launch=device.launch * slowdown.launch,
        optimizer_launch=device.optimizer_launch * slowdown.launch,
        sharded_launch=device.sharded_launch * slowdown.sharded_launch,
        unit_launch=device.unit_launch * slowdown.unit_launch,
        recompute_launch=device.recompute_launch * slowdown.recompute_launch,
    )


def slow_curve(curve: CollectiveCurve, latency: float, transfer: float) -> CollectiveCurve:
    """Return a curve with factors on the time of its fastest message, and on the further time of larger messages."""
    fastest = min(seconds for _, seconds in curve.points)
    slowed = ((size, latency * fastest + transfer * (duration - fastest)) for size, duration in curve.points)
    return replace(curve, points=tuple(slowed))


def _build_problem(spec: Transformer, machine: Cluster) -> Problem:
    training = Training(2 * BATCH * machine.num_devices, SEQUENCE, "fp32", framework="torch")
    return Problem(build(spec, SEQUENCE, "fp32"), machine, training)


def _list_plans(problem: Problem) -> Iterator[Plan]:
    """Yield plans that use all ranks for one kind of parallelism each; the data-parallel one is first."""
    ranks = problem.cluster.num_devices
    yield complete(problem, Layout(data=ranks, microbatch=BATCH))
    if ranks > 1:
        yield complete(problem, Layout(data=ranks, microbatch=BATCH, zero=3))
    if 1 < ranks <= MEASURED_MODEL.heads:
        yield complete(problem, Layout(tensor=ranks, microbatch=BATCH))
    if 1 < ranks <= MEASURED_MODEL.layers:
        yield complete(problem, Layout(pipeline=ranks, microbatch=BATCH, schedule="1f1b"))
    yield complete(problem, Layout(data=ranks, microbatch=BATCH, recompute=Recompute.FULL))


def _build_job(problem: Problem, spec: Transformer, plan: Plan) -> Job:
    return Job(spec, problem.training, plan, STEPS + WARM_UP, profile=False)


def _measured(jobs: Sequence[Job]) -> list[float]:
    """Run jobs one after the other and return the typical seconds of a step of each."""
    with tempfile.TemporaryDirectory(prefix="meshwise-") as name:
        pairs = [(job, Path(name) / str(number)) for number, job in enumerate(jobs)]
        run_jobs(pairs)
        return [compute_typical_time(read_step_times(job.plan, folder)) for job, folder in pairs]
