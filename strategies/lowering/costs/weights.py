"""A block's weights on one rank: their local shapes, those that ranks have whole, and those that two stages share.

Shapes are given as an optimizer factors them, and weights that a layer multiplies by in fp8 are counted.

**Replicated parameters.** Ranks along an operator axis have some parameters whole but apply them to their own part of
the data, so that their gradients must be summed. With sequence parallelism these are the weights of norms, routers
and whatever else works between the products that are cut, and the biases of products whose sum is scattered; without
it they are norms of queries and keys. Each rank has the gradient of its part alone. Once a step, when data ranks have
reduced them, all of these gradients together are all-reduced over the tensor group [1]_ [2]_ [3]_; and so are, along
each operator axis, the gradients of all parameters whose operators it cuts along a dim that they lack, such as the
batch.

**Tied parameters.** One parameter used by two blocks is kept twice where these are on two stages. The word embedding
is also the output layer, and with a pipeline its gradient is summed between the first and the last stage [4]_.

References
----------
.. [1] Megatron-LM, ``core/distributed/finalize_model_grads.py``, ``_allreduce_layernorm_grads``.
.. [2] Megatron-LM, ``core/tensor_parallel/layers.py``, ``RowParallelLinear`` and ``core/transformer/moe/router.py``
   (what else is marked ``sequence_parallel``).
.. [3] PyTorch 2, ``torch.distributed.tensor.parallel.SequenceParallel``: gradients of norms come back partial, and are
   summed before the optimizer reads them.
.. [4] Shoeybi et al. 2019, "Megatron-LM".
"""

from collections.abc import Iterable, Sequence
from math import ceil, prod
from typing import NamedTuple

from meshwise.simulator.machine.compute import PRODUCTS, is_bias
from meshwise.simulator.operator_graph import SEQUENCE, Operator, OperatorGraph, OperatorKind, Tensor
from meshwise.strategies.lowering.costs.layout import BlockLayout
from meshwise.strategies.plan.framework import Framework
from meshwise.strategies.plan.mesh import OPERATOR_AXES
from meshwise.strategies.plan.parallelism import EXPERTS
from meshwise.strategies.plan.partition import Stage
from meshwise.strategies.plan.plan import SharedStates
from meshwise.strategies.plan.problem import Training


def factored_elements(layout: BlockLayout, parameters: Iterable[Tensor]) -> int:
    """Return the rows and columns of a rank's share of some matrices of a block, plus the elements of its vectors."""
    owners = {name: operator for operator in layout.block.operators for name in operator.parameters}
    return sum(factored_share(layout, owners[tensor.name], tensor) for tensor in parameters)


def factored_share(layout: BlockLayout, operator: Operator, tensor: Tensor) -> int:
    """Return the rows and columns of a rank's share of one parameter, or its elements where it is a vector.

    The weight of a product has the reduced dims as rows and the others as columns, one matrix an expert;
    its bias is a vector. Any other parameter has its first dim as rows.
    """
    is_product = operator.kind in PRODUCTS
    rows = [dim for dim in tensor.dims if dim in operator.reduced] if is_product else list(tensor.dims[:1])
    shape = dict(zip(tensor.dims, layout.parameter_shape(tensor), strict=True))
    num_experts = shape.pop(EXPERTS, 1) if operator.kind is OperatorKind.GROUPED_MATMUL else 1
    height = prod(shape[dim] for dim in rows)
    width = prod(size for dim, size in shape.items() if dim not in rows)
    return num_experts * (height + width if rows and len(rows) < len(shape) else height * width)


def quantised_elements(layout: BlockLayout) -> int:
    """Return the elements of a rank's share of the weights that a block multiplies by in fp8."""
    return sum(layout.parameter_share(layout.block.tensor[name]) for name in _find_quantised(layout))


def _find_quantised(layout: BlockLayout) -> set[str]:
    """Return the names of the weights that a block multiplies by in fp8."""
    return {
        operator.parameters[0]
        for operator in layout.block.operators
        if operator.parameters and layout.quantises(operator)
    }


