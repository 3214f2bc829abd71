"""Recalibration: a few figures of a cluster fitted again to runs of whole plans.

A calibration measures a machine for only half a minute, and whatever else the machine does then distorts it. Runs of
plans measure again how long passes, updates and each collective take. Four figures of the device are fitted together
to the passes of all runs: the rate of matrix products, the memory bandwidth, the time of a launch and the rate of the
optimizer. Every collective and group size has one factor on its curve. No plan has a figure of its own, so an error of
the model in a plan's structure stays visible.

The profiler slows what it measures: spans are scaled to the step time measured without it.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray

from meshwise.executor.recording.timeline import sum_busy_times
from meshwise.simulator.brief import brief_repr
from meshwise.simulator.calibration.least_squares import least_squares
from meshwise.simulator.collective import Collective, CollectiveCurve
from meshwise.simulator.engine import simulate
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.program import StreamKind, TaskKind
from meshwise.simulator.spans import Span
from meshwise.simulator.timeline import Timeline
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem

FIGURES = ("products", "memory", "launch", "optimizer")
"""The fitted figures of a device: factors on the times of matrix products, memory traffic, launches and the
optimizer."""
MAX_FACTOR = 16.0
"""Largest factor on a figure."""
MIN_SPANS = 3
"""Least spans of a collective to which its curve is fitted."""
_PRIOR = 0.02
"""Weight of a figure's old value, relative to all passes of a run: it decides only where no run tells anything."""
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PlanRun:
    """A plan that ran: the profiled spans of one step, and the seconds of the median step without the profiler."""

    plan: Plan
    timeline: Timeline
    step_time: float

    __repr__ = brief_repr()

    @property
    def scale(self) -> float:
        """Factor from seconds under the profiler to seconds without it."""
        return self.step_time / self.timeline.step_time


@dataclass(frozen=True, slots=True)
class Refit:
    """A cluster fitted to runs, and the factors on times by figure: of the device, and of collectives."""

    cluster: Cluster
    device: tuple[tuple[str, float], ...]
    collectives: tuple[tuple[str, float], ...]

    __repr__ = brief_repr()


def refit_cluster(problem: Problem, runs: Sequence[PlanRun]) -> Refit:
    """Return the cluster of a problem with its figures fitted to ``runs`` on it.

    Raises
    ------
    ValueError
        Where there are no runs.
    """
    if not runs:
        raise ValueError("a calibration is fitted to at least one run, met none")
    factors = np.exp(_fit_device(problem, runs))
    device = tuple(zip(FIGURES, factors.tolist(), strict=True))
    curves, collectives = _fit_curves(problem.cluster, runs)
    return Refit(replace(slow_cluster(problem.cluster, **dict(device)), collectives=curves), device, collectives)


def predict_step(problem: Problem, cluster: Cluster, plan: Plan) -> float:
    """Return the predicted seconds of a step of ``plan`` on ``cluster`` in place of the problem's own."""
    return simulate(lower(replace(problem, cluster=cluster), plan), "discrete_event").step_time


def slow_cluster(cluster: Cluster, products: float, memory: float, launch: float, optimizer: float) -> Cluster:
    """Return a cluster with these factors on the times of its devices for products, memory, launches and optimizer."""
    return cluster.with_accelerators(lambda device: _slow_device(device, products, memory, launch, optimizer))


def _slow_device(device: Accelerator, products: float, memory: float, launch: float, optimizer: float) -> Accelerator:
    fractions = dict(device.kernel_bandwidth)
    update_fraction = fractions.get("optimizer", device.kernel_bandwidth_default)
    return replace(
        device,
        peak_flops=tuple((dtype, rate / products) for dtype, rate in device.peak_flops),
        memory_bandwidth=device.memory_bandwidth / memory,
        launch=device.launch * launch,
        sharded_launch=device.sharded_launch * launch,
        unit_launch=device.unit_launch * launch,
        recompute_launch=device.recompute_launch * launch,
        optimizer_launch=device.optimizer_launch * optimizer,
        kernel_bandwidth=tuple((fractions | {"optimizer": update_fraction * memory / optimizer}).items()),
    )


