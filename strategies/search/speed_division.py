"""Layers of stages and samples of data ranks on devices of different speed: the slowest is to be as fast as it can.

References
----------
Jia et al., "Whale: efficient giant model training over heterogeneous GPUs", USENIX ATC 2022 (inter-TaskGraph load
balance: the layers of a stage in proportion to the FLOP/s of its devices).

Um et al., "Metis: fast automatic distributed training on heterogeneous GPUs", USENIX ATC 2024 (orders of device types,
layer and data load balancers; ``model/load_balancer.py`` of SamsungLabs/Metis at 4b24046: samples in proportion to
speed, by largest remainders).
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import permutations
from typing import NamedTuple

import numpy as np

from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.compute import Pass, operator_time
from meshwise.simulator.operator_graph import BATCH, Block, OperatorGraph
from meshwise.strategies.plan.completion import build_mesh
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.mesh import PIPELINE, Microbatch, list_data_ranks, normalise_microbatch
from meshwise.strategies.plan.partition import num_layers
from meshwise.strategies.plan.problem import Problem

MOST_KINDS = 4
"""Kinds of devices of which all orders are tried, at most."""


class PositionTimes(NamedTuple):
    """Seconds of all layers, and of the blocks before and after them, on the slowest device of every position."""

    layers: tuple[float, ...]
    ends: tuple[float, ...]


def find_position_times(problem: Problem, layout: Layout) -> PositionTimes:
    """Return how long the whole model takes on the devices of every pipeline position, whatever the stages."""
    cluster, mesh = problem.cluster, build_mesh(layout)
    devices = np.array(layout.placement or cluster.free_devices)
    sizes = np.broadcast_to(np.array(layout.microbatch), layout.data)[list_data_ranks(mesh)]
    # one device of each kind with each size of microbatches is enough
    rows = np.stack([mesh.coordinates(PIPELINE), cluster.device_kinds[devices], sizes])
    _, first_ranks = np.unique(rows, axis=1, return_index=True)
    loads: list[list[tuple[Accelerator, int]]] = [[] for _ in range(layout.pipeline)]
    for rank in first_ranks.tolist():
        loads[int(rows[0, rank])].append((cluster.accelerator_of(int(devices[rank])), int(sizes[rank])))
    layers, ends = (
        tuple(max(find_blocks_time(kind, problem.graph, is_layer, size) for kind, size in row) for row in loads)
        for is_layer in (True, False)
    )
    return PositionTimes(layers, ends)


def list_placements(problem: Problem, pipeline: int) -> list[tuple[int, ...]]:
    """Return the placements that put devices of different kinds on the stages of a pipeline.

    All free devices are used, those of a kind one after another. For every order of the kinds, the first stages have
    the devices of the first kind, as in Metis; and, where the numbers of devices allow it, every stage has as many
    devices of each kind as any other. On one stage the order does not matter. Of placements with equal kinds in equal
    order one is kept; the empty one is that of ranks in order.
    """
    devices = np.array(problem.cluster.free_devices)
    kinds = problem.cluster.device_kinds[devices]
    groups = [devices[kinds == kind] for kind in dict.fromkeys(kinds.tolist())]
    orders = permutations(groups) if pipeline > 1 and len(groups) <= MOST_KINDS else [groups]
    placements = [np.concatenate(order) for order in orders]
    if pipeline > 1 and all(len(group) % pipeline == 0 for group in groups):
        placements.append(
            np.concatenate(
                [np.concatenate(row) for row in zip(*(np.split(group, pipeline) for group in groups), strict=True)]
            )
        )
    firsts: dict[tuple[int, ...], tuple[int, ...]] = {}
    for placement in placements:
        firsts.setdefault(tuple(problem.cluster.device_kinds[placement].tolist()), tuple(placement.tolist()))
    in_order = tuple(devices.tolist())
    return [() if placement == in_order else placement for placement in firsts.values()]


def balance_samples(problem: Problem, layout: Layout) -> Microbatch:
    """Return the sequences of a microbatch by data rank, at least 1, for which the slowest rank is fastest.

    All ranks together have as many as in ``layout``, and each sequence in turn goes to the rank that ends first with
    it. A data rank takes for a sequence as long as the slowest device of each of its stages, one stage after another.
    """
    mesh = build_mesh(layout)
    devices = np.array(layout.placement or problem.cluster.free_devices)
    ranks = zip(list_data_ranks(mesh).tolist(), mesh.coordinates(PIPELINE).tolist(), devices.tolist(), strict=True)
    slowest_times = np.zeros((layout.data, layout.pipeline))
    for data_rank, position, device in ranks:
        accelerator = problem.cluster.accelerator_of(device)
        seconds = sum(find_blocks_time(accelerator, problem.graph, is_layer, 1) for is_layer in (True, False))
        slowest_times[data_rank, position] = max(slowest_times[data_rank, position], seconds)
    return normalise_microbatch(share_out(slowest_times.sum(axis=1).tolist(), layout.sequences))


def share_out(unit_times: Sequence[float], total: int, loads: Sequence[float] | None = None) -> tuple[int, ...]:
    """Return how many of ``total`` equal units each of some workers takes, at least 1, so that the last ends first.

    ``loads`` are the times that workers are busy besides, by default none. The greedy choice is exact, for a unit more
    never makes a worker faster.

    >>> share_out([1.0, 3.0], 8)
    (6, 2)
    """
    counts = [1] * len(unit_times)
    busy_times = [time + load for time, load in zip(unit_times, loads or [0.0] * len(unit_times), strict=True)]
    for _ in range(total - len(counts)):
        first = min(range(len(counts)), key=lambda worker: (busy_times[worker] + unit_times[worker], worker))
        counts[first] += 1
        busy_times[first] += unit_times[first]
    return tuple(counts)


def divide_by_speed(problem: Problem, layout: Layout, positions: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of layers per stage, at least 1, for which the slowest stage is fastest.

    Layers count as equal, and each in turn goes to the stage that ends first with it. A layer takes as long as on the
    slowest device of its position. The last stage also has the blocks before and after the layers.

    Parameters
    ----------
    layout
        Degrees, order and placement of ranks; its stages and schedule are ignored.
    positions
        The pipeline position of every stage.
    """
    layers, position_times = num_layers(problem.graph), find_position_times(problem, layout)
    layer_times = [position_times.layers[position] / max(layers, 1) for position in positions]
    end_times = [0.0] * (len(positions) - 1) + [position_times.ends[positions[-1]]]
    return share_out(layer_times, layers, end_times)


