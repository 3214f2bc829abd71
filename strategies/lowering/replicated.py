"""Parameters that ranks along an operator axis have whole, but apply to their own part: their gradients are summed.

With sequence parallelism these are the weights of norms and routers and whatever else works between the products
that are cut, and the biases of products whose sum is scattered; without it norms of queries and keys. Each rank
has the gradient of its part alone. Once a step, when data ranks have reduced them, all of them together are
all-reduced over the tensor group; and so are along each operator axis the gradients of all parameters whose
operators it cuts along a dim that they lack, the batch for one.

References
----------
Megatron-LM, ``core/distributed/finalize_model_grads.py``, ``_allreduce_layernorm_grads``;
``core/tensor_parallel/layers.py``, ``RowParallelLinear`` and ``core/transformer/moe/router.py`` (what else is marked
``sequence_parallel``). PyTorch 2, ``torch.distributed.tensor.parallel.SequenceParallel``: gradients of norms come
back partial, and are summed before the optimizer reads them.
"""

from math import ceil

from simulator.compute import is_bias
from simulator.operator_graph import SEQUENCE, Operator, Tensor
from strategies.framework import Framework
from strategies.lowering.operator import BlockLayout
from strategies.mesh import OPERATOR_AXES
from strategies.plan import Plan


def replicated_elements(layout: BlockLayout, framework: Framework) -> tuple[int, ...]:
    """Return the elements on a rank of the parameters of a block whose gradients ranks along each operator axis sum."""
    tensor, operators = layout.block.tensor, layout.block.operators
    owned = [(operator, tensor[name]) for operator in operators for name in operator.parameters]
    found = ({p.name: p for o, p in owned if in_parts(layout, framework, o, p, axis)} for axis in OPERATOR_AXES)
    return tuple(sum(map(layout.parameter_share, each.values())) for each in found)


def summed_share(plan: Plan, elements: int) -> int:
    """Return of how many of so many gradients a rank has the sum over data ranks: of its share from ZeRO 2 on."""
    return ceil(elements / plan.shards) if plan.zero >= 2 else elements


def in_parts(layout: BlockLayout, framework: Framework, operator: Operator, parameter: Tensor, axis: str) -> bool:
    """Return whether each rank along an axis has all of a parameter, and its gradient of a part of the operator."""
    if layout.mesh.size(axis) == 1:
        return False
    sharding = layout.shardings[operator.name]
    cut = any(axis in axes for dim, axes in sharding.of_kept(parameter).cuts if dim != SEQUENCE)
    if cut or layout.adds_before_cut(operator):
        return False
    if is_bias(operator, parameter) and any(axis in dict(sharding.cuts).get(dim, ()) for dim in operator.reduced):
        return framework.late_biases and _scattered(layout, operator, axis)
    return any(axis in axes for _, axes in sharding.cuts)


def _scattered(layout: BlockLayout, operator: Operator, axis: str) -> bool:
    """Return whether what an operator sums over ranks along an axis is read cut along a dim by them."""
    readers = [(each, name) for each in layout.block.operators for name in operator.outputs if name in each.inputs]
    return any(axis in axes for each, name in readers for _, axes in layout.wanted(each, name).cuts)
