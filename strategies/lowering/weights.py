"""A block's weights on one rank: their shapes as an optimizer factors them, and those that go into fp8."""

from collections.abc import Iterable
from math import prod

from simulator.compute import PRODUCTS
from simulator.operator_graph import Operator, OperatorKind, Tensor
from strategies.lowering.operator import BlockLayout
from strategies.parallelism import EXPERTS


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
    weights = {o.parameters[0] for o in layout.block.operators if o.parameters and layout.quantises(o)}
    return sum(layout.parameter_share(layout.block.tensor[name]) for name in weights)
