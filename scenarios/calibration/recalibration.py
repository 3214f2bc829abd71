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

from meshwise.executor.recording.timeline import busy_by_kind
from meshwise.simulator.brief import brief
from meshwise.simulator.calibration.least_squares import least_squares
from meshwise.simulator.collective import Collective, CollectiveCurve
from meshwise.simulator.engine import simulate
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.program import StreamKind, TaskKind
from meshwise.simulator.spans import Span
from meshwise.simulator.timeline import Timeline
from meshwise.strategies.lowering import lower
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem

FIGURES = ("products", "memory", "launch", "optimizer")
"""The fitted figures of a device: factors on the times of matrix products, memory traffic, launches and the
optimizer."""
MOST = 16.0
"""Largest factor on a figure."""
LEAST_SPANS = 3
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

    __repr__ = brief()

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

    __repr__ = brief()


def refitted(problem: Problem, runs: Sequence[PlanRun]) -> Refit:
    """Return the cluster of a problem with its figures fitted to ``runs`` on it.

    Raises
    ------
    ValueError
        Where there are no runs.
    """
    if not runs:
        raise ValueError("a calibration is fitted to at least one run, met none")
    factors = np.exp(_device(problem, runs))
    device = tuple(zip(FIGURES, factors.tolist(), strict=True))
    curves, collectives = _curves(problem.cluster, runs)
    return Refit(replace(slowed(problem.cluster, **dict(device)), collectives=curves), device, collectives)


def predicted_step(problem: Problem, cluster: Cluster, plan: Plan) -> float:
    """Return the predicted seconds of a step of ``plan`` on ``cluster`` in place of the problem's own."""
    return simulate(lower(replace(problem, cluster=cluster), plan), "discrete_event").step_time


def slowed(cluster: Cluster, products: float, memory: float, launch: float, optimizer: float) -> Cluster:
    """Return a cluster with these factors on the times of its devices for products, memory, launches and optimizer."""
    return cluster.with_accelerators(lambda device: _slowed(device, products, memory, launch, optimizer))


def _slowed(device: Accelerator, products: float, memory: float, launch: float, optimizer: float) -> Accelerator:
    fractions = dict(device.kernel_bandwidth)
    updating = fractions.get("optimizer", device.kernel_bandwidth_default)
    return replace(
        device,
        peak_flops=tuple((dtype, rate / products) for dtype, rate in device.peak_flops),
        memory_bandwidth=device.memory_bandwidth / memory,
        launch=device.launch * launch,
        sharded_launch=device.sharded_launch * launch,
        unit_launch=device.unit_launch * launch,
        recompute_launch=device.recompute_launch * launch,
        optimizer_launch=device.optimizer_launch * optimizer,
        kernel_bandwidth=tuple((fractions | {"optimizer": updating * memory / optimizer}).items()),
    )


def _device(problem: Problem, runs: Sequence[PlanRun]) -> FloatArray:
    """Return the fitted logarithms of the factors on the device's figures."""
    measured = [{kind: each.scale * t for kind, t in busy_by_kind(each.timeline).items()} for each in runs]
    weight = [t / each.step_time for each, busy in zip(runs, measured, strict=True) for _, t in _computing(busy)]

    def residuals(logarithms: FloatArray) -> FloatArray:
        cluster = slowed(problem.cluster, *np.exp(logarithms).tolist())
        found: list[float] = []
        for each, busy in zip(runs, measured, strict=True):
            timeline = simulate(lower(replace(problem, cluster=cluster), each.plan), "discrete_event")
            predicted = busy_by_kind(timeline)
            found += [math.log(predicted[kind] / t) if kind in predicted else 0.0 for kind, t in _computing(busy)]
        return np.array([*found, *logarithms])

    weights = np.array([*weight, *[_PRIOR * len(runs)] * len(FIGURES)])
    bounds = np.full(len(FIGURES), -math.log(MOST)), np.full(len(FIGURES), math.log(MOST))
    return least_squares(residuals, np.zeros(len(FIGURES)), bounds, weights, outlier=0.5, max_evaluations=8)[0]


def _computing(busy: dict[TaskKind, float]) -> list[tuple[TaskKind, float]]:
    return [(kind, seconds) for kind, seconds in busy.items() if kind.computes]


def _curves(
    cluster: Cluster, runs: Sequence[PlanRun]
) -> tuple[tuple[CollectiveCurve, ...], tuple[tuple[str, float], ...]]:
    """Return the curves of a cluster fitted to runs, and the factors on those that it had.

    A collective without a curve for its group size gets the measured times as its curve.
    """
    times: dict[tuple[Collective, int], list[tuple[float, float]]] = {}
    for each in runs:
        for collective, ranks, span in _messages(each.plan, each.timeline.spans):
            times.setdefault((collective, ranks), []).append((span.bytes, span.duration * each.scale))
    times = {key: spans for key, spans in times.items() if len(spans) >= LEAST_SPANS}
    known, factors = {(curve.collective, curve.ranks): curve for curve in cluster.collectives}, []
    for key, spans in times.items():
        if key in known:
            factor = math.exp(median(math.log(seconds / known[key].time(size)) for size, seconds in spans))
            factor = min(max(factor, 1 / MOST), MOST)
            factors.append((f"{key[0]} over {key[1]} ranks", factor))
            known[key] = known[key].at_speed(1 / factor)
        else:
            sizes = sorted({size for size, _ in spans})
            points = tuple((size, median(t for other, t in spans if other == size)) for size in sizes)
            known[key] = CollectiveCurve(*key, points)
    return tuple(known.values()), tuple(factors)


def _messages(plan: Plan, spans: Iterable[Span]) -> Iterator[tuple[Collective, int, Span]]:
    """Yield the spans of collectives and transfers, with the collective and its number of ranks."""
    for span in spans:
        name = span.operators.rpartition(": ")[2].partition(" ")[0]
        if span.bytes and span.duration > 0 and name in tuple(Collective):
            yield Collective(name), _group(plan, span), span


def _group(plan: Plan, span: Span) -> int:
    if span.kind is TaskKind.PIPELINE_COMMUNICATION:
        return 2
    if span.kind is TaskKind.DATA_COMMUNICATION and "replicated" not in span.operators:
        sharded = span.stream is StreamKind.GATHER or span.operators.startswith("reduce_scatter")
        return plan.shards if sharded else plan.replicas
    return plan.tensor
