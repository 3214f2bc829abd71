"""The meshes of a joint search, and lower bounds of all plans on a mesh with one stage a rank.

Each of p pipeline ranks computes m microbatches of its stage, and rank k begins when one microbatch has come through
the stages before it. Where schedules keep backward whole, its last gradient then goes back through them. With stages of
t_k ticks, of which at least the part r of each is on that way, a step takes at least the largest
``m t_k + r (t_1 + .. + t_(k-1))``, and the t_k add up to the least ticks T in which devices compute a microbatch. It is
least where all of these are equal: ``r T / (1 - (1 - r/m)**p)``. r is 1 where backward is whole; where its part for
weights may run later, r is what forward takes at least.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from meshwise.simulator.units import TICKS_PER_SECOND
from meshwise.strategies.operators.pass_table import PassTable
from meshwise.strategies.plan.mesh import TENSOR, TENSOR_ROWS, divisors
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.choices import allows_value
from meshwise.strategies.search.space import Space


class JointMesh(NamedTuple):
    """Ranks along the axes of a plan, and its microbatches.

    ``degrees`` are those of the operator axes, the outermost first; ``microbatch`` are the sequences of a data rank.
    """

    pipeline: int
    data: int
    degrees: tuple[tuple[str, int], ...]
    microbatch: int
    num_microbatches: int

    def bound_step(self, work: float, part: float = 1.0) -> float:
        """Return the least time of a step whose microbatches take ``work`` in all stages together.

        ``part`` of the work of every stage is on the way of a microbatch to the last stage and back.

        >>> JointMesh(2, 1, (("tensor", 1),), 1, 2).bound_step(3.0)
        4.0
        """
        if part <= 0:
            return self.num_microbatches * work / self.pipeline
        return part * work / (1 - (1 - part / self.num_microbatches) ** self.pipeline)

    def bound_unequal_step(self, works: Sequence[float]) -> float:
        """Return a bound where ``works`` are those of all stages together on the devices of each position.

        All positions share the work in proportion to their speeds, and none waits.

        >>> JointMesh(2, 1, (("tensor", 1),), 1, 4).bound_unequal_step([3.0, 6.0])
        8.0
        """
        return self.num_microbatches / sum(1 / work for work in works)


def list_joint_meshes(problem: Problem, space: Space) -> Iterator[JointMesh]:
    """Yield the meshes of a space: operator axes inside a node, or of whole nodes; microbatches by powers of two.

    There are no more stages than blocks. Two operator axes over all devices, one stage and no data ranks, are what
    searches for operators alone look at.
    """
    devices, node_devices = len(problem.cluster.free_devices), problem.cluster.first_node.devices
    batch, num_blocks = problem.training.global_batch, len(problem.graph.occurrences)
    for pipeline in divisors(devices):
        if pipeline > num_blocks or not allows_value(space.pipeline, pipeline):
            continue
        for data in divisors(devices // pipeline):
            if batch % data or not allows_value(space.data, data):
                continue
            for degrees in _list_degrees(devices // pipeline // data, node_devices, space):
                if pipeline == data == 1 and len(degrees) > 1:
                    continue
                for microbatch in divisors(batch // data):
                    count = batch // data // microbatch
                    is_usual = count & (count - 1) == 0
                    if allows_value(space.microbatch, microbatch) and (space.microbatch or is_usual):
                        yield JointMesh(pipeline, data, degrees, microbatch, count)


def _list_degrees(ranks: int, node_devices: int, space: Space) -> Iterator[tuple[tuple[str, int], ...]]:
    """Yield the degrees of two operator axes with so many ranks; the inner one has all, or lies inside a node."""
    for tensor in divisors(ranks):
        rows = ranks // tensor
        is_local = tensor == ranks or (1 < tensor <= node_devices and node_devices % tensor == 0)
        fills_nodes = ranks <= node_devices or ranks % node_devices == 0
        if is_local and fills_nodes and allows_value(space.tensor, tensor) and allows_value(space.tensor_rows, rows):
            yield ((TENSOR_ROWS, rows), (TENSOR, tensor)) if rows > 1 else ((TENSOR, tensor),)


def bound_mesh(mesh: JointMesh, tables: Sequence[PassTable], splits_backward: bool) -> float:
    """Return a lower bound in seconds of all plans on a mesh; ``tables`` are those of every position's ranks.

    ``splits_backward`` says that schedules may run the part of backward for weights apart.
    """
    reference = np.array(tables[0].least_kernel_ticks, float)
    total, is_work = float(reference.sum()) / TICKS_PER_SECOND, reference > 0
    if all(table is tables[0] for table in tables):
        forward = np.array(tables[0].least_forward_ticks, float)
        part = float((forward[is_work] / reference[is_work]).min()) if splits_backward else 1.0
        return mesh.bound_step(total, part)
    ratios = ((np.array(table.least_kernel_ticks, float)[is_work] / reference[is_work]).min() for table in tables)
    return mesh.bound_unequal_step([total * float(ratio) for ratio in ratios])
