"""Layers of pipeline stages on devices of different speed.

References
----------
Jia et al., "Whale: efficient giant model training over heterogeneous GPUs", USENIX ATC 2022 (inter-TaskGraph load
balance: the layers of a stage in proportion to the FLOP/s of its devices).
"""

from functools import lru_cache

import numpy as np

from simulator.accelerator import Accelerator
from simulator.compute import Pass, operator_time
from simulator.operator_graph import BATCH, Block
from strategies.completion import mesh_of
from strategies.layout import Layout
from strategies.mesh import PIPELINE
from strategies.problem import Problem


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
    layers = [block for _, block in problem.graph.occurrences if block.layer]
    rest = [block for _, block in problem.graph.occurrences if not block.layer]
    layer, head = (
        [_slowest(problem, layout, blocks, at) for at in range(layout.pipeline)] for blocks in (layers, rest)
    )
    each = [layer[at] / max(len(layers), 1) for at in positions]
    counts = [1] * len(positions)
    load = list(each)
    load[-1] += head[positions[-1]]
    for _ in range(len(layers) - len(positions)):
        first = min(range(len(counts)), key=lambda stage: (load[stage] + each[stage], stage))
        counts[first] += 1
        load[first] += each[first]
    return tuple(counts)


def _slowest(problem: Problem, layout: Layout, blocks: list[Block], position: int) -> float:
    """Return the seconds that some blocks take on the slowest device of a pipeline position, not cut."""
    cluster, mesh = problem.cluster, mesh_of(layout)
    devices = np.array(layout.placement or cluster.free_devices)[mesh.coordinates(PIPELINE) == position]
    _, first = np.unique(cluster.device_kinds[devices], return_index=True)
    accelerators = {cluster.accelerator_of(int(device)) for device in devices[first]}
    return max(sum(_seconds(accelerator, block, layout.microbatch) for block in blocks) for accelerator in accelerators)


@lru_cache(maxsize=4096)
def _seconds(accelerator: Accelerator, block: Block, microbatch: int) -> float:
    """Return the seconds of forward and backward of a block on one device."""
    total = 0.0
    for operator in block.operators:
        sizes = {dim: size * microbatch if dim == BATCH else size for dim, size in operator.dims}
        total += sum(operator_time(accelerator, block, operator, sizes, each) for each in Pass)
    return total
