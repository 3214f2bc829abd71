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

from meshwise.simulator.brief import brief_repr
from meshwise.simulator.machine.cluster import Cluster
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.evaluation import Evaluation, Trial
from meshwise.strategies.explanation.ranking import fits, ranking, search_best
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.mesh import PIPELINE, TENSOR, TENSOR_ROWS, divisors, list_state_ranks
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.search.proposals import OutOfTime
from meshwise.strategies.search.space import Space

Part = tuple[float, float]
"""A contiguous part of a block's states: its start and end, as fractions."""


class Holding(NamedTuple):
    """The parts of the parameters and of the optimizer states of its pipeline position's blocks that a rank holds."""

    position: int
    parameters: Part
    optimizer: Part


NO_HOLDING = Holding(-1, (0.0, 0.0), (0.0, 0.0))


@dataclass(frozen=True, slots=True)
class Migration:
    """The cost of changing to another plan.

    ``received_bytes`` are those that all devices together receive, ``max_received`` the most of one device.
    ``lost_bytes`` are a part of them that no device holds any more, so that they come from a checkpoint. ``seconds`` is
    the time in which the busiest node receives its bytes over its NICs; with one node, the busiest device over its
    link.
    """

    received_bytes: float
    max_received: float
    lost_bytes: float
    seconds: float


def list_holdings(plan: Plan) -> list[Holding]:
    """Return the holding of every rank of a plan."""
    mesh = plan.mesh
    positions = mesh.coordinates(PIPELINE).tolist()
    tensor_ranks = (mesh.coordinates(TENSOR_ROWS) * mesh.size(TENSOR) + mesh.coordinates(TENSOR)).tolist()
    shares = list_state_ranks(mesh).tolist()
    num_parts = mesh.size(TENSOR_ROWS) * mesh.size(TENSOR)
    result = []
    for rank in range(mesh.num_ranks):
        tensor_part = _split_part((0.0, 1.0), tensor_ranks[rank], num_parts)
        data_part = _split_part(tensor_part, shares[rank], plan.shards)
        parameters, optimizer = (data_part if plan.zero >= stage else tensor_part for stage in (3, 1))
        result.append(Holding(positions[rank], parameters, optimizer))
    return result


def find_migration(
    problem: Problem, old_plan: Plan, new_plan: Plan, kept_ranks: Sequence[int], cluster: Cluster
) -> Migration:
    """Return the cost of changing from ``old_plan`` to ``new_plan``, whose machine is ``cluster``.

    ``kept_ranks`` has for every rank of ``new_plan`` the rank of ``old_plan`` on the same device; -1 for a new device.
    Behind them come the old ranks of devices that stay but have no new rank.
    """
    shared_elements = _count_shared_elements(problem, old_plan, new_plan)
    training = problem.training
    widths = (training.parameter_bytes, training.optimizer_bytes)
    old_holdings, new_holdings = list_holdings(old_plan), list_holdings(new_plan)
    received_bytes = []
    for rank, holding in enumerate(new_holdings):
        old_holding = old_holdings[kept_ranks[rank]] if kept_ranks[rank] >= 0 else NO_HOLDING
        size = 0.0
        for position, elements in shared_elements[holding.position].items():
            is_same = old_holding.position == position
            for part, width, old_part in zip(holding[1:], widths, old_holding[1:], strict=True):
                size += elements * width * (part[1] - part[0] - (_find_overlap(part, old_part) if is_same else 0.0))
        received_bytes.append(size)
    max_received, seconds = max(received_bytes, default=0.0), _find_seconds(cluster, received_bytes)
    lost_bytes = _count_lost_bytes(problem, old_plan, old_holdings, kept_ranks)
    return Migration(sum(received_bytes), max_received, lost_bytes, seconds)


def _split_part(part: Part, index: int, count: int) -> Part:
    width = (part[1] - part[0]) / count
    return part[0] + index * width, part[0] + (index + 1) * width


def _find_overlap(part: Part, other_part: Part) -> float:
    return max(0.0, min(part[1], other_part[1]) - max(part[0], other_part[0]))


