"""Time of an operator on an accelerator: a roofline with measured efficiency.

A matrix multiplication takes ``2 m n k`` FLOP at the rate `MatmulModel` says, and never
less than its memory traffic; every other operator is bound by memory traffic. A
convolution is the product that an implicit GEMM computes: output points times channels
out, reduced over channels in and the kernel (Chetlur et al. 2014, "cuDNN", section 3).
Experts are a batch of products, one an expert.
"""

from collections.abc import Mapping
from enum import StrEnum
from math import ceil, prod
from typing import NamedTuple

from meshwise.simulator.machine.accelerator import ACTIVATION, GATED_ACTIVATION, RMS_NORM, ROTARY, Accelerator
from meshwise.simulator.machine.kernels import (
    AttentionShape,
    Matmul,
    attention_compute_time,
    compute_time,
    soft_roofline,
    streaming_time,
)
from meshwise.simulator.operator_graph import GATES, ITEMSIZE, SEQUENCE, Block, Operator, OperatorKind, Tensor

PRODUCTS = frozenset(
    {OperatorKind.MATMUL, OperatorKind.BATCH_MATMUL, OperatorKind.GROUPED_MATMUL, OperatorKind.CONVOLUTION}
)
"""Kinds that are matrix products: their time follows `MatmulModel`, and backward does two."""


UNALIGNED = 1.9
"""How many times as long a product of 2-byte elements takes if rows of a matrix begin at odd elements: asynchronous
copies move 4 bytes at least (NVIDIA, "PTX ISA", ``cp.async``). A GPT-2 of 124 million parameters, of whose FLOP 27 %
are the output layer's, trains 25 % faster with 50304 tokens than with 50257 (Karpathy 2023 on nanoGPT, A100):
1 + 0.25 / 0.27."""


class Pass(StrEnum):
    """Which half of a training step an operator runs in."""

    FORWARD = "forward"
    BACKWARD = "backward"


def is_bias(operator: Operator, parameter: Tensor) -> bool:
    """Return whether a product adds a parameter to what it has summed."""
    return operator.kind in PRODUCTS and set(operator.reduced).isdisjoint(parameter.dims)


def read_again(operator: Operator) -> tuple[str, ...]:
    """Return the parameters that the backward of an operator reads: weights and scales, neither biases nor tables."""
    scales = operator.kind is OperatorKind.ELEMENTWISE and bool(operator.saved)
    return operator.parameters[:1] if operator.kind in PRODUCTS or operator.kind is OperatorKind.NORM or scales else ()


def matmul_time(
    accelerator: Accelerator, dtype: str, product: Matmul, traffic: float | None = None, *, grouped: bool = False
) -> float:
    """Return seconds of a batch of matrix products, without launch.

    Parameters
    ----------
    traffic
        Bytes read and written; by default both operands and the result once.
    grouped
        Whether the products are those of experts.

    >>> from meshwise.simulator.machine.accelerator import Accelerator
    >>> ideal = Accelerator("ideal", (("fp32", 1e12),), memory=1e9, memory_bandwidth=1e15)
    >>> matmul_time(ideal, "fp32", Matmul(count=1, m=1000, n=1000, k=1000))
    0.002
    """
    compute = compute_time(accelerator.matmul, accelerator.peak(dtype), product, dtype)
    if traffic is None:
        elements = product.count * (product.m * product.k + product.k * product.n + product.m * product.n)
        traffic = elements * ITEMSIZE[dtype]
    memory = traffic / accelerator.bandwidth(OperatorKind.MATMUL)
    launches = product.count * accelerator.matmul.product_launch if grouped else 0.0
    if product.count > 1 and not grouped:
        compute /= accelerator.matmul.batched
    return launches + soft_roofline(compute * accelerator.slowdown(dtype), memory, accelerator.matmul.sharpness)


def attention_time(
    accelerator: Accelerator, dtype: str, shape: AttentionShape, direction: Pass, traffic: float = 0.0, kernel: str = ""
) -> float:
    """Return seconds of fused attention by ``kernel`` that moves ``traffic`` bytes, without launch."""
    rate = accelerator.peak(dtype) * accelerator.matmul.fraction
    model, backward = accelerator.attention, direction is Pass.BACKWARD
    compute = attention_compute_time(model, rate, accelerator.matmul.units, shape, backward=backward)
    compute *= model.slowdown(kernel, backward=backward)
    return model.launch + max(compute, traffic / accelerator.bandwidth(OperatorKind.ATTENTION))


