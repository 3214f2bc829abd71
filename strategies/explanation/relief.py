"""Changes of the plan, the training or the machine after which a plan that does not fit would fit, each simulated."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, product
from math import ceil
from typing import NamedTuple

from meshwise.simulator.deadline import TimeLeft, unlimited_seconds
from meshwise.simulator.engine import simulate
from meshwise.simulator.units import format_size
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.explanation.machine_parts import with_host_memory, with_memory
from meshwise.strategies.explanation.ranking import Ranking, fits
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.mesh import divisors
from meshwise.strategies.plan.offloading import OFFLOADS, Offloading, StepPlace
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.search.acceptance import Acceptor
from meshwise.strategies.search.proposals import OutOfTime
from meshwise.strategies.search.space import EVERYTHING, find_choices
from meshwise.strategies.search.table_search import has_bags
from meshwise.strategies.tables.embeddings import TableCut, TablePlacement

GIB = 2.0**30

MAX_TRIED = 48
"""Layouts on which every change is tried, those that need least memory."""

NODE_FACTORS = (2, 4, 8, 16, 32, 64, 128)
"""Factors by which the number of nodes grows, until something fits."""

MAX_SIMULATED = 3
"""The same where only a simulation tells the memory of the changed layout."""


@dataclass(frozen=True, slots=True)
class Relief:
    """A change, in words, after which a plan fits, with its seconds and bytes by simulation.

    ``changes_machine`` says whether the plan needs other or more devices than the cluster has. ``problem`` is the one
    after the change.
    """

    change: str
    plan: Plan
    step_time: float
    peak_memory: float
    changes_machine: bool
    problem: Problem

    @property
    def devices(self) -> int:
        """The number of devices of the plan."""
        return self.plan.mesh.num_ranks

    @property
    def cost(self) -> float:
        """Device-seconds of a step."""
        return self.devices * self.step_time


class _Change(NamedTuple):
    """A kind of change: the changed problem, and a function from a layout to the layouts tried instead, with names."""

    problem: Problem
    list_layouts: Callable[[Layout], Iterator[tuple[str, Layout]]]
    max_tried: int = MAX_TRIED
    changes_machine: bool = False


def list_reliefs(
    problem: Problem,
    layouts: Sequence[Layout],
    count: int = 3,
    accepts: Acceptor | None = None,
    seconds: TimeLeft = unlimited_seconds,
) -> tuple[Relief, ...]:
    """Return the changes after which one of some layouts fits, the cheapest first.

    Changes of the plan or the training come before changes of the machine; both are sorted by device-seconds per step.
    Of every kind of change only the cheapest is returned. Each has been simulated and fits.

    ``layouts`` do not fit, those that need least memory come first. ``accepts`` must accept the changed plans.
    ``seconds`` returns the number of seconds left; when none are left, the other changes are not tried.
    """
    results = _add_memory(problem, layouts[:MAX_TRIED])
    try:
        for change in _list_changes(problem):
            change_reliefs = _find_best(change, layouts, accepts, seconds)
            results += change_reliefs
            if change.changes_machine and change_reliefs:
                break  # still more nodes fit too
    except OutOfTime:
        pass
    return tuple(sorted(results, key=lambda relief: (relief.changes_machine, relief.cost, relief.change)))[:count]


def _find_best(change: _Change, layouts: Sequence[Layout], accepts: Acceptor | None, seconds: TimeLeft) -> list[Relief]:
    """Return the cheapest plan that fits after a change, as a list of one; an empty list where none fits."""
    plan_ranking = Ranking(SimulatedCost(change.problem), seconds=seconds)
    names: dict[Layout, str] = {}
    for layout in layouts[: change.max_tried]:
        for name, new_layout in change.list_layouts(layout):
            names.setdefault(new_layout, name)
    for layout in names:
        plan_ranking.check_time()
        if _is_legal(change.problem, layout):
            plan = complete(change.problem, layout)
            if plan_ranking.costs.fits(plan) and (accepts is None or not accepts.list_refusals(change.problem, plan)):
                plan_ranking.add_layouts([layout])
    best_trial = plan_ranking.find_fastest(fits)
    if best_trial is None:
        return []
    name, evaluation = names[plan_ranking.find_layout(best_trial.plan)], best_trial.evaluation
    time, peak = evaluation.step_time, evaluation.peak_memory
    return [Relief(name, best_trial.plan, time, peak, change.changes_machine, change.problem)]


def _is_legal(problem: Problem, layout: Layout) -> bool:
    return next(violations(problem, layout), None) is None


def _add_memory(problem: Problem, layouts: Sequence[Layout]) -> list[Relief]:
    """Return the layout that needs least, on devices and hosts with as much memory as it needs, in whole GiB."""
    costs = SimulatedCost(problem)
    plans = [complete(problem, layout) for layout in layouts if _is_legal(problem, layout)]
    if not plans:
        return []
    least_plan = min(plans, key=costs.peak_memory)
    timeline, cluster, names = simulate(lower(problem, least_plan, costs=costs.costs)), problem.cluster, []
    for name, profiles, change_memory in (
        ("devices", timeline.memory, with_memory),
        ("hosts", timeline.host_memory, with_host_memory),
    ):
        peak = max((profile.peak for profile in profiles), default=0.0)
        if name == "devices":
            peak = max(problem.needed_memory(device, peak) for device in cluster.accelerators)
        needed_memory = ceil(peak / GIB) * GIB
        if any(profile.peak > profile.capacity for profile in profiles):
            cluster = change_memory(cluster, partial(max, needed_memory))
            names.append(f"{name} with {format_size(needed_memory)}")
    larger_problem = replace(problem, cluster=cluster)
    evaluation = SimulatedCost(larger_problem).evaluate(least_plan)
    if not evaluation.fits:
        return []
    time, peak = evaluation.step_time, evaluation.peak_memory
    return [Relief(" and ".join(names), least_plan, time, peak, True, larger_problem)]


def _list_changes(problem: Problem) -> Iterator[_Change]:
    yield _Change(problem, partial(_list_recompute_changes, problem))
    yield _Change(problem, _list_zero_changes)
    yield _Change(problem, _list_microbatch_changes)
    yield _Change(problem, partial(_list_joint_changes, problem), MAX_SIMULATED)
    yield _Change(problem, _list_degree_changes)
    for kind in ("optimizer", "activations", "parameters"):
        yield _Change(
            problem, partial(_list_offload_changes, kind), MAX_TRIED if kind == "optimizer" else MAX_SIMULATED
        )
    yield _Change(problem, _list_device_changes)
    if has_bags(problem):
        yield _Change(problem, _list_table_changes)
    training = problem.training
    if training.gradient_bytes > training.parameter_bytes:
        narrow_problem = replace(problem, training=replace(training, gradient_precision="same"))
        name = f"gradients in {training.dtype}, less exact in sums"
        yield _Change(narrow_problem, lambda layout: iter([(name, layout)]))
    for factor in NODE_FACTORS:
        try:
            larger_problem = replace(problem, cluster=problem.cluster.with_size(problem.cluster.num_nodes * factor))
        except ValueError:
            return
        list_layouts = partial(_list_node_changes, factor, larger_problem.cluster.num_nodes)
        yield _Change(larger_problem, list_layouts, changes_machine=True)


def _list_recompute_changes(problem: Problem, layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Yield the layout with each other usual recompute choice; nothing where it recomputes everything already."""
    if layout.recompute == Recompute.FULL:
        return
    usual_passes = find_choices(problem, EVERYTHING).list_passes(layout)
    for recompute in dict.fromkeys(choice.recompute for choice in usual_passes):
        if recompute not in (layout.recompute, Recompute.NONE):
            yield f"{recompute} recompute", replace(layout, recompute=recompute)


