"""A block's weights on one rank: their shapes as an optimizer factors them, and those that go into fp8."""

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from simulator.compute import PRODUCTS
from simulator.operator_graph import Operator, OperatorKind, Tensor
from strategies.lowering.operator import BlockLayout
from strategies.parallelism import EXPERTS
from strategies.training import Training


def factored_elements(layout: BlockLayout, parameters: Iterable[Tensor]) -> int:
    """Return the rows and columns of a rank's share of some matrices of a block, and the elements of vectors."""
    owners = {name: operator for operator in layout.block.operators for name in operator.parameters}
    return sum(factored_share(layout, owners[tensor.name], tensor) for tensor in parameters)


def factored_share(layout: BlockLayout, operator: Operator, tensor: Tensor) -> int:
    """Return the rows and columns of a rank's share of one parameter, or its elements where it is a vector.

    The weight of a product has the reduced dims as rows and the others as columns, one matrix an expert;
    its bias is a vector. Any other parameter has its first dim as rows.
    """
    product = operator.kind in PRODUCTS
    rows = [dim for dim in tensor.dims if dim in operator.reduced] if product else list(tensor.dims[:1])
    shape = dict(zip(tensor.dims, layout.parameter_shape(tensor), strict=True))
    count = shape.pop(EXPERTS, 1) if operator.kind is OperatorKind.GROUPED_MATMUL else 1
    height = prod(shape[dim] for dim in rows)
    width = prod(size for dim, size in shape.items() if dim not in rows)
    return count * (height + width if rows and len(rows) < len(shape) else height * width)


def quantised_elements(layout: BlockLayout) -> int:
    """Return the elements of a rank's share of the weights that a block multiplies by in fp8."""
    return sum(layout.parameter_share(layout.block.tensor[name]) for name in _quantised(layout))


def _quantised(layout: BlockLayout) -> set[str]:
    return {o.parameters[0] for o in layout.block.operators if o.parameters and layout.quantises(o)}


class Unit(NamedTuple):
    """What of a block's parameters data ranks share at once: all of them, or the largest where they share one by one.

    Parameters
    ----------
    elements, experts
        Elements on a rank whose gradients are whole at once: of what is no expert, and of experts.
    size
        Bytes on a rank of what is gathered, copies in fp8 included.
    """

    elements: int = 0
    experts: int = 0
    size: int = 0


def unit(training: Training, layout: BlockLayout) -> Unit:
    """Return what of a block's parameters data ranks share at once."""
    at_once = max if training.conventions.shares_weights else sum
    own = {tensor.name for tensor in layout.expert_parameters()}
    cast = _quantised(layout) if training.quantised_bytes else set()
    shares = {tensor.name: layout.parameter_share(tensor) for tensor in layout.block.parameters}
    sizes = [n * (training.parameter_bytes + training.more_bytes * (name in cast)) for name, n in shares.items()]
    return Unit(
        at_once([0, *(n for name, n in shares.items() if name not in own)]),
        at_once([0, *(n for name, n in shares.items() if name in own)]),
        at_once([0, *sizes]),
    )