class Unit(NamedTuple):
    """What data ranks share at once of a block's parameters: all of them, or the largest where they share one by one.

    Parameters
    ----------
    elements, expert_elements
        Elements on a rank whose gradients are whole at once: of parameters of no expert, and of experts.
    size
        Bytes on a rank of what is gathered, copies in fp8 included.
    """

    elements: int = 0
    expert_elements: int = 0
    size: int = 0


def find_unit(training: Training, layout: BlockLayout) -> Unit:
    """Return what data ranks share at once of a block's parameters."""
    combine = max if training.conventions.shares_weights else sum
    expert_names = {tensor.name for tensor in layout.expert_parameters()}
    quantised_names = _find_quantised(layout) if training.quantised_bytes else set()
    shares = {tensor.name: layout.parameter_share(tensor) for tensor in layout.block.parameters}
    sizes = [
        n * (training.parameter_bytes + training.more_bytes * (name in quantised_names)) for name, n in shares.items()
    ]
    return Unit(
        combine([0, *(n for name, n in shares.items() if name not in expert_names)]),
        combine([0, *(n for name, n in shares.items() if name in expert_names)]),
        combine([0, *sizes]),
    )


def replicated_elements(layout: BlockLayout, framework: Framework) -> tuple[int, ...]:
    """Return the elements on a rank of a block's parameters whose gradients are summed along each operator axis."""
    tensors, operators = layout.block.tensor, layout.block.operators
    operator_parameters = [(operator, tensors[name]) for operator in operators for name in operator.parameters]
    replicated_parameters = (
        {
            parameter.name: parameter
            for owner, parameter in operator_parameters
            if has_partial_gradient(layout, framework, owner, parameter, axis)
        }
        for axis in OPERATOR_AXES
    )
    return tuple(sum(map(layout.parameter_share, parameters.values())) for parameters in replicated_parameters)


def summed_elements(plan: SharedStates, elements: int) -> int:
    """Return how many of ``elements`` gradients a rank has summed over data ranks: its share alone from ZeRO 2 on."""
    return ceil(elements / plan.shards) if plan.zero >= 2 else elements


def has_partial_gradient(
    layout: BlockLayout, framework: Framework, operator: Operator, parameter: Tensor, axis: str
) -> bool:
    """Return whether each rank along an axis has all of a parameter, but its gradient of one part alone."""
    if layout.mesh.size(axis) == 1:
        return False
    sharding = layout.shardings[operator.name]
    is_cut = any(axis in axes for dim, axes in sharding.find_kept_spec(parameter).cuts if dim != SEQUENCE)
    if is_cut or layout.adds_before_cut(operator):
        return False
    # A bias is added after its product is summed: on scattered parts each rank has the gradient of its own part.
    if is_bias(operator, parameter) and any(axis in dict(sharding.cuts).get(dim, ()) for dim in operator.reduced):
        return framework.late_biases and _is_scattered(layout, operator, axis)
    return any(axis in axes for _, axes in sharding.cuts)


def _is_scattered(layout: BlockLayout, operator: Operator, axis: str) -> bool:
    """Return whether readers cut the output of an operator, a sum over ranks along an axis, along that axis."""
    readers = [
        (reader, name) for reader in layout.block.operators for name in operator.outputs if name in reader.inputs
    ]
    return any(axis in axes for reader, name in readers for _, axes in layout.input_layout(reader, name).cuts)


def find_tied_parameters(
    graph: OperatorGraph, stages: Sequence[Stage], positions: Sequence[int]
) -> list[tuple[tuple[int, int], tuple[str, str]]]:
    """Return the pairs of pipeline positions that keep one parameter each, with its block and name."""
    if not graph.tied or max(positions) == 0:
        return []
    position_of = {block: position for stage, position in zip(stages, positions, strict=True) for block in stage.blocks}
    ties = [
        ((position_of.get(first_use[0], -1), position_of.get(second_use[0], -1)), second_use)
        for first_use, second_use in graph.tied
    ]
    return [(pair, parameter) for pair, parameter in ties if pair[0] != pair[1] and min(pair) >= 0]
