"""Parameters that every tensor rank has whole, but applies to its own tokens or heads: their gradients are summed.

With sequence parallelism these are the weights of norms and routers and whatever else works between the products
that are cut, and the biases of products whose sum is scattered; without it norms of queries and keys. Each rank
has the gradient of its part alone. Once a step, when data ranks have reduced them, all of them together are
all-reduced over the tensor group.

References
----------
Megatron-LM, ``core/distributed/finalize_model_grads.py``, ``_allreduce_layernorm_grads``;
``core/tensor_parallel/layers.py``, ``RowParallelLinear`` and ``core/transformer/moe/router.py`` (what else is marked
``sequence_parallel``). PyTorch 2, ``torch.distributed.tensor.parallel.SequenceParallel``: gradients of norms come
back partial, and are summed before the optimizer reads them.
"""

from math import ceil

from simulator.compute import PRODUCTS
from simulator.operator_graph import SEQUENCE, Operator, Tensor
from strategies.framework import Framework
from strategies.lowering.operator import BlockLayout
from strategies.mesh import TENSOR
from strategies.plan import Plan


def replicated_elements(layout: BlockLayout, framework: Framework) -> int:
    """Return the elements on a rank of the parameters of a block whose gradients tensor ranks sum."""
    tensor, operators = layout.block.tensor, layout.block.operators
    owned = ((operator, tensor[name]) for operator in operators for name in operator.parameters)
    found = {each.name: each for operator, each in owned if _in_parts(layout, framework, operator, each)}
    return sum(map(layout.parameter_share, found.values()))


def summed_share(plan: Plan, elements: int) -> int:
    """Return of how many of so many gradients a rank has the sum over data ranks: of its share from ZeRO 2 on."""
    return ceil(elements / plan.shards) if plan.zero >= 2 else elements


def _in_parts(layout: BlockLayout, framework: Framework, operator: Operator, parameter: Tensor) -> bool:
    """Return whether each tensor rank has all of a parameter, and its gradient of a part of the operator."""
    sharding = layout.shardings[operator.name]
    cut = any(TENSOR in axes for dim, axes in sharding.of_kept(parameter).cuts if dim != SEQUENCE)
    if cut or layout.adds_before_cut(operator):
        return False
    if _is_bias(operator, parameter) and any(TENSOR in dict(sharding.cuts).get(dim, ()) for dim in operator.reduced):
        return framework.late_biases and _scattered(layout, operator)
    return any(TENSOR in axes for _, axes in sharding.cuts)


def _is_bias(operator: Operator, parameter: Tensor) -> bool:
    return operator.kind in PRODUCTS and set(operator.reduced).isdisjoint(parameter.dims)


def _scattered(layout: BlockLayout, operator: Operator) -> bool:
    """Return whether what an operator sums over tensor ranks is read cut along the sequence by them."""
    readers = [(each, name) for each in layout.block.operators for name in operator.outputs if name in each.inputs]
    return any(TENSOR in layout.wanted(each, name).axes(SEQUENCE) for each, name in readers)
