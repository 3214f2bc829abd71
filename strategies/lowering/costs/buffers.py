"""Buffers that a framework keeps on a rank besides states and activations."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

from meshwise.simulator.machine.compute import PRODUCTS
from meshwise.simulator.operator_graph import ITEMSIZE, Operator, OperatorKind
from meshwise.strategies.lowering.costs.layout import BlockLayout
from meshwise.strategies.lowering.costs.liveness import Liveness
from meshwise.strategies.lowering.costs.memory import Boundary
from meshwise.strategies.plan.framework import Framework
from meshwise.strategies.plan.parallelism import EXPERTS


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
