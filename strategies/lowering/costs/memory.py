"""Memory of a plan on one rank: what stays for the whole step, and the peak that a schedule reaches.

Part of what stays are buffers that a framework keeps besides states and activations.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, prod
from typing import NamedTuple

import numpy as np

from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.compute import PRODUCTS
from meshwise.simulator.operator_graph import ITEMSIZE, Operator, OperatorKind
from meshwise.simulator.program import Category, IntArray, MemoryChange
from meshwise.strategies.lowering.costs.liveness import Liveness
from meshwise.strategies.lowering.costs.offload import ALL_ON_DEVICES, OnHost, host_states
from meshwise.strategies.lowering.costs.operator import BlockLayout
from meshwise.strategies.lowering.costs.optimizer import (
    Parameters,
    begin_in_step,
    in_ddp_buckets,
    state_bytes,
    updated_parameters,
)
from meshwise.strategies.lowering.costs.recompute import BlockMemory
from meshwise.strategies.plan.framework import Framework
from meshwise.strategies.plan.parallelism import EXPERTS
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Training
from meshwise.strategies.schedules.orders import actions


class Copies(NamedTuple):
    """Number of versions of its weights, and of buffers of gradients, that a rank keeps."""

    weights: int
    gradients: int


ONCE = Copies(1, 1)
"""One version of the weights and one buffer of gradients."""


def resident(
    accelerator: Accelerator,
    training: Training,
    plan: Plan,
    parameters: Parameters,
    buffers: int,
    rank_class: int,
    on_host: OnHost = ALL_ON_DEVICES,
    several: Copies = ONCE,
) -> tuple[MemoryChange, ...]:
    """Return what one rank holds for the whole step, on its device and on its host.

    Gradients that get their memory in a backward are not among it.

    Parameters
    ----------
    buffers
        Bytes that the framework keeps besides.
    host_share
        The part that is on the host.
    num_copies
        How often weights and gradients are kept.
    """
    share = updated_parameters(plan, parameters.elements, parameters.experts)
    gathered = plan.zero == 3 and plan.shards > 1  # copies in fp8 are then made of each block and given up with it
    quantised = 0 if gathered else parameters.quantised * training.more_bytes
    states, states_away = state_bytes(training, plan, parameters), host_states(training, plan, parameters, on_host)
    kept_bytes = 0 if begin_in_step(training, plan) else training.gradient_bytes
    weights, gradients = ((share if plan.zero >= least else parameters.elements) for least in (3, 2))
    weights -= on_host.parameters
    if plan.shards > 1 and plan.zero == 2 and training.conventions.keeps_shards and not training.mains_as_shards:
        weights += share
    # Shards of the main copy, which count as optimizer state, are then the only parameters that stay.
    if plan.shards > 1 and plan.zero == 3 and training.mains_as_shards:
        weights = 0
    sizes = {
        Category.PARAMETERS: several.weights * (weights * training.parameter_bytes + quantised),
        Category.GRADIENTS: several.gradients * (gradients - on_host.parameters) * kept_bytes,
        Category.OPTIMIZER: states - states_away,
        Category.BUFFERS: int(accelerator.reserved) + buffers,
    }
    away = {
        Category.PARAMETERS: on_host.parameters * training.parameter_bytes * (not training.mains_as_shards),
        Category.GRADIENTS: on_host.parameters * training.gradient_bytes,
        Category.OPTIMIZER: states_away,
    }
    held = tuple(MemoryChange(rank_class, category, size) for category, size in sizes.items())
    return (*held, *(MemoryChange(rank_class, category, size, host=True) for category, size in away.items() if size))


class StageMemory(NamedTuple):
    """Bytes of one microbatch of one stage on one rank.

    Parameters
    ----------
    kept_bytes
        Held from forward to backward.
    forward, backward
        Held beyond ``kept_bytes`` at the fullest moment of each pass.
    deferred_bytes
        Where backward is split, held from the gradients of inputs to those of weights.
    inputs, weights
        Held beyond ``kept_bytes`` and beyond ``deferred_bytes`` at the fullest moment of those passes.
    """

    kept: int
    forward: int
    backward: int
    deferred: int = 0
    inputs: int = 0
    weights: int = 0

    @property
    def changes(self) -> tuple[int, int, int, int]:
        """Bytes that each kind of action takes, negative where it gives back."""
        return self.kept, -self.kept, self.deferred - self.kept, -self.deferred

    @property
    def above(self) -> tuple[int, int, int, int]:
        """Bytes that each kind of action holds at its fullest moment beyond those held after it."""
        inputs = self.kept - self.deferred + self.inputs
        return self.forward, self.kept + self.backward, inputs, self.deferred + self.weights


def stage_memory(runs: Iterable[tuple[BlockMemory, int]]) -> StageMemory:
    """Return the memory of a stage whose blocks come in runs of equal ones.

    Forward keeps block after block and backward gives back the last one first, so that each run is fullest at its last
    block.

    >>> layer = BlockMemory(kept=10, recomputed=5, forward=20, backward=20)
    >>> stage_memory([(layer, 3), (BlockMemory(2, 0, 1, 1), 1)])[:3]
    (32, 18, 23)
    """
    held = forward = backward = 0
    listed = list(runs)
    for memory, count in listed:
        held += count * memory.kept
        forward = max(forward, held + memory.forward)
        backward = max(backward, held + memory.recomputed + memory.backward)
    deferred = sum(memory.deferred * count for memory, count in listed)
    inputs, weights = _fullest_inputs(listed) - held, _fullest_weights(listed)
    return StageMemory(held, max(forward - held, 0), max(backward - held, 0), deferred, inputs, weights)


def _fullest_inputs(runs: Sequence[tuple[BlockMemory, int]]) -> int:
    """Return the most bytes held while a stage makes the gradients of its inputs, the last block first.

    Each block then gives back what it kept, and leaves what the gradients of its weights need.
    """
    held = sum(memory.kept * count for memory, count in runs)
    most = held
    for memory, count in reversed(runs):
        step = memory.deferred - memory.kept
        fullest = memory.recomputed + memory.gradients + memory.inputs
        most = max(most, held + fullest, held + step * (count - 1) + fullest)
        held += step * count
    return most


def _fullest_weights(runs: Sequence[tuple[BlockMemory, int]]) -> int:
    """Return the most bytes held beyond those at the start while a stage makes the gradients of its weights."""
    held = most = 0
    for memory, count in reversed(runs):
        most = max(most, held + memory.weights)
        held -= memory.deferred * count
    return most


def peak_activations(plan: Plan, stages: Sequence[StageMemory]) -> IntArray:
    """Return the most bytes of activations and working memory that each pipeline rank holds.

    Memory changes only on the ranks' compute streams, so that the order of actions gives the peak, whatever time they
    take.
    """
    rows = actions(plan.schedule, plan.pipeline, plan.ordered_microbatches, plan.chunks)
    changes = np.array([memory.changes for memory in stages], dtype=np.int64)
    above = np.array([memory.above for memory in stages], dtype=np.int64)
    held = np.cumsum(changes[rows.stage, rows.kind])  # a rank gives back all it takes, so the next begins with nothing
    held += above[rows.stage, rows.kind]
    result: IntArray = np.maximum.reduceat(held, rows.start[:-1])
    return result


class Boundary(NamedTuple):
    """Bytes of one microbatch that a stage receives from the previous one, and bytes that it sends to the next.

    ``keeps_graph`` says that a split backward gives nothing back before its end.
    """

    before: int
    after: int
    keeps_graph: bool = False

    def applied(self, runs: Sequence[tuple[BlockMemory, int]]) -> list[tuple[BlockMemory, int]]:
        """Return the memory of a stage's blocks, in runs of equal ones, where data at its ends lie in buffers."""
        rows = [row for row in runs if row[1]]
        if self.keeps_graph and not self.before:
            return [(memory.late(), count) for memory, count in self._at_ends(rows)]
        return self._lasting(self._at_ends(rows)) if self.keeps_graph else self._at_ends(rows)

    def _at_ends(self, rows: list[tuple[BlockMemory, int]]) -> list[tuple[BlockMemory, int]]:
        """Return the memory of blocks of which the first and the last use buffers."""
        if not (self.before or self.after) or not rows:
            return rows
        (first, count), *rest = rows
        rows = [(self._within(first, self.before, 0), 1), *([(first, count - 1)] if count > 1 else []), *rest]
        last, count = rows.pop()
        return [*rows, *([(last, count - 1)] if count > 1 else []), (self._within(last, 0, self.after), 1)]

    def _within(self, memory: BlockMemory, before: int, after: int) -> BlockMemory:
        """Return the memory of a block whose input, output or both lie in buffers."""
        return memory.kept_whole(before, after) if self.keeps_graph else memory.within(before, after)

    def _lasting(self, rows: list[tuple[BlockMemory, int]]) -> list[tuple[BlockMemory, int]]:
        """Return the memory of blocks where the first one gives back what any of them loses."""
        lost = sum(memory.lost * count for memory, count in rows)
        if not lost:
            return rows
        (first, count), *rest = rows
        # Backward reaches the first block last, and a loss frees its tensors only when the gradients of all inputs are
        # made.
        ahead = first._replace(deferred=first.deferred - lost)
        return [(ahead, 1), *([(first, count - 1)] if count > 1 else []), *rest]