def _find_block_positions(plan: Plan) -> dict[str, int]:
    """Return the pipeline position of every block of a plan."""
    stages = zip(plan.positions, plan.stages, strict=True)
    return {name: position for position, stage in stages for name in stage.blocks}


def _count_shared_elements(problem: Problem, old_plan: Plan, new_plan: Plan) -> list[dict[int, float]]:
    """Return for every new pipeline position the number of parameters that it shares with each old position."""
    elements = {name: block.num_parameters for name, block in problem.graph.occurrences}
    old_positions = _find_block_positions(old_plan)
    counters: list[Counter[int]] = [Counter() for _ in range(new_plan.pipeline)]
    for name, position in _find_block_positions(new_plan).items():
        counters[position][old_positions[name]] += elements[name]
    return [{position: float(count) for position, count in counter.items()} for counter in counters]


def _count_lost_bytes(
    problem: Problem, old_plan: Plan, old_holdings: list[Holding], kept_ranks: Sequence[int]
) -> float:
    """Return the bytes of states that none of the kept ranks holds."""
    elements = {name: block.num_parameters for name, block in problem.graph.occurrences}
    position_elements: Counter[int] = Counter()
    for name, position in _find_block_positions(old_plan).items():
        position_elements[position] += elements[name]
    kept_holdings = [old_holdings[rank] for rank in kept_ranks if rank >= 0]
    lost_bytes, training = 0.0, problem.training
    for position, count in position_elements.items():
        holdings = [holding for holding in kept_holdings if holding.position == position]
        parameters, optimizer = [row.parameters for row in holdings], [row.optimizer for row in holdings]
        lost_bytes += count * training.parameter_bytes * (1 - _measure_union(parameters))
        lost_bytes += count * training.optimizer_bytes * (1 - _measure_union(optimizer))
    return lost_bytes


def _measure_union(parts: list[Part]) -> float:
    """Return the length of the union of parts.

    >>> _measure_union([(0.5, 0.75), (0.0, 0.25), (0.125, 0.5)])
    0.75
    """
    covered_end = total = 0.0
    for start, end in sorted(set(parts)):
        total += max(0.0, end - max(start, covered_end))
        covered_end = max(covered_end, end)
    # sums of fractions such as thirds miss 1 by rounding, and would count as lost bytes
    return 1.0 if abs(total - 1) < 1e-9 else total


def _find_seconds(cluster: Cluster, received_bytes: list[float]) -> float:
    if cluster.num_nodes == 1:
        return max(received_bytes, default=0.0) / cluster.first_node.network.link.bandwidth
    node_bytes = np.bincount(cluster.device_nodes[: len(received_bytes)], received_bytes, cluster.num_nodes)
    nodes = [cluster.nodes[kind][0] for kind in cluster.node_kinds.tolist()]
    node_bandwidths = [node.nics * node.nic.bandwidth for node in nodes]
    return float((node_bytes / np.array(node_bandwidths)).max())


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

    num_lost: int
    num_left: int
    best: Change | None
    fewest_moves: Change | None
    break_even: float | None
    sizes: tuple[int, ...]
    is_proven: bool
    is_complete: bool = True

    __repr__ = brief_repr()