def operator_time(
    accelerator: Accelerator,
    block: Block,
    operator: Operator,
    sizes: Mapping[str, int],
    direction: Pass,
    *,
    quantised: bool = False,
    gradient_bytes: int = 0,
) -> float:
    """Return seconds of one operator on its local share of the work.

    Parameters
    ----------
    sizes
        Local size of every dim of the operator's iteration space: cut dims divided, the
        batch multiplied.
    quantised
        Whether a product casts its input, and in the backward pass its output's gradient, to fp8
        and multiplies in fp8 (Micikevicius et al. 2022, "FP8 formats for deep learning").
    gradient_bytes
        Bytes of one element of a sum to which products add the gradients of weights: they read and write it. 0 where
        they write gradients of their own, in the dtype of the input.
    """
    if operator.kind is OperatorKind.VIEW:
        return 0.0
    sizes = _loaded(operator, sizes)
    if operator.kind in PRODUCTS:
        return _matmul_operator_time(accelerator, block, operator, sizes, direction, quantised, gradient_bytes)
    if operator.kind is OperatorKind.ATTENTION:
        return _attention_time(accelerator, block, operator, sizes, direction)
    bandwidth = accelerator.bandwidth(streaming_kind(operator), backward=direction is Pass.BACKWARD)
    return streaming_time(_traffic(block, operator, sizes, direction), bandwidth, accelerator.launch)


def weight_gradient_time(
    accelerator: Accelerator,
    block: Block,
    operator: Operator,
    sizes: Mapping[str, int],
    *,
    quantised: bool = False,
    gradient_bytes: int = 0,
) -> float:
    """Return the seconds of an operator's backward that make gradients of its parameters alone.

    One of the two products of a matrix product, all of an embedding; 0 where they come with those of inputs.
    The cast to fp8 comes with the gradients of inputs, which need it first.
    """
    if not operator.parameters:
        return 0.0
    if operator.kind is OperatorKind.EMBEDDING:
        return operator_time(accelerator, block, operator, sizes, Pass.BACKWARD)
    if operator.kind not in PRODUCTS:
        return 0.0
    _, right = _gradient_times(accelerator, block, operator, _loaded(operator, sizes), quantised, gradient_bytes)
    return accelerator.launch + right


def operator_launches(operator: Operator, direction: Pass, *, quantised: bool = False) -> int:
    """Return how many kernels an operator launches: a product has two gradients, a cast comes before fp8.

    A view launches none.
    """
    if operator.kind is OperatorKind.VIEW:
        return 0
    return (2 if operator.kind in PRODUCTS and direction is Pass.BACKWARD else 1) + quantised


def streaming_kind(operator: Operator) -> str:
    """Return the kind whose part of the memory bandwidth an operator reaches that is no product.

    Elementwise operators whose backward reads what forward kept are nonlinear: they compute. Sums and copies keep
    nothing; of those, rotary positions alone make several tensors of as many. A norm of root mean squares takes one
    statistic.
    """
    if operator.kind is OperatorKind.NORM and sum(number for _, number in operator.statistics) == 1:
        return RMS_NORM
    if operator.kind is not OperatorKind.ELEMENTWISE:
        return operator.kind
    if operator.saved:
        return GATED_ACTIVATION if GATES in dict(operator.dims) else ACTIVATION
    return ROTARY if len(operator.inputs) >= len(operator.outputs) > 1 else operator.kind


def optimizer_time(accelerator: Accelerator, traffic: float, num_tensors: int = 0) -> float:
    """Return seconds of the optimizer's step, which reads and writes ``traffic`` bytes, tensor by tensor."""
    launches = accelerator.launch + num_tensors * accelerator.optimizer_launch
    return launches + traffic / accelerator.bandwidth("optimizer")


def local_size(tensor: Tensor, sizes: Mapping[str, int]) -> int:
    """Return the elements of the local share of ``tensor``."""
    return prod(sizes.get(dim, size) for dim, size in zip(tensor.dims, tensor.shape, strict=True))


def local_bytes(tensor: Tensor, sizes: Mapping[str, int]) -> int:
    """Return the bytes of the local share of ``tensor``."""
    return local_size(tensor, sizes) * ITEMSIZE[tensor.dtype]


