"""What a framework keeps on a rank for the whole step besides states and activations."""

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, prod
from typing import NamedTuple

from simulator.compute import PRODUCTS
from simulator.operator_graph import ITEMSIZE, Operator, OperatorKind
from strategies.framework import Framework
from strategies.lowering.gradient_storage import in_ddp_buckets
from strategies.lowering.liveness import Liveness
from strategies.lowering.operator import BlockLayout
from strategies.lowering.recompute import BlockMemory
from strategies.parallelism import EXPERTS
from strategies.plan import Plan
from strategies.training import Training


class Boundary(NamedTuple):
    """Bytes of one microbatch that a stage receives from the one before, and of what it sends to the next.

    ``keeps_graph`` says that a backward in two gives nothing back before its end.
    """

    before: int
    after: int
    keeps_graph: bool = False

    def applied(self, runs: Sequence[tuple[BlockMemory, int]]) -> list[tuple[BlockMemory, int]]:
        """Return what the blocks of a stage hold where both have buffers: they come in runs of equal ones."""
        rows = [row for row in runs if row[1]]
        if self.keeps_graph and not self.before:
            return [(memory.late(), count) for memory, count in self._at_ends(rows)]
        return self._lasting(self._at_ends(rows)) if self.keeps_graph else self._at_ends(rows)

    def _at_ends(self, rows: list[tuple[BlockMemory, int]]) -> list[tuple[BlockMemory, int]]:
        """Return what blocks hold of which the first and the last have buffers."""
        if not (self.before or self.after) or not rows:
            return rows
        (first, count), *rest = rows
        rows = [(self._within(first, self.before, 0), 1), *([(first, count - 1)] if count > 1 else []), *rest]
        last, count = rows.pop()
        return [*rows, *([(last, count - 1)] if count > 1 else []), (self._within(last, 0, self.after), 1)]

    def _within(self, memory: BlockMemory, before: int, after: int) -> BlockMemory:
        return memory.kept_whole(before, after) if self.keeps_graph else memory.within(before, after)

    def _lasting(self, rows: list[tuple[BlockMemory, int]]) -> list[tuple[BlockMemory, int]]:
        """Return what blocks hold where what is lost of any of them is given back with what the first one gives."""
        lost = sum(memory.lost * count for memory, count in rows)
        if not lost:
            return rows
        (first, count), *rest = rows
        ahead = first._replace(deferred=first.deferred - lost)
        return [(ahead, 1), *([(first, count - 1)] if count > 1 else []), *rest]


class BlockBuffers(NamedTuple):
    """What a block asks a framework to keep on a rank.

    Parameters
    ----------
    dummies
        The bytes of a gradient of a weight that nothing reads, by the rows and columns of the weight.
    gathered
        The buffer for the gathered input of the last product.
    grouped, others
        Whether it has products of experts, and products outside the framework's own layers.
    """

    dummies: Mapping[tuple[int, int], int]
    gathered: int
    grouped: bool
    others: bool


def block_buffers(live: Liveness) -> BlockBuffers:
    """Return what a block asks its framework to keep."""
    layout, framework = live.layout, live.framework
    scores = {name for each in layout.block.operators if each.kind is OperatorKind.TOP_K for name in each.inputs}
    products = [each for each in layout.block.operators if each.kind in PRODUCTS and each.parameters]
    routers = [each for each in products if each.outputs[0] in scores]
    last = [each for each in products if live.is_last_product(each)]
    dummies = (
        dict(_shape(layout, each) for each in products if each not in routers) if framework.dummy_gradients else {}
    )
    gathered = max((live.gathered(each) for each in last), default=0) if framework.gather_buffer else 0
    grouped = any(each.kind is OperatorKind.GROUPED_MATMUL for each in products)
    return BlockBuffers(dummies, gathered, grouped, bool(routers or last))


def _shape(layout: BlockLayout, operator: Operator) -> tuple[tuple[int, int], int]:
    """Return rows and columns of one rank's share of the weight of a product, one expert's of many, and its bytes."""
    tensor = layout.block.tensor[operator.parameters[0]]
    sizes = dict(zip(tensor.dims, layout.parameter_shape(tensor), strict=True))
    sizes.pop(EXPERTS, None)
    columns = prod(size for dim, size in sizes.items() if dim in operator.reduced)
    rows = prod(sizes.values()) // columns
    return (rows, columns), rows * columns * ITEMSIZE[tensor.dtype]


def flat_gradients(training: Training, plan: Plan, parameters: int) -> int:
    """Return the bytes of the copy of a rank's gradients that is summed after the last backward.

    Of a sum that leaves each rank its share there is the share too. None without a flush: no framework here runs such
    schedules.
    """
    flattens = training.conventions.flattens_gradients and not in_ddp_buckets(training, plan)
    if not flattens or plan.replicas == 1 or plan.zero >= 2 or plan.asynchronous:
        return 0
    shares = ceil(parameters / plan.shards) if plan.zero and plan.shards > 1 else 0
    return (parameters + shares) * training.gradient_bytes


def buffers(
    framework: Framework, blocks: Iterable[BlockBuffers], boundaries: Sequence[Boundary], microbatches: int
) -> int:
    """Return the bytes that a framework keeps on a rank of some blocks.

    Parameters
    ----------
    boundaries
        Of every stage of the rank.
    microbatches
        Microbatches of a step.
    """
    found = list(blocks)
    dummies: dict[tuple[int, int], int] = {}
    for each in found:
        dummies |= each.dummies
    size = sum(dummies.values()) + max((each.gathered for each in found), default=0) + framework.workspace
    size += framework.grouped_workspace * any(each.grouped for each in found)
    size += framework.other_workspace * any(each.others for each in found)
    if framework.buffers_every_microbatch:
        return size + microbatches * sum(boundary.before + boundary.after for boundary in boundaries)
    return size + max((boundary.before for boundary in boundaries), default=0)
