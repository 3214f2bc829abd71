"""Layers of pipeline stages on devices of different speed.

References
----------
Jia et al., "Whale: efficient giant model training over heterogeneous GPUs", USENIX ATC 2022 (inter-TaskGraph load
balance: the layers of a stage in proportion to the FLOP/s of its devices).
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from simulator.accelerator import Accelerator
from simulator.compute import Pass, operator_time
from simulator.operator_graph import BATCH, Block, OperatorGraph
from strategies.completion import mesh_of
from strategies.layout import Layout
from strategies.mesh import PIPELINE
from strategies.partition import num_layers
from strategies.problem import Problem


class Paces(NamedTuple):
    """Seconds that all layers, and what comes before and after them, take on the slowest device of every position."""

    layers: tuple[float, ...]
    rest: tuple[float, ...]


def paces(problem: Problem, layout: Layout) -> Paces:
    """Return how long the model takes at every pipeline position; stages and schedule do not count."""
    cluster, mesh = problem.cluster, mesh_of(layout)
    devices = np.array(layout.placement or cluster.free_devices)
    kinds, positions = cluster.device_kinds[devices], mesh.coordinates(PIPELINE)
    size = layout.microbatch if isinstance(layout.microbatch, int) else max(layout.microbatch)
    slowest = []
    for position in range(layout.pipeline):
        _, first = np.unique(kinds[positions == position], return_index=True)
        found = {cluster.accelerator_of(int(device)) for device in devices[positions == position][first]}
        slowest.append([max(_seconds(each, problem.graph, part, size) for each in found) for part in (True, False)])
    layers, rest = zip(*slowest, strict=True)
    return Paces(layers, rest)


def paced(problem: Problem, layout: Layout, positions: tuple[int, ...]) -> tuple[int, ...]:
    """Return the layers of every stage so that the slowest takes least, one at least each.

    A layer takes on every device of a position what it takes on the slowest, and the last stage has besides what comes
    before and after the layers. Layers are taken to be alike: each in turn goes to the stage that ends first with it.

    Parameters
    ----------
    layout
        Degrees, order and placement of ranks; stages and schedule do not count.
    positions
        The pipeline position of every stage.
    """
    layers, found = num_layers(problem.graph), paces(problem, layout)
    each = [found.layers[at] / max(layers, 1) for at in positions]
    counts = [1] * len(positions)
    load = list(each)
    load[-1] += found.rest[positions[-1]]
    for _ in range(layers - len(positions)):
        first = min(range(len(counts)), key=lambda stage: (load[stage] + each[stage], stage))
        counts[first] += 1
        load[first] += each[first]
    return tuple(counts)


@lru_cache(maxsize=4096)
def _seconds(accelerator: Accelerator, graph: OperatorGraph, layers: bool, microbatch: int) -> float:
    """Return the seconds of forward and backward on one device, not cut, of all layers or of what is no layer."""
    blocks = (block for block in graph.blocks if block.layer is layers)
    return sum(block.repeat * _of_block(accelerator, block, microbatch) for block in blocks)


def _of_block(accelerator: Accelerator, block: Block, microbatch: int) -> float:
    total = 0.0
    for operator in block.operators:
        sizes = {dim: size * microbatch if dim == BATCH else size for dim, size in operator.dims}
        total += sum(operator_time(accelerator, block, operator, sizes, each) for each in Pass)
    return total