def _fit_device(problem: Problem, runs: Sequence[PlanRun]) -> FloatArray:
    """Return the fitted logarithms of the factors on the device's figures."""
    busy_times = [{kind: run.scale * seconds for kind, seconds in sum_busy_times(run.timeline).items()} for run in runs]
    span_weights = [
        seconds / run.step_time
        for run, busy in zip(runs, busy_times, strict=True)
        for _, seconds in _list_computing(busy)
    ]

    def residuals(logarithms: FloatArray) -> FloatArray:
        cluster = slow_cluster(problem.cluster, *np.exp(logarithms).tolist())
        log_ratios: list[float] = []
        for run, busy in zip(runs, busy_times, strict=True):
            timeline = simulate(lower(replace(problem, cluster=cluster), run.plan), "discrete_event")
            predicted_times = sum_busy_times(timeline)
            log_ratios += [
                math.log(predicted_times[kind] / seconds) if kind in predicted_times else 0.0
                for kind, seconds in _list_computing(busy)
            ]
        return np.array([*log_ratios, *logarithms])

    weights = np.array([*span_weights, *[_PRIOR * len(runs)] * len(FIGURES)])
    bounds = np.full(len(FIGURES), -math.log(MAX_FACTOR)), np.full(len(FIGURES), math.log(MAX_FACTOR))
    return least_squares(residuals, np.zeros(len(FIGURES)), bounds, weights, outlier=0.5, max_evaluations=8)[0]


def _list_computing(busy: dict[TaskKind, float]) -> list[tuple[TaskKind, float]]:
    return [(kind, seconds) for kind, seconds in busy.items() if kind.computes]


def _fit_curves(
    cluster: Cluster, runs: Sequence[PlanRun]
) -> tuple[tuple[CollectiveCurve, ...], tuple[tuple[str, float], ...]]:
    """Return the curves of a cluster fitted to runs, and the factors on those that it had.

    A collective without a curve for its group size gets the measured times as its curve.
    """
    times: dict[tuple[Collective, int], list[tuple[float, float]]] = {}
    for run in runs:
        for collective, ranks, span in _list_messages(run.plan, run.timeline.spans):
            times.setdefault((collective, ranks), []).append((span.bytes, span.duration * run.scale))
    times = {key: spans for key, spans in times.items() if len(spans) >= MIN_SPANS}
    curves_by_key, factors = {(curve.collective, curve.ranks): curve for curve in cluster.collectives}, []
    for key, spans in times.items():
        if key in curves_by_key:
            factor = math.exp(median(math.log(seconds / curves_by_key[key].time(size)) for size, seconds in spans))
            factor = min(max(factor, 1 / MAX_FACTOR), MAX_FACTOR)
            factors.append((f"{key[0]} over {key[1]} ranks", factor))
            curves_by_key[key] = curves_by_key[key].at_speed(1 / factor)
        else:
            sizes = sorted({size for size, _ in spans})
            points = tuple(
                (size, median(duration for other_size, duration in spans if other_size == size)) for size in sizes
            )
            curves_by_key[key] = CollectiveCurve(*key, points)
    return tuple(curves_by_key.values()), tuple(factors)


def _list_messages(plan: Plan, spans: Iterable[Span]) -> Iterator[tuple[Collective, int, Span]]:
    """Yield the spans of collectives and transfers, with the collective and its number of ranks."""
    for span in spans:
        name = span.operators.rpartition(": ")[2].partition(" ")[0]
        if span.bytes and span.duration > 0 and name in tuple(Collective):
            yield Collective(name), _count_group_ranks(plan, span), span


def _count_group_ranks(plan: Plan, span: Span) -> int:
    if span.kind is TaskKind.PIPELINE_COMMUNICATION:
        return 2
    if span.kind is TaskKind.DATA_COMMUNICATION and "replicated" not in span.operators:
        sharded = span.stream is StreamKind.GATHER or span.operators.startswith("reduce_scatter")
        return plan.shards if sharded else plan.replicas
    return plan.tensor