def _list_zero_changes(layout: Layout) -> Iterator[tuple[str, Layout]]:
    for level in range(layout.zero + 1, 4):
        if layout.data > 1:
            yield f"ZeRO-{level}", replace(layout, zero=level, gradient_reduction="all_reduce")


def _list_microbatch_changes(layout: Layout) -> Iterator[tuple[str, Layout]]:
    if isinstance(layout.microbatch, int):
        for size in divisors(layout.microbatch)[:-1]:
            yield f"microbatch {size}", replace(layout, microbatch=size)


def _list_joint_changes(problem: Problem, layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Yield the layout with two or three changes at once: of ZeRO, of recomputation, and of the microbatch."""
    for zero_name, sharded_layout in [("", layout), *_list_zero_changes(layout)]:
        recompute_changes = [("", sharded_layout), *_list_recompute_changes(problem, sharded_layout)]
        size_changes = [("", layout), *_list_microbatch_changes(layout)]
        for (recompute_name, recomputed), (size_name, smaller) in product(recompute_changes, size_changes):
            names = [name for name in (zero_name, recompute_name, size_name) if name]
            if len(names) > 1:
                yield ", ".join(names), replace(recomputed, microbatch=smaller.microbatch)


def _list_degree_changes(layout: Layout) -> Iterator[tuple[str, Layout]]:
    factors = [factor for factor in (2, 3, 4, 8) if layout.data % factor == 0]
    for factor, name, stages in product(factors, ("tensor", "pipeline"), ("even", "balanced")):
        degree = getattr(layout, name) * factor
        degrees = {"data": layout.data // factor, name: degree, "zero_shards": 0}
        for sequence_parallel in {layout.sequence_parallel, layout.tensor > 1 or name == "tensor"}:
            changed_layout = replace(layout, **degrees, stages=stages, sequence_parallel=sequence_parallel)
            yield f"{name} {degree} in place of {getattr(layout, name)}", changed_layout


def _list_offload_changes(kind: str, layout: Layout) -> Iterator[tuple[str, Layout]]:
    if not any(getattr(layout.offload, kind)):
        own_fractions = {name: getattr(layout.offload, name) for name in ("optimizer", "parameters", "activations")}
        yield f"{kind} offloaded to hosts", replace(layout, offload=Offloading(**own_fractions | {kind: (1.0,)}))


def _list_device_changes(layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Yield the layout with some or all of its offloaded states back on devices."""
    offloaded = [name for name in OFFLOADS if any(getattr(layout.offload, name))]
    for count in range(1, len(offloaded) + 1):
        for names in combinations(offloaded, count):
            step = StepPlace.HOST if "optimizer" in names else layout.offload.step
            offload = replace(layout.offload, **dict.fromkeys(names, ()), step=step)
            yield f"{', '.join(names)} kept on devices", replace(layout, offload=offload)


def _list_table_changes(layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Yield the layout whose data ranks share all embedding tables, by rows on devices or on hosts."""
    for words, cache in (("by rows", None), ("on hosts", 0.0)):
        embeddings = replace(layout.embeddings, tables=(), default=TablePlacement(TableCut.ROWS, cache=cache))
        if embeddings != layout.embeddings:
            yield f"embedding tables {words}", replace(layout, embeddings=embeddings)


def _list_node_changes(factor: int, num_nodes: int, layout: Layout) -> Iterator[tuple[str, Layout]]:
    zeros = sorted({layout.zero, 1, 3})
    for name, stages, zero in product(("data", "tensor", "pipeline"), ("even", "balanced"), zeros):
        degree = getattr(layout, name) * factor
        wider_layout = replace(layout, **{name: degree}, stages=stages, zero=zero)
        yield f"{num_nodes} nodes: {name} {degree}, ZeRO-{zero}", wider_layout
