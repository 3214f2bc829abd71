"""Plans after a loss of devices, and the cost of changing to them: the states that devices must receive.

Of every block a rank holds the share of its tensor rank, a contiguous part of the parameters and optimizer states. With
ZeRO 1 it holds the share of its data rank of these optimizer states, with ZeRO 3 also of the parameters (Rajbhandari et
al. 2020, "ZeRO", section 5; contiguous shares as in Megatron-LM's distributed optimizer). Experts count as if all ranks
had them.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

import numpy as np

from meshwise.simulator.brief import brief
from meshwise.simulator.machine.cluster import Cluster
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.evaluation import Evaluation, Trial
from meshwise.strategies.explanation.ranking import fits, ranking, search_best
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.mesh import CONTEXT, DATA, EXPERT, PIPELINE, TENSOR, TENSOR_ROWS, divisors
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.search.driver import OutOfTime
from meshwise.strategies.search.space import Space

Part = tuple[float, float]
"""A contiguous part of a block's states: its start and end, as fractions."""


class Holding(NamedTuple):
    """The parts of the parameters and of the optimizer states of its pipeline position's blocks that a rank holds."""

    position: int
    parameters: Part
    optimizer: Part


@dataclass(frozen=True, slots=True)
class Migration:
    """The cost of changing to another plan.

    Parameters
    ----------
    received_bytes
        Bytes that all devices together receive.
    max_received
        The most bytes that one device receives.
    lost_bytes
        Bytes that no device holds any more, so that they come from a checkpoint; a part of ``received_bytes``.
    seconds
        Time in which the busiest node receives its bytes over its NICs; with one node, the busiest device over its
        link.
    """

    received: float
    most: float
    lost: float
    seconds: float


def holdings(plan: Plan) -> list[Holding]:
    """Return the holding of every rank of a plan."""
    mesh = plan.mesh
    position = mesh.coordinates(PIPELINE).tolist()
    tensor = (mesh.coordinates(TENSOR_ROWS) * mesh.size(TENSOR) + mesh.coordinates(TENSOR)).tolist()
    share = (mesh.coordinates(DATA) * mesh.size(EXPERT) + mesh.coordinates(EXPERT)) * mesh.size(CONTEXT)
    shares = (share + mesh.coordinates(CONTEXT)).tolist()
    cuts = mesh.size(TENSOR_ROWS) * mesh.size(TENSOR)
    result = []
    for rank in range(mesh.num_ranks):
        whole = _part((0.0, 1.0), tensor[rank], cuts)
        own = _part(whole, shares[rank], plan.shards)
        result.append(Holding(position[rank], own if plan.zero >= 3 else whole, own if plan.zero else whole))
    return result


def migration(problem: Problem, before: Plan, after: Plan, kept: Sequence[int], cluster: Cluster) -> Migration:
    """Return the cost of changing from ``old_plan`` to ``new_plan``.

    Parameters
    ----------
    kept_ranks
        For every rank of ``new_plan`` the rank of ``old_plan`` on the same device; -1 for a new device. Behind them
        come the old ranks of devices that stay but have no new rank.
    cluster
        The machine of ``new_plan``.
    """
    shared = _shared(problem, before, after)
    training = problem.training
    old, new = holdings(before), holdings(after)
    received = []
    for rank, holding in enumerate(new):
        had = old[kept[rank]] if kept[rank] >= 0 else None
        size = 0.0
        for each, elements in shared[holding.position].items():
            same = had is not None and had.position == each
            for own, width, has in (
                (holding.parameters, training.parameter_bytes, had.parameters if had else (0.0, 0.0)),
                (holding.optimizer, training.optimizer_bytes, had.optimizer if had else (0.0, 0.0)),
            ):
                size += elements * width * (own[1] - own[0] - (_overlap(own, has) if same else 0.0))
        received.append(size)
    lost = _lost(problem, before, old, kept)
    return Migration(sum(received), max(received, default=0.0), lost, _seconds(cluster, received))


def _part(whole: Part, index: int, count: int) -> Part:
    width = (whole[1] - whole[0]) / count
    return whole[0] + index * width, whole[0] + (index + 1) * width


def _overlap(one: Part, other: Part) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def _shared(problem: Problem, before: Plan, after: Plan) -> list[dict[int, float]]:
    """Return for every new pipeline position the number of parameters that it shares with each old position."""
    elements = {name: block.num_parameters for name, block in problem.graph.occurrences}
    was = {name: at for at, stage in zip(before.positions, before.stages, strict=True) for name in stage.blocks}
    found: list[Counter[int]] = [Counter() for _ in range(after.pipeline)]
    for at, stage in zip(after.positions, after.stages, strict=True):
        for name in stage.blocks:
            found[at][was[name]] += elements[name]
    return [{position: float(count) for position, count in each.items()} for each in found]


def _lost(problem: Problem, before: Plan, old: list[Holding], kept: Sequence[int]) -> float:
    """Return the bytes of states that none of the kept ranks holds."""
    elements = {name: block.num_parameters for name, block in problem.graph.occurrences}
    held: Counter[int] = Counter()
    for at, stage in zip(before.positions, before.stages, strict=True):
        held[at] += sum(elements[name] for name in stage.blocks)
    left = [old[rank] for rank in kept if rank >= 0]
    result, training = 0.0, problem.training
    for position, count in held.items():
        here = [each for each in left if each.position == position]
        result += count * training.parameter_bytes * (1 - _covered([each.parameters for each in here]))
        result += count * training.optimizer_bytes * (1 - _covered([each.optimizer for each in here]))
    return result


