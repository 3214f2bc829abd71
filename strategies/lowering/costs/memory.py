"""Memory of a plan on one rank: what stays for the whole step, and the peak that a schedule reaches.

Part of what stays are buffers that a framework keeps besides states and activations.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, prod
from typing import NamedTuple

from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.compute import PRODUCTS
from meshwise.simulator.operator_graph import ITEMSIZE, Operator, OperatorKind
from meshwise.simulator.program import Category, MemoryChange
from meshwise.strategies.lowering.costs.liveness import Liveness
from meshwise.strategies.lowering.costs.offload import NO_HOST_SHARE, HostShare, host_states
from meshwise.strategies.lowering.costs.operator import BlockLayout
from meshwise.strategies.lowering.costs.optimizer import (
    Parameters,
    allocates_gradients,
    count_updated_parameters,
    state_bytes,
    uses_ddp_buckets,
)
from meshwise.strategies.lowering.costs.recompute import BlockMemory
from meshwise.strategies.plan.framework import Framework
from meshwise.strategies.plan.parallelism import EXPERTS
from meshwise.strategies.plan.plan import SharedStates
from meshwise.strategies.plan.problem import Training


class StateCopies(NamedTuple):
    """Number of versions of its weights, and of buffers of gradients, that a rank keeps."""

    weights: int
    gradients: int


SINGLE_COPY = StateCopies(1, 1)
"""One version of the weights and one buffer of gradients."""


def list_residents(
    accelerator: Accelerator,
    training: Training,
    plan: SharedStates,
    parameters: Parameters,
    buffers: int,
    rank_class: int,
    host_share: HostShare = NO_HOST_SHARE,
    num_copies: StateCopies = SINGLE_COPY,
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
    num_updated = count_updated_parameters(plan, parameters.elements, parameters.expert_elements)
    gathers_units = plan.zero == 3 and plan.shards > 1  # copies in fp8 are then made of each block and given up with it
    quantised_bytes = 0 if gathers_units else parameters.quantised_elements * training.more_bytes
    all_state_bytes, host_state_bytes = (
        state_bytes(training, plan, parameters),
        host_states(training, plan, parameters, host_share),
    )
    gradient_bytes = 0 if allocates_gradients(training, plan) else training.gradient_bytes
    weights, gradients = ((num_updated if plan.zero >= min_zero else parameters.elements) for min_zero in (3, 2))
    weights -= host_share.parameters
    if plan.shards > 1 and plan.zero == 2 and training.conventions.keeps_shards and not training.mains_as_shards:
        weights += num_updated
    # Shards of the main copy, which count as optimizer state, are then the only parameters that stay.
    if plan.shards > 1 and plan.zero == 3 and training.mains_as_shards:
        weights = 0
    device_sizes = {
        Category.PARAMETERS: num_copies.weights * (weights * training.parameter_bytes + quantised_bytes),
        Category.GRADIENTS: num_copies.gradients * (gradients - host_share.parameters) * gradient_bytes,
        Category.OPTIMIZER: all_state_bytes - host_state_bytes,
        Category.BUFFERS: int(accelerator.reserved) + buffers,
    }
    host_sizes = {
        Category.PARAMETERS: host_share.parameters * training.parameter_bytes * (not training.mains_as_shards),
        Category.GRADIENTS: host_share.parameters * training.gradient_bytes,
        Category.OPTIMIZER: host_state_bytes,
    }
    device_changes = tuple(MemoryChange(rank_class, category, size) for category, size in device_sizes.items())
    return (
        *device_changes,
        *(MemoryChange(rank_class, category, size, host=True) for category, size in host_sizes.items() if size),
    )


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

    kept_bytes: int
    forward: int
    backward: int
    deferred_bytes: int = 0
    inputs: int = 0
    weights: int = 0

    @property
    def changes(self) -> tuple[int, int, int, int]:
        """Bytes that each kind of action takes, negative where it gives back."""
        return self.kept_bytes, -self.kept_bytes, self.deferred_bytes - self.kept_bytes, -self.deferred_bytes

    @property
    def working_bytes(self) -> tuple[int, int, int, int]:
        """Bytes that each kind of action holds at its fullest moment beyond those held after it."""
        inputs = self.kept_bytes - self.deferred_bytes + self.inputs
        return self.forward, self.kept_bytes + self.backward, inputs, self.deferred_bytes + self.weights


def stage_memory(runs: Iterable[tuple[BlockMemory, int]]) -> StageMemory:
    """Return the memory of a stage whose blocks come in runs of equal ones.

    Forward keeps block after block and backward gives back the last one first, so that each run is fullest at its last
    block.

    >>> layer = BlockMemory(kept_bytes=10, recomputed_bytes=5, forward=20, backward=20)
    >>> stage_memory([(layer, 3), (BlockMemory(2, 0, 1, 1), 1)])[:3]
    (32, 18, 23)
    """
    kept_bytes = forward = backward = 0
    run_list = list(runs)
    for memory, count in run_list:
        kept_bytes += count * memory.kept_bytes
        forward = max(forward, kept_bytes + memory.forward)
        backward = max(backward, kept_bytes + memory.recomputed_bytes + memory.backward)
    deferred_bytes = sum(memory.deferred_bytes * count for memory, count in run_list)
    inputs, weights = _find_input_peak(run_list) - kept_bytes, _find_weight_peak(run_list)
    return StageMemory(
        kept_bytes, max(forward - kept_bytes, 0), max(backward - kept_bytes, 0), deferred_bytes, inputs, weights
    )


def _find_input_peak(runs: Sequence[tuple[BlockMemory, int]]) -> int:
    """Return the most bytes held while a stage makes the gradients of its inputs, the last block first.

    Each block then gives back what it kept, and leaves what the gradients of its weights need.
    """
    level = sum(memory.kept_bytes * count for memory, count in runs)
    peak = level
    for memory, count in reversed(runs):
        change = memory.deferred_bytes - memory.kept_bytes
        working_bytes = memory.recomputed_bytes + memory.gradients + memory.inputs
        peak = max(peak, level + working_bytes, level + change * (count - 1) + working_bytes)
        level += change * count
    return peak


def _find_weight_peak(runs: Sequence[tuple[BlockMemory, int]]) -> int:
    """Return the most bytes held beyond those at the start while a stage makes the gradients of its weights."""
    level = peak = 0
    for memory, count in reversed(runs):
        peak = max(peak, level + memory.weights)
        level -= memory.deferred_bytes * count
    return peak


class Boundary(NamedTuple):
    """Bytes of one microbatch that a stage receives from the previous one, and bytes that it sends to the next.

    ``keeps_graph`` says that a split backward gives nothing back before its end.
    """

    received_bytes: int
    sent_bytes: int
    keeps_graph: bool = False

    def apply_buffers(self, runs: Sequence[tuple[BlockMemory, int]]) -> list[tuple[BlockMemory, int]]:
        """Return the memory of a stage's blocks, in runs of equal ones, where data at its ends lie in buffers."""
        rows = [row for row in runs if row[1]]
        if self.keeps_graph and not self.received_bytes:
            return [(memory.with_late_gradients(), count) for memory, count in self._buffer_ends(rows)]
        return self._keep_lost_bytes(self._buffer_ends(rows)) if self.keeps_graph else self._buffer_ends(rows)

    def _buffer_ends(self, rows: list[tuple[BlockMemory, int]]) -> list[tuple[BlockMemory, int]]:
        """Return the memory of blocks of which the first and the last use buffers."""
        if not (self.received_bytes or self.sent_bytes) or not rows:
            return rows
        (first_memory, count), *other_rows = rows
        rows = [
            (self._buffer_block(first_memory, self.received_bytes, 0), 1),
            *([(first_memory, count - 1)] if count > 1 else []),
            *other_rows,
        ]
        last_memory, count = rows.pop()
        return [
            *rows,
            *([(last_memory, count - 1)] if count > 1 else []),
            (self._buffer_block(last_memory, 0, self.sent_bytes), 1),
        ]

    def _buffer_block(self, memory: BlockMemory, received_bytes: int, sent_bytes: int) -> BlockMemory:
        """Return the memory of a block whose input, output or both lie in buffers."""
        return (
            memory.with_kept_graph(received_bytes, sent_bytes)
            if self.keeps_graph
            else memory.with_buffers(received_bytes, sent_bytes)
        )

    def _keep_lost_bytes(self, rows: list[tuple[BlockMemory, int]]) -> list[tuple[BlockMemory, int]]:
        """Return the memory of blocks where the first one gives back what any of them loses."""
        lost_bytes = sum(memory.lost_bytes * count for memory, count in rows)
        if not lost_bytes:
            return rows
        (first_memory, count), *other_rows = rows
        # Backward reaches the first block last, and a loss frees its tensors only when the gradients of all inputs are
        # made.
        leading_memory = first_memory._replace(deferred_bytes=first_memory.deferred_bytes - lost_bytes)
        return [(leading_memory, 1), *([(first_memory, count - 1)] if count > 1 else []), *other_rows]


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

    dummy_gradients: Mapping[tuple[int, int], int]
    gathered_bytes: int
    has_grouped: bool
    has_others: bool