def _traffic(block: Block, operator: Operator, sizes: Mapping[str, int], direction: Pass) -> float:
    """Return bytes read and written, each tensor once."""
    size = {
        name: local_bytes(block.tensor[name], sizes) for name in operator.inputs + operator.outputs + operator.saved
    }
    written = sum(size[name] for name in operator.outputs)
    if operator.kind is OperatorKind.EMBEDDING:
        return float(_gathered(block, operator, sizes) + written)
    read = sum(size[name] for name in operator.inputs)
    saved = [name for name in operator.saved if name not in operator.inputs + operator.outputs]
    masks = sum(size[name] for name in saved)
    if direction is Pass.FORWARD:
        return read + written + masks
    return sum(size[name] for name in operator.saved) + written + read


def _gathered(block: Block, operator: Operator, sizes: Mapping[str, int]) -> int:
    """Return the bytes of the rows of a table that are gathered or, backward, scattered: no others are touched."""
    table = block.tensor[operator.parameters[0]]
    rows = table.dims[0]
    return prod(sizes[dim] for dim, _ in operator.dims if dim != rows) * ITEMSIZE[table.dtype]


def _loaded(operator: Operator, sizes: Mapping[str, int]) -> Mapping[str, int]:
    """Return the sizes on the rank that experts load most."""
    return sizes if operator.imbalance == 1 else {**sizes, "capacity": _largest_capacity(operator, sizes)}


def _largest_capacity(operator: Operator, sizes: Mapping[str, int]) -> int:
    """Return the tokens an expert of the most loaded rank takes: one expert is loaded most, the others share the rest.

    >>> experts = Operator("up", OperatorKind.GROUPED_MATMUL, (("experts", 8),), (), (), imbalance=2.0)
    >>> [_largest_capacity(experts, {"experts": local, "capacity": 100}) for local in (1, 2, 8)]
    [200, 143, 100]
    """
    total, local = dict(operator.dims)["experts"], sizes["experts"]
    others = (total - operator.imbalance) / max(total - 1, 1)
    load = (operator.imbalance + (local - 1) * others) / local
    return ceil(round(sizes["capacity"] * load, 6))


def _matmul_operator_time(
    accelerator: Accelerator,
    block: Block,
    operator: Operator,
    sizes: Mapping[str, int],
    direction: Pass,
    quantised: bool,
    gradient_bytes: int,
) -> float:
    seconds = operator_launches(operator, direction, quantised=quantised) * accelerator.launch
    if quantised:
        seconds += _cast_time(accelerator, block, operator, sizes, direction)
    if direction is Pass.BACKWARD:
        return seconds + sum(_gradient_times(accelerator, block, operator, sizes, quantised, gradient_bytes))
    dtype, traffic = _multiplied(block, operator, quantised), _moved(block, operator, sizes, quantised)
    product = _product(block, operator, sizes)
    forward = matmul_time(accelerator, dtype, product, traffic.result, grouped=_grouped(operator))
    return seconds + forward * _misalignment(operator, dtype, product)


def _gradient_times(
    accelerator: Accelerator,
    block: Block,
    operator: Operator,
    sizes: Mapping[str, int],
    quantised: bool,
    gradient_bytes: int,
) -> tuple[float, float]:
    """Return the seconds of the two products of a backward: the gradients of the inputs, and of the weights."""
    product, traffic = _product(block, operator, sizes), _moved(block, operator, sizes, quantised)
    if gradient_bytes:
        wide = ITEMSIZE[block.tensor[operator.inputs[0]].dtype]
        more = _elements(block, operator, sizes).weight * (2 * gradient_bytes - wide)
        traffic = traffic._replace(weight=traffic.weight + more)
    dtype, model = _multiplied(block, operator, quantised), accelerator.matmul
    left = Matmul(product.count, product.m, product.k, product.n)
    right = Matmul(product.count, product.k, product.n, product.m)
    first = matmul_time(accelerator, dtype, left, traffic.image, grouped=_grouped(operator))
    second = matmul_time(accelerator, dtype, right, traffic.weight, grouped=_grouped(operator))
    slower = _misalignment(operator, dtype, product)
    return slower * first / model.data_gradient, slower * second / model.weight_gradient


def _misalignment(operator: Operator, dtype: str, product: Matmul) -> float:
    """Return how many times as long a product takes for where the rows of its matrices begin: ``k`` or ``n`` apart."""
    odd = product.n % 2 or product.k % 2
    return UNALIGNED if odd and ITEMSIZE[dtype] == 2 and operator.kind is not OperatorKind.CONVOLUTION else 1.0


