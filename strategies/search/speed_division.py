"""Layers of pipeline stages on devices of different speed: the slowest stage is to be as fast as it can.

References
----------
Jia et al., "Whale: efficient giant model training over heterogeneous GPUs", USENIX ATC 2022 (inter-TaskGraph load
balance: the layers of a stage in proportion to the FLOP/s of its devices).
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.compute import Pass, operator_time
from meshwise.simulator.operator_graph import BATCH, Block, OperatorGraph
from meshwise.strategies.plan.completion import build_mesh
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.mesh import PIPELINE
from meshwise.strategies.plan.partition import num_layers
from meshwise.strategies.plan.problem import Problem


class PositionTimes(NamedTuple):
    """Seconds of all layers, and of the blocks before and after them, on the slowest device of every position."""

    layers: tuple[float, ...]
    ends: tuple[float, ...]


def find_position_times(problem: Problem, layout: Layout) -> PositionTimes:
    """Return how long the whole model takes on the devices of every pipeline position, whatever the stages."""
    cluster, mesh = problem.cluster, build_mesh(layout)
    devices = np.array(layout.placement or cluster.free_devices)
    device_kinds, positions = cluster.device_kinds[devices], mesh.coordinates(PIPELINE)
    size = layout.microbatch if isinstance(layout.microbatch, int) else max(layout.microbatch)
    slowest_times = []
    for position in range(layout.pipeline):
        # one device of each kind is enough
        _, first_devices = np.unique(device_kinds[positions == position], return_index=True)
        accelerators = {cluster.accelerator_of(int(device)) for device in devices[positions == position][first_devices]}
        slowest_times.append(
            [
                max(_find_blocks_time(accelerator, problem.graph, is_layer, size) for accelerator in accelerators)
                for is_layer in (True, False)
            ]
        )
    layers, ends = zip(*slowest_times, strict=True)
    return PositionTimes(layers, ends)


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
    counts = [1] * len(positions)
    loads = list(layer_times)
    loads[-1] += position_times.ends[positions[-1]]
    for _ in range(layers - len(positions)):
        earliest_stage = min(range(len(counts)), key=lambda stage: (loads[stage] + layer_times[stage], stage))
        counts[earliest_stage] += 1
        loads[earliest_stage] += layer_times[earliest_stage]
    return tuple(counts)


@lru_cache(maxsize=4096)
def _find_blocks_time(accelerator: Accelerator, graph: OperatorGraph, are_layers: bool, microbatch: int) -> float:
    """Return the seconds of forward and backward of all layers, or of all other blocks, uncut on one device."""
    blocks = (block for block in graph.blocks if block.layer is are_layers)
    return sum(block.repeat * _find_block_time(accelerator, block, microbatch) for block in blocks)


def _find_block_time(accelerator: Accelerator, block: Block, microbatch: int) -> float:
    total = 0.0
    for operator in block.operators:
        sizes = {dim: size * microbatch if dim == BATCH else size for dim, size in operator.dims}
        total += sum(operator_time(accelerator, block, operator, sizes, model_pass) for model_pass in Pass)
    return total