def find_block_buffers(liveness: Liveness) -> BlockBuffers:
    """Return the buffers that a block asks its framework to keep."""
    layout, framework = liveness.layout, liveness.framework
    score_names = {
        name for operator in layout.block.operators if operator.kind is OperatorKind.TOP_K for name in operator.inputs
    }
    products = [operator for operator in layout.block.operators if operator.kind in PRODUCTS and operator.parameters]
    routers = [operator for operator in products if operator.outputs[0] in score_names]
    last_products = [operator for operator in products if liveness.is_last_product(operator)]
    dummy_gradients = (
        dict(_find_weight_shape(layout, operator) for operator in products if operator not in routers)
        if framework.dummy_gradients
        else {}
    )
    gathered_bytes = (
        max((liveness.gathered_input_bytes(operator) for operator in last_products), default=0)
        if framework.gather_buffer
        else 0
    )
    has_grouped = any(operator.kind is OperatorKind.GROUPED_MATMUL for operator in products)
    return BlockBuffers(dummy_gradients, gathered_bytes, has_grouped, bool(routers or last_products))


def _find_weight_shape(layout: BlockLayout, operator: Operator) -> tuple[tuple[int, int], int]:
    """Return the rows and columns of a rank's share of a product's weight, of one expert's if many, and its bytes."""
    tensor = layout.block.tensor[operator.parameters[0]]
    sizes = dict(zip(tensor.dims, layout.parameter_shape(tensor), strict=True))
    sizes.pop(EXPERTS, None)
    columns = prod(size for dim, size in sizes.items() if dim in operator.reduced)
    rows = prod(sizes.values()) // columns
    return (rows, columns), rows * columns * ITEMSIZE[tensor.dtype]


