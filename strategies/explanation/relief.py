"""Changes of the plan, the training or the machine after which a plan that does not fit would fit, each simulated."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from math import ceil

from meshwise.simulator.engine import simulate
from meshwise.simulator.units import format_size
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.explanation.machine_parts import with_host_memory, with_memory
from meshwise.strategies.explanation.ranking import Ranking, fits, unlimited
from meshwise.strategies.lowering import lower
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout, Violation
from meshwise.strategies.plan.mesh import divisors
from meshwise.strategies.plan.offloading import OFFLOADS, Offloading, StepPlace
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.search.acceptance import Accepts
from meshwise.strategies.search.driver import OutOfTime
from meshwise.strategies.search.space import EVERYTHING, choices_of

GIB = 2.0**30

TRIED = 48
"""Layouts on which every change is tried, those that need least memory."""

FACTORS = (2, 4, 8, 16, 32, 64, 128)
"""Factors by which the number of nodes grows, until something fits."""

SIMULATED = 3
"""The same where only a simulation tells the memory of the changed layout."""


@dataclass(frozen=True, slots=True)
class Relief:
    """A change after which a plan fits.

    Parameters
    ----------
    change
        The change in words.
    step_time, peak_memory
        Seconds and bytes, by simulation.
    devices
        The number of devices of the plan.
    changes_machine
        Whether the plan needs other or more devices than the cluster has.
    problem
        The problem after the change.
    """

    change: str
    plan: Plan
    step_time: float
    peak_memory: float
    devices: int
    machine: bool
    problem: Problem

    @property
    def cost(self) -> float:
        """Device-seconds of a step."""
        return self.devices * self.step_time


class _Change:
    """A kind of change: the changed problem, and a function from a layout to the layouts tried instead, with names."""

    def __init__(
        self,
        problem: Problem,
        layouts: Callable[[Layout], Iterator[tuple[str, Layout]]],
        tried: int = TRIED,
        *,
        machine: bool = False,
    ) -> None:
        self.problem, self.layouts, self.tried, self.machine = problem, layouts, tried, machine


def reliefs(
    problem: Problem,
    tried: Sequence[Layout],
    count: int = 3,
    accepts: Accepts | None = None,
    seconds: Callable[[], float] = unlimited,
) -> tuple[Relief, ...]:
    """Return the changes after which one of some layouts fits, the cheapest first.

    Changes of the plan or the training come before changes of the machine; both are sorted by device-seconds per step.
    Of every kind of change only the cheapest is returned. Each has been simulated and fits.

    Parameters
    ----------
    layouts
        Layouts that do not fit, those that need least memory first.
    accepts
        Something that must accept the changed plans.
    seconds
        Returns the number of seconds left; when none are left, the other changes are not tried.
    """
    found = _more_memory(problem, tried[:TRIED])
    try:
        for change in _changes(problem):
            of_change = _best(change, tried, accepts, seconds)
            found += of_change
            if change.machine and of_change:
                break  # still more nodes fit too
    except OutOfTime:
        pass
    return tuple(sorted(found, key=lambda relief: (relief.machine, relief.cost, relief.change)))[:count]


def _best(
    change: _Change, tried: Sequence[Layout], accepts: Accepts | None, seconds: Callable[[], float]
) -> list[Relief]:
    """Return the cheapest plan that fits after a change, as a list of one; an empty list where none fits."""
    ranked = Ranking(change.problem, seconds=seconds)
    names: dict[Layout, str] = {}
    for layout in tried[: change.tried]:
        for name, other in change.layouts(layout):
            names.setdefault(other, name)
    for layout in names:
        ranked.look()
        if _first_violation(change.problem, layout) is None:
            plan = complete(change.problem, layout)
            if ranked.costs.fits(plan) and (accepts is None or not accepts.refusals(change.problem, plan)):
                ranked.add([layout])
    best = ranked.fastest(fits)
    if best is None:
        return []
    chosen = next(each.layout for each in ranked.candidates if complete(change.problem, each.layout) == best.plan)
    at = best.evaluation
    ranks, machine = best.plan.mesh.num_ranks, change.machine
    return [Relief(names[chosen], best.plan, at.step_time, at.peak_memory, ranks, machine, change.problem)]


def _first_violation(problem: Problem, layout: Layout) -> Violation | None:
    return next(violations(problem, layout), None)


def _more_memory(problem: Problem, tried: Sequence[Layout]) -> list[Relief]:
    """Return the layout that needs least, on devices and hosts with as much memory as it needs, in whole GiB."""
    costs = SimulatedCost(problem)
    plans = [complete(problem, layout) for layout in tried if _first_violation(problem, layout) is None]
    if not plans:
        return []
    least = min(plans, key=costs.peak_memory)
    timeline, cluster, names = simulate(lower(problem, least, costs=costs.costs)), problem.cluster, []
    for name, profiles, widened in (
        ("devices", timeline.memory, with_memory),
        ("hosts", timeline.host_memory, with_host_memory),
    ):
        peak = max((profile.peak for profile in profiles), default=0.0)
        if name == "devices":
            peak = max(problem.needed(device, peak) for device in cluster.accelerators)
        needed = ceil(peak / GIB) * GIB
        if any(profile.peak > profile.capacity for profile in profiles):
            cluster = widened(cluster, partial(max, needed))
            names.append(f"{name} with {format_size(needed)}")
    larger = replace(problem, cluster=cluster)
    found = SimulatedCost(larger).evaluate(least)
    if not found.fits:
        return []
    ranks = least.mesh.num_ranks
    return [Relief(" and ".join(names), least, found.step_time, found.peak_memory, ranks, True, larger)]


def _changes(problem: Problem) -> Iterator[_Change]:
    yield _Change(problem, partial(_recomputing, problem))
    yield _Change(problem, _sharing)
    yield _Change(problem, _smaller_microbatch)
    yield _Change(problem, partial(_together, problem), SIMULATED)
    yield _Change(problem, _model_parallel)
    for what in ("optimizer", "activations", "parameters"):
        yield _Change(problem, _offloading(what), TRIED if what == "optimizer" else SIMULATED)
    yield _Change(problem, _on_devices)
    training = problem.training
    if training.gradient_bytes > training.parameter_bytes:
        narrow = replace(problem, training=replace(training, gradient_precision="same"))
        yield _Change(narrow, lambda layout: iter([(f"gradients in {training.dtype}, less exact in sums", layout)]))
    for factor in FACTORS:
        try:
            more = replace(problem, cluster=problem.cluster.resized(problem.cluster.num_nodes * factor))
        except ValueError:
            return
        yield _Change(more, _more_nodes(factor, more.cluster.num_nodes), machine=True)


def _recomputing(problem: Problem, layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Yield the layout with each other usual recompute choice; nothing where it recomputes everything already."""
    if layout.recompute == Recompute.FULL:
        return
    usual = choices_of(problem, EVERYTHING).passes(layout)
    for recompute in dict.fromkeys(choice.recompute for choice in usual):
        if recompute not in (layout.recompute, Recompute.NONE):
            yield f"{recompute} recompute", replace(layout, recompute=recompute)