def replan(
    problem: Problem, space: Space, plan: Plan, layout: Layout, num_lost: int, seconds: Callable[[], float]
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
    if not 1 <= num_lost < devices:
        nearest = min(max(num_lost, 1), devices - 1)
        raise ValueError(f"lost devices lie between 1 and {devices - 1}, met {num_lost}; nearest: {nearest}")
    smaller_problems = list(_list_smaller(problem, devices - num_lost))
    open_space = space.with_limits(data=None, tensor=None, pipeline=None)
    best_trial: Trial | None = None
    best_problem, is_proven, is_complete, sizes = problem, False, True, list[int]()
    for smaller_problem in smaller_problems:
        limit = best_trial.evaluation.step_time if best_trial else inf
        if _find_least_time(smaller_problem) >= limit:
            is_proven = True
            break
        try:
            costs = SimulatedCost(smaller_problem)
            nearby_layouts = search_best(costs, open_space, seconds) if not sizes else ()
            plan_ranking = ranking(costs, open_space, nearby_layouts, seconds=seconds)
            trial = plan_ranking.find_fastest(fits, time_limit=limit)
        except OutOfTime:
            break
        sizes.append(smaller_problem.cluster.num_devices)
        is_complete = is_complete and plan_ranking.is_complete
        if trial is not None:
            best_trial, best_problem = trial, smaller_problem
    else:  # no smaller number of devices is left
        is_proven = True
    num_left = devices - num_lost
    change = _build_change(problem, best_problem, plan, best_trial, num_left) if best_trial else None
    fewest_moves = _find_fewest_moves(smaller_problems, problem, plan, layout, num_left)
    break_even = _find_break_even(change, fewest_moves)
    return Replan(num_lost, num_left, change, fewest_moves, break_even, tuple(sizes), is_proven, is_complete)


def _list_smaller(problem: Problem, num_left: int) -> Iterator[Problem]:
    """Yield the problem on fewer and fewer devices: on whole nodes, or on parts of a single node."""
    cluster = problem.cluster
    is_single = cluster.num_nodes == 1
    largest = num_left if is_single else num_left // cluster.first_node.devices
    for count in range(largest, 0, -1):
        yield replace(problem, cluster=cluster.with_size(1, count) if is_single else cluster.with_size(count))


def _find_least_time(problem: Problem) -> float:
    """Return the seconds of all FLOP of a step at the data-sheet rate: no plan is faster."""
    training, cluster = problem.training, problem.cluster
    flops = FORWARD_AND_BACKWARD * problem.graph.flops * training.global_batch
    return flops / sum(
        node.devices * count * node.accelerator.peak(training.precision) for node, count in cluster.nodes
    )


def _build_change(problem: Problem, new_problem: Problem, old_plan: Plan, trial: Trial, num_left: int) -> Change:
    kept_ranks = range(num_left)  # ranks lie on devices in order, and the last devices are lost
    cost = find_migration(problem, old_plan, trial.plan, kept_ranks, new_problem.cluster)
    return Change(trial, trial.plan.mesh.num_ranks, cost)


def _find_fewest_moves(
    smaller_problems: list[Problem], problem: Problem, plan: Plan, layout: Layout, num_left: int
) -> Change | None:
    """Return the change to the same layout with as many data ranks as fit on the devices left and divide the batch.

    Fewer ranks share the same states; where memory then does not suffice, microbatches are smaller.
    """
    model_ranks = problem.cluster.num_devices // layout.data
    problems = {smaller_problem.cluster.num_devices: smaller_problem for smaller_problem in smaller_problems}
    for data in range(num_left // model_ranks, 0, -1):
        smaller_problem = problems.get(data * model_ranks)
        if smaller_problem is None:
            continue
        sizes = reversed(divisors(layout.microbatch)) if isinstance(layout.microbatch, int) else [layout.microbatch]
        for size in sizes:
            fewer_layout = replace(layout, data=data, placement=(), zero_shards=0, microbatch=size)
            if next(violations(smaller_problem, fewer_layout), None) is not None:
                continue
            fewer_plan = complete(smaller_problem, fewer_layout)
            evaluation: Evaluation = SimulatedCost(smaller_problem).evaluate(fewer_plan)
            if evaluation.fits:
                return _build_change(problem, smaller_problem, plan, Trial(fewer_plan, evaluation, 0.0), num_left)
    return None


def _find_break_even(best_change: Change | None, other_change: Change | None) -> float | None:
    """Return the number of steps after which the best change has paid; 0 where it also moves in less time."""
    if best_change is None or other_change is None or best_change.trial.plan == other_change.trial.plan:
        return None
    gained_seconds = other_change.trial.evaluation.step_time - best_change.trial.evaluation.step_time
    extra_seconds = best_change.migration.seconds - other_change.migration.seconds
    return max(extra_seconds / gained_seconds, 0.0) if gained_seconds > 0 else None