def flat_gradient_bytes(training: Training, plan: SharedStates, parameters: int) -> int:
    """Return the bytes of the flat gradient buffer that is summed after the last backward.

    A sum that leaves each rank its share needs the share too. There is none without a flush: no framework here runs
    such schedules.
    """
    flattens = training.conventions.flattens_gradients and not uses_ddp_buckets(training, plan)
    if not flattens or plan.replicas == 1 or plan.zero >= 2 or plan.asynchronous:
        return 0
    num_shard_elements = ceil(parameters / plan.shards) if plan.zero and plan.shards > 1 else 0
    return (parameters + num_shard_elements) * training.gradient_bytes


def count_buffer_bytes(
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
    block_list = list(blocks)
    dummy_gradients: dict[tuple[int, int], int] = {}
    for block in block_list:
        dummy_gradients |= block.dummy_gradients
    # Dummy gradients are shared by weights of one shape, and the gathered input by all blocks.
    size = (
        sum(dummy_gradients.values())
        + max((block.gathered_bytes for block in block_list), default=0)
        + framework.workspace
    )
    size += framework.grouped_workspace * any(block.has_grouped for block in block_list)
    size += framework.other_workspace * any(block.has_others for block in block_list)
    if framework.buffers_every_microbatch:
        return size + microbatches * sum(boundary.received_bytes + boundary.sent_bytes for boundary in boundaries)
    return size + max((boundary.received_bytes for boundary in boundaries), default=0)