def _covered(parts: list[Part]) -> float:
    """Return the length of the union of parts.

    >>> _covered([(0.5, 0.75), (0.0, 0.25), (0.125, 0.5)])
    0.75
    """
    reached = total = 0.0
    for first, end in sorted(set(parts)):
        total += max(0.0, end - max(first, reached))
        reached = max(reached, end)
    # sums of fractions such as thirds miss 1 by rounding, and would count as lost bytes
    return 1.0 if abs(total - 1) < 1e-9 else total


def _seconds(cluster: Cluster, received: list[float]) -> float:
    if cluster.num_nodes == 1:
        return max(received, default=0.0) / cluster.first.network.link.bandwidth
    of_node = np.bincount(cluster.device_nodes[: len(received)], received, cluster.num_nodes)
    wide = [cluster.nodes[kind][0].nics * cluster.nodes[kind][0].nic.bandwidth for kind in cluster.node_kinds.tolist()]
    return float((of_node / np.array(wide)).max())


FORWARD_AND_BACKWARD = 3
"""Backward takes twice the FLOP of forward."""


@dataclass(frozen=True, slots=True)
class Change:
    """A plan on fewer devices, and the cost of changing to it."""

    trial: Trial
    devices: int
    migration: Migration


@dataclass(frozen=True, slots=True)
class Replan:
    """The plans after a loss of devices.

    Parameters
    ----------
    num_lost, num_left
        Devices that are lost and left; a plan may leave some idle.
    best
        The fastest plan on any number of the devices left; ``None`` where none fits.
    fewest_moves
        The same stages and tensor ranks with fewer data ranks; ``None`` where no such plan is legal and fits.
    break_even
        Steps after which changing to ``best`` has paid against ``fewest_moves``; ``None`` where there is no choice.
    sizes
        The numbers of devices that were looked at.
    is_proven
        Whether no other number of devices can be faster.
    is_complete
        Whether all plans of the space were ranked on every number of devices, not only known plans and those near the
        best of them.
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
    """Return the plans for the loss of the last ``num_lost`` devices; a node that lost a device is not used.

    Numbers of devices are looked at from the largest on, until the FLOP of a step at the data-sheet rate take longer
    than the best plan, or no ``seconds`` are left. On the largest number the plans are also searched.

    Raises
    ------
    ValueError
        Where no device would be left, or the nodes are of several kinds.
    """
    devices = problem.cluster.num_devices
    if not 1 <= lost < devices:
        raise ValueError(
            f"lost devices lie between 1 and {devices - 1}, met {lost}; nearest: {min(max(lost, 1), devices - 1)}"
        )
    smaller = list(_smaller(problem, devices - lost))
    open_space = space.with_limits(data=None, tensor=None, pipeline=None)
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
    else:  # no smaller number of devices is left
        proven = True
    change = _change(problem, where, plan, best, devices - lost) if best else None
    moves = _fewest_moves(smaller, problem, plan, layout, devices - lost)
    return Replan(lost, devices - lost, change, moves, _break_even(change, moves), tuple(sizes), proven, whole)


def _smaller(problem: Problem, left: int) -> Iterator[Problem]:
    """Yield the problem on fewer and fewer devices: on whole nodes, or on parts of a single node."""
    cluster = problem.cluster
    if cluster.num_nodes == 1:
        yield from (replace(problem, cluster=cluster.resized(1, count)) for count in range(left, 0, -1))
    else:
        nodes = left // cluster.first.devices
        yield from (replace(problem, cluster=cluster.resized(count)) for count in range(nodes, 0, -1))


def _least(problem: Problem) -> float:
    """Return the seconds of all FLOP of a step at the data-sheet rate: no plan is faster."""
    training, cluster = problem.training, problem.cluster
    flops = FORWARD_AND_BACKWARD * problem.graph.flops * training.global_batch
    return flops / sum(
        node.devices * count * node.accelerator.peak(training.precision) for node, count in cluster.nodes
    )


def _change(problem: Problem, where: Problem, before: Plan, trial: Trial, left: int) -> Change:
    ranks = trial.plan.mesh.num_ranks
    kept = range(left)  # ranks lie on devices in order, and the last devices are lost
    cost = migration(problem, before, trial.plan, kept, where.cluster)
    return Change(trial, ranks, cost)


def _fewest_moves(parts: list[Problem], problem: Problem, plan: Plan, layout: Layout, left: int) -> Change | None:
    """Return the change to the same layout with as many data ranks as fit on the devices left and divide the batch.

    Fewer ranks share the same states; where memory then does not suffice, microbatches are smaller.
    """
    group = problem.cluster.num_devices // layout.data
    sized = {part.cluster.num_devices: part for part in parts}
    for data in range(left // group, 0, -1):
        part = sized.get(data * group)
        if part is None:
            continue
        sizes = reversed(divisors(layout.microbatch)) if isinstance(layout.microbatch, int) else [layout.microbatch]
        for size in sizes:
            fewer = replace(layout, data=data, placement=(), zero_shards=0, microbatch=size)
            if next(violations(part, fewer), None) is not None:
                continue
            smaller = complete(part, fewer)
            found: Evaluation = SimulatedCost(part).evaluate(smaller)
            if found.fits:
                return _change(problem, part, plan, Trial(smaller, found, 0.0), left)
    return None


def _break_even(best: Change | None, other: Change | None) -> float | None:
    """Return the number of steps after which the best change has paid; 0 where it also moves in less time."""
    if best is None or other is None or best.trial.plan == other.trial.plan:
        return None
    gained = other.trial.evaluation.step_time - best.trial.evaluation.step_time
    extra = best.migration.seconds - other.migration.seconds
    return max(extra / gained, 0.0) if gained > 0 else None