def _grouped(operator: Operator) -> bool:
    return operator.kind is OperatorKind.GROUPED_MATMUL


def _cast_time(
    accelerator: Accelerator, block: Block, operator: Operator, sizes: Mapping[str, int], direction: Pass
) -> float:
    """Return the seconds in which a product in fp8 casts what was not known before, without launch.

    One kernel writes it and its transpose (Transformer Engine's fused cast and transpose); the weight is
    cast once a step, with the optimizer.
    """
    elements = _elements(block, operator, sizes)
    cast = elements.image if direction is Pass.FORWARD else elements.result
    wide = ITEMSIZE[block.tensor[operator.inputs[0]].dtype]
    return cast * (wide + 2 * ITEMSIZE["fp8"]) / accelerator.bandwidth(OperatorKind.ELEMENTWISE)


def _multiplied(block: Block, operator: Operator, quantised: bool) -> str:
    """Return the dtype in which a product multiplies."""
    return "fp8" if quantised else block.tensor[operator.inputs[0]].dtype


class _Operands(NamedTuple):
    """Something of a product's input, its weight, and its result."""

    image: int
    weight: int
    result: int


def _elements(block: Block, operator: Operator, sizes: Mapping[str, int]) -> _Operands:
    """Return the elements of a product's operands: a convolution, as an implicit GEMM, reads the image, not patches."""
    if operator.kind is not OperatorKind.CONVOLUTION:
        product = _product(block, operator, sizes)
        sides = (product.m * product.k, product.k * product.n, product.m * product.n)
        return _Operands(*(product.count * side for side in sides))
    names = operator.inputs, operator.parameters[:1], operator.outputs
    return _Operands(*(sum(local_size(block.tensor[each], sizes) for each in some) for some in names))


def _moved(block: Block, operator: Operator, sizes: Mapping[str, int], quantised: bool) -> _Operands:
    """Return the bytes that the product moves which makes each operand, or its gradient, of the two others.

    In fp8 what it makes is as wide as the input was.
    """
    elements, wide = _elements(block, operator, sizes), ITEMSIZE[block.tensor[operator.inputs[0]].dtype]
    read = ITEMSIZE["fp8"] if quantised else wide
    return _Operands(*(sum(elements) * read + made * (wide - read) for made in elements))


def _product(block: Block, operator: Operator, sizes: Mapping[str, int]) -> Matmul:
    """Return the matrix product: k is reduced, n is only in the second operand, count in both, m is the rest."""
    first = set(block.tensor[operator.inputs[0]].dims)
    second = set(block.tensor[(operator.parameters or operator.inputs[1:])[0]].dims)
    count = m = n = k = 1
    for dim, _ in operator.dims:
        if dim in operator.reduced:
            k *= sizes[dim]
        elif dim in first & second:
            count *= sizes[dim]
        elif dim in second:
            n *= sizes[dim]
        else:
            m *= sizes[dim]
    return Matmul(count, m, n, k)


def _attention_time(
    accelerator: Accelerator, block: Block, operator: Operator, sizes: Mapping[str, int], direction: Pass
) -> float:
    traffic = _traffic(block, operator, sizes, direction)
    dtype = block.tensor[operator.inputs[0]].dtype
    return accelerator.launch + attention_time(
        accelerator, dtype, _attended(block, operator, sizes), direction, traffic, operator.kernel
    )


def _attended(block: Block, operator: Operator, sizes: Mapping[str, int]) -> AttentionShape:
    """Return the shape of fused attention; its query has dims ``batch sequence heads group head_dim``.

    Tokens that are no ``sequence`` are those dims of the query that the keys do not have.
    """
    query, keys, context = (block.tensor[name] for name in (*operator.inputs[:2], operator.outputs[0]))
    tokens = [dim for dim in query.dims[:-1] if dim not in keys.dims]
    tokens = [SEQUENCE] if SEQUENCE in query.dims[:-1] else tokens
    heads = prod(sizes[dim] for dim in query.dims[:-1] if dim not in tokens)
    attended = prod(sizes[dim] for dim in keys.dims[:-1] if dim not in query.dims)
    widths = query.shape[-1], context.shape[-1]
    width = sum(widths) / 2
    flops = operator.flops_per_point * operator.executed_fraction * prod(sizes[dim] for dim, _ in operator.dims)
    attending = prod(sizes[dim] for dim in tokens)
    seen = flops / (4.0 * heads * attending * width)
    return AttentionShape(heads, attending, attended, width, seen, float(max(widths)))