def _sharing(layout: Layout) -> Iterator[tuple[str, Layout]]:
    for level in range(layout.zero + 1, 4):
        if layout.data > 1:
            yield f"ZeRO-{level}", replace(layout, zero=level, gradient_reduction="all_reduce")


def _smaller_microbatch(layout: Layout) -> Iterator[tuple[str, Layout]]:
    if isinstance(layout.microbatch, int):
        for size in divisors(layout.microbatch)[:-1]:
            yield f"microbatch {size}", replace(layout, microbatch=size)


def _together(problem: Problem, layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Yield the layout with two or three changes at once: of ZeRO, of recomputation, and of the microbatch."""
    own = [("", layout)]
    for sharing, shared in own + list(_sharing(layout)):
        for recompute, recomputed in own + list(_recomputing(problem, shared)):
            for size, smaller in own + list(_smaller_microbatch(layout)):
                names = [name for name in (sharing, recompute, size) if name]
                if len(names) > 1:
                    changed = replace(recomputed if recompute else shared, microbatch=smaller.microbatch)
                    yield ", ".join(names), changed


def _model_parallel(layout: Layout) -> Iterator[tuple[str, Layout]]:
    for factor in (2, 3, 4, 8):
        if layout.data % factor == 0:
            for name in ("tensor", "pipeline"):
                degree = getattr(layout, name) * factor
                fewer = {"data": layout.data // factor, name: degree, "zero_shards": 0}
                for stages in ("even", "balanced"):
                    for sequence in {layout.sequence_parallel, layout.tensor > 1 or name == "tensor"}:
                        changed = replace(layout, **fewer, stages=stages, sequence_parallel=sequence)
                        yield f"{name} {degree} in place of {getattr(layout, name)}", changed


def _offloading(what: str) -> Callable[[Layout], Iterator[tuple[str, Layout]]]:
    def offloading(layout: Layout) -> Iterator[tuple[str, Layout]]:
        if not any(getattr(layout.offload, what)):
            own = {name: getattr(layout.offload, name) for name in ("optimizer", "parameters", "activations")}
            yield f"{what} offloaded to hosts", replace(layout, offload=Offloading(**own | {what: (1.0,)}))

    return offloading


def _on_devices(layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Yield the layout with some or all of its offloaded states back on devices."""
    away = [name for name in OFFLOADS if any(getattr(layout.offload, name))]
    for count in range(1, len(away) + 1):
        for names in combinations(away, count):
            step = StepPlace.HOST if "optimizer" in names else layout.offload.step
            offload = replace(layout.offload, **dict.fromkeys(names, ()), step=step)
            yield f"{', '.join(names)} kept on devices", replace(layout, offload=offload)


def _more_nodes(factor: int, nodes: int) -> Callable[[Layout], Iterator[tuple[str, Layout]]]:
    def more_nodes(layout: Layout) -> Iterator[tuple[str, Layout]]:
        for name in ("data", "tensor", "pipeline"):
            for stages in ("even", "balanced"):
                degree = getattr(layout, name) * factor
                for zero in sorted({layout.zero, 1, 3}):
                    wider = replace(layout, **{name: degree}, stages=stages, zero=zero)
                    yield f"{nodes} nodes: {name} {degree}, ZeRO-{zero}", wider

    return more_nodes
