"""What to do when devices are lost: the best plan on those that are left, and whether changing to it pays."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf

from simulator.brief import brief
from strategies.completion import complete
from strategies.cost_model import SimulatedCost
from strategies.evaluation import Evaluation, Trial
from strategies.explanation.migration import Migration, migration
from strategies.explanation.ranking import fits, ranking, search_best
from strategies.layout import Layout
from strategies.layout_rules import violations
from strategies.plan import Plan
from strategies.problem import Problem
from strategies.search.driver import OutOfTime
from strategies.search.space import Space

FORWARD_AND_BACKWARD = 3
"""Backward takes twice the FLOP of forward."""


@dataclass(frozen=True, slots=True)
class Change:
    """A plan on fewer devices, and what it costs to change to it."""

    trial: Trial
    devices: int
    migration: Migration


@dataclass(frozen=True, slots=True)
class Replan:
    """Answers to a loss of devices.

    Parameters
    ----------
    left
        Devices that are left; what a plan does not use is idle.
    best
        The fastest plan on any part of them; ``None`` where none fits.
    fewest_moves
        The same stages and tensor ranks with fewer data ranks; ``None`` where that does not go.
    break_even
        Steps after which changing to the best one has paid against the other; ``None`` where there is no choice.
    sizes
        Numbers of devices that were looked at.
    proven
        Whether no other number of devices can be faster.
    whole
        Whether all plans of the space were compared on every number of devices, not only those that people know and
        those near the best of them.
    """

    lost: int
    left: int
    best: Change | None
    fewest_moves: Change | None
    break_even: float | None
    sizes: tuple[int, ...]
    proven: bool
    whole: bool = True

    __repr__ = brief()


def replan(
    problem: Problem, space: Space, plan: Plan, layout: Layout, lost: int, seconds: Callable[[], float]
) -> Replan:
    """Return what to do when the last ``lost`` devices are lost; a node that lacks one is not used.

    Numbers of devices are looked at from the largest, until all FLOP at the data-sheet rate take longer than the best
    plan, or until no ``seconds`` are left. On the largest, the best plan is searched for.

    Raises
    ------
    ValueError
        Where no device would be left, or nodes are of several kinds.
    """
    devices = problem.cluster.num_devices
    if not 1 <= lost < devices:
        raise ValueError(
            f"lost devices lie between 1 and {devices - 1}, met {lost}; nearest: {min(max(lost, 1), devices - 1)}"
        )
    smaller = list(_smaller(problem, devices - lost))
    open_space = replace(space, data=None, tensor=None, pipeline=None)
    best: Trial | None = None
    where, proven, whole, sizes = problem, False, True, list[int]()
    for part in smaller:
        limit = best.evaluation.step_time if best else inf
        if _least(part) >= limit:
            proven = True
            break
        try:
            around = search_best(part, open_space, seconds) if not sizes else ()
            ranked = ranking(part, open_space, around, seconds=seconds)
            found = ranked.fastest(fits, below=limit)
        except OutOfTime:
            break
        sizes.append(part.cluster.num_devices)
        whole = whole and ranked.whole
        if found is not None:
            best, where = found, part
    else:
        proven = True
    change = _change(problem, where, plan, best, devices - lost) if best else None
    moves = _fewest_moves(smaller, problem, plan, layout, devices - lost)
    return Replan(lost, devices - lost, change, moves, _break_even(change, moves), tuple(sizes), proven, whole)


def _smaller(problem: Problem, left: int) -> Iterator[Problem]:
    """Yield the problem on ever fewer devices: whole nodes, or parts of the only one."""
    cluster = problem.cluster
    if cluster.num_nodes == 1:
        yield from (replace(problem, cluster=cluster.resized(1, count)) for count in range(left, 0, -1))
    else:
        nodes = left // cluster.first.devices
        yield from (replace(problem, cluster=cluster.resized(count)) for count in range(nodes, 0, -1))


def _least(problem: Problem) -> float:
    """Return the seconds that all FLOP of a step take at the data-sheet rate."""
    training, cluster = problem.training, problem.cluster
    flops = FORWARD_AND_BACKWARD * problem.graph.flops * training.global_batch
    return flops / sum(
        node.devices * count * node.accelerator.peak(training.precision) for node, count in cluster.nodes
    )


def _change(problem: Problem, where: Problem, before: Plan, trial: Trial, left: int) -> Change:
    ranks = trial.plan.mesh.num_ranks
    kept = range(left)  # ranks run on devices in order, those lost are the last
    cost = migration(problem, before, trial.plan, kept, where.cluster)
    return Change(trial, ranks, cost)


def _fewest_moves(parts: list[Problem], problem: Problem, plan: Plan, layout: Layout, left: int) -> Change | None:
    """Return the layout with as many data ranks as devices are left for, and the largest that the batch allows.

    Fewer ranks share the same states: where that leaves too little memory, microbatches are smaller.
    """
    group = problem.cluster.num_devices // layout.data
    sized = {part.cluster.num_devices: part for part in parts}
    for data in range(left // group, 0, -1):
        part = sized.get(data * group)
        if part is None:
            continue
        for size in _smaller_microbatches(layout):
            fewer = replace(layout, data=data, placement=(), zero_shards=0, microbatch=size)
            if next(violations(part, fewer), None) is not None:
                continue
            smaller = complete(part, fewer)
            found: Evaluation = SimulatedCost(part).evaluate(smaller)
            if found.fits:
                return _change(problem, part, plan, Trial(smaller, found, 0.0), left)
    return None


def _smaller_microbatches(layout: Layout) -> Iterator[int | tuple[int, ...]]:
    """Yield the microbatch of a layout, and the sizes that divide it by falling size."""
    yield layout.microbatch
    if isinstance(layout.microbatch, int):
        yield from (size for size in range(layout.microbatch - 1, 0, -1) if layout.microbatch % size == 0)


def _break_even(best: Change | None, other: Change | None) -> float | None:
    """Return after how many steps the best change has paid; 0 where it also moves less."""
    if best is None or other is None or best.trial.plan == other.trial.plan:
        return None
    gained = other.trial.evaluation.step_time - best.trial.evaluation.step_time
    extra = best.migration.seconds - other.migration.seconds
    return max(extra / gained, 0.0) if gained > 0 else None