def estimate_step_time(problem: Problem, layout: Layout, positions: tuple[int, ...]) -> float:
    """Return the seconds of a step by Metis' formula, without communication: the sum of stages, and the slowest again.

    The slowest pipeline rank counts for every microbatch but one; ranks that cut operators share its work evenly.

    Parameters
    ----------
    positions
        The pipeline position of every stage; ``layout`` has the number of layers of every stage.
    """
    layers, position_times = num_layers(problem.graph), find_position_times(problem, layout)
    counts = layout.stages if isinstance(layout.stages, tuple) else (layers,)
    rank_times = [0.0] * layout.pipeline
    for position, count in zip(positions, counts, strict=True):
        rank_times[position] += position_times.layers[position] * count / max(layers, 1)
    rank_times[positions[-1]] += position_times.ends[positions[-1]]
    num_microbatches = problem.training.global_batch // layout.sequences
    work = sum(rank_times) + (num_microbatches - 1) * max(rank_times)
    return work * layout.data * layout.pipeline / layout.ranks


@lru_cache(maxsize=4096)
def find_blocks_time(accelerator: Accelerator, graph: OperatorGraph, are_layers: bool, microbatch: int) -> float:
    """Return the seconds of forward and backward of all layers, or of all other blocks, uncut on one device."""
    blocks = (block for block in graph.blocks if block.layer is are_layers)
    return sum(block.repeat * _find_block_time(accelerator, block, microbatch) for block in blocks)


def _find_block_time(accelerator: Accelerator, block: Block, microbatch: int) -> float:
    total = 0.0
    for operator in block.operators:
        sizes = {dim: size * microbatch if dim == BATCH else size for dim, size in operator.dims}
        total += sum(operator_time(accelerator, block, operator, sizes, model_pass) for model_pass in Pass)
    return total