class BlockBuffers(NamedTuple):
    """What a block asks a framework to keep on a rank.

    Parameters
    ----------
    dummy_gradients
        The bytes of a gradient of a weight that nothing reads, by the rows and columns of the weight.
    gathered_bytes
        The buffer for the gathered input of the last product.
    has_grouped, has_others
        Whether it has products of experts, and products outside the framework's own layers.
    """

    dummies: Mapping[tuple[int, int], int]
    gathered: int
    grouped: bool
    others: bool


def block_buffers(live: Liveness) -> BlockBuffers:
    """Return the buffers that a block asks its framework to keep."""
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
    """Return the rows and columns of a rank's share of a product's weight, of one expert's if many, and its bytes."""
    tensor = layout.block.tensor[operator.parameters[0]]
    sizes = dict(zip(tensor.dims, layout.parameter_shape(tensor), strict=True))
    sizes.pop(EXPERTS, None)
    columns = prod(size for dim, size in sizes.items() if dim in operator.reduced)
    rows = prod(sizes.values()) // columns
    return (rows, columns), rows * columns * ITEMSIZE[tensor.dtype]


def flat_gradients(training: Training, plan: Plan, parameters: int) -> int:
    """Return the bytes of the flat gradient buffer that is summed after the last backward.

    A sum that leaves each rank its share needs the share too. There is none without a flush: no framework here runs
    such schedules.
    """
    flattens = training.conventions.flattens_gradients and not in_ddp_buckets(training, plan)
    if not flattens or plan.replicas == 1 or plan.zero >= 2 or plan.asynchronous:
        return 0
    shares = ceil(parameters / plan.shards) if plan.zero and plan.shards > 1 else 0
    return (parameters + shares) * training.gradient_bytes


def buffers(
    framework: Framework, blocks: Iterable[BlockBuffers], boundaries: Sequence[Boundary], microbatches: int
) -> int:
    """Return the bytes that a framework keeps on a rank for its blocks.

    Parameters
    ----------
    boundaries
        The boundaries of every stage of the rank.
    microbatches
        Microbatches of a step.
    """
    found = list(blocks)
    dummies: dict[tuple[int, int], int] = {}
    for each in found:
        dummies |= each.dummies
    # Dummy gradients are shared by weights of one shape, and the gathered input by all blocks.
    size = sum(dummies.values()) + max((each.gathered for each in found), default=0) + framework.workspace
    size += framework.grouped_workspace * any(each.grouped for each in found)
    size += framework.other_workspace * any(each.others for each in found)
    if framework.buffers_every_microbatch:
        return size + microbatches * sum(boundary.before + boundary.after for boundary in boundaries)
    return size + max((boundary.before for boundary in boundaries), default=0)
