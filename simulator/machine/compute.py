"""Time of an operator on an accelerator: a roofline with measured efficiency.

A matrix product takes ``2 m n k`` FLOP at the rate of the `MatmulModel`, and never less than its memory traffic; fused
attention follows the `AttentionModel`; memory traffic alone bounds every other operator. A convolution is the product
of an implicit GEMM: output points times output channels, summed over input channels and the kernel's points (Chetlur
et al. 2014, "cuDNN", section 3). Experts are a batch of products, one for each expert.
"""

from collections.abc import Mapping
from enum import StrEnum
from math import ceil, prod
from typing import NamedTuple

from meshwise.simulator.machine.accelerator import ACTIVATION, GATED_ACTIVATION, RMS_NORM, ROTARY, Accelerator
from meshwise.simulator.machine.casts import (
    CAST_BYTES,
    CAST_KERNELS,
    DELAYED_SCALING,
    ROW_BACKWARD_BYTES,
    ROW_SCALING,
)
from meshwise.simulator.machine.composition import list_kernel_bytes
from meshwise.simulator.machine.kernels import (
    AttentionShape,
    Matmul,
    attention_compute_time,
    compute_time,
    soft_roofline,
    streaming_time,
)
from meshwise.simulator.operator_graph import BATCH, GATES, ITEMSIZE, SEQUENCE, Block, Operator, OperatorKind, Tensor

PRODUCTS = frozenset(
    {OperatorKind.MATMUL, OperatorKind.BATCH_MATMUL, OperatorKind.GROUPED_MATMUL, OperatorKind.CONVOLUTION}
)
"""Kinds that are matrix products: their time follows the `MatmulModel`, and their backward is two products."""


UNALIGNED = 1.9
"""Slowdown of a product of 2-byte elements if rows of a matrix begin at odd elements: asynchronous copies move at least
4 bytes (NVIDIA, "PTX ISA", ``cp.async``). A GPT-2 of 124 million parameters, whose output layer has 27 % of its FLOP,
trains 25 % faster with 50304 tokens than with 50257 (Karpathy 2023 on nanoGPT, A100): 1 + 0.25 / 0.27."""


CLOCK_DELAY = 10e-3
"""Seconds in which a device's clock follows the power that it draws: on the A100 and B200 clocks sink after about 10 ms
of the same products (`meshwise.simulator.calibration.kernel_rows.BURST_SECONDS`)."""


class Pass(StrEnum):
    """Direction of a pass through an operator."""

    FORWARD = "forward"
    BACKWARD = "backward"


def is_bias(operator: Operator, parameter: Tensor) -> bool:
    """Return whether a parameter of a product is a bias, which is added after the sum."""
    return operator.kind in PRODUCTS and set(operator.reduced).isdisjoint(parameter.dims)


def backward_parameters(operator: Operator) -> tuple[str, ...]:
    """Return the names of the parameters that an operator's backward reads: weights and scales, no biases or tables."""
    scales = operator.kind is OperatorKind.ELEMENTWISE and bool(operator.saved)
    return operator.parameters[:1] if operator.kind in PRODUCTS or operator.kind is OperatorKind.NORM or scales else ()


def matmul_time(
    accelerator: Accelerator, dtype: str, product: Matmul, traffic: float | None = None, *, grouped: bool = False
) -> float:
    """Return seconds of a batch of matrix products, without launch.

    Parameters
    ----------
    traffic
        Bytes read and written; by default those of both operands and the result.
    grouped
        Whether the products are those of a group of experts, one product each.

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
    accelerator: Accelerator,
    dtype: str,
    shape: AttentionShape,
    direction: Pass,
    traffic: float = 0.0,
    kernel: str = "",
    *,
    slowdown: float = 1.0,
) -> float:
    """Return seconds of fused attention by ``kernel`` that moves ``traffic`` bytes, without launch.

    ``slowdown`` is the time of its arithmetic at the clock of the kernels before it over that in a loop of its own,
    which has a faster clock: for `CLOCK_DELAY` the clock stays as it was.
    """
    rate = accelerator.peak(dtype) * accelerator.matmul.fraction
    model, backward = accelerator.attention, direction is Pass.BACKWARD
    compute = attention_compute_time(model, rate, accelerator.matmul.units, shape, backward=backward)
    compute *= model.slowdown(kernel, backward=backward)
    compute += min(compute * (slowdown - 1.0), CLOCK_DELAY * (1.0 - 1.0 / slowdown))
    return model.launch + max(compute, traffic / accelerator.bandwidth(OperatorKind.ATTENTION))


def operator_time(
    accelerator: Accelerator,
    block: Block,
    operator: Operator,
    sizes: Mapping[str, int],
    direction: Pass,
    *,
    quantised: bool = False,
    casts_weight: bool = False,
    scaling: str = DELAYED_SCALING,
    gradient_bytes: int = 0,
) -> float:
    """Return the seconds that one operator takes on its local share of the work.

    Parameters
    ----------
    sizes
        Local size of every dim of the iteration space: cut dims divided, the batch multiplied.
    quantised
        Whether a product casts its input, and in backward the gradient of its output, to fp8 and multiplies in fp8
        (Micikevicius et al. 2022, "FP8 formats for deep learning").
    casts_weight
        Whether it casts its weight too, in both directions; otherwise fp8 copies of weights are kept.
    scaling
        How casts to fp8 find their scales, one of `meshwise.simulator.machine.casts.SCALINGS`.
    gradient_bytes
        Bytes of an element of the sum to which products add the gradients of weights, by reading and writing it; 0 if
        they write gradients to tensors of their own, in the dtype of the input.
    """
    if operator.kind is OperatorKind.VIEW:
        return 0.0
    if operator.measured is not None:
        return operator.measured.compute(sizes.get(BATCH, 1), backward=direction is Pass.BACKWARD)
    sizes = _with_imbalance(operator, sizes)
    if operator.kind in PRODUCTS:
        product = _Product(accelerator, block, operator, sizes, quantised)
        seconds = operator_launches(operator, direction, quantised=quantised) * accelerator.launch
        if quantised:
            seconds += product.cast_time(direction, scaling)
        if casts_weight:
            seconds += accelerator.launch + product.weight_cast_time(direction, scaling)
        return seconds + (
            product.forward_time() if direction is Pass.FORWARD else sum(product.gradient_times(gradient_bytes))
        )
    traffic = _traffic(block, operator, sizes, direction)
    if operator.kind is OperatorKind.ATTENTION:
        dtype, shape = block.tensor[operator.inputs[0]].dtype, _to_attention(block, operator, sizes)
        seconds = attention_time(
            accelerator, dtype, shape, direction, traffic, operator.kernel, slowdown=accelerator.sustained
        )
        return accelerator.launch + seconds
    bandwidth = accelerator.bandwidth(streaming_kind(operator), backward=direction is Pass.BACKWARD)
    return streaming_time(traffic, bandwidth, accelerator.launch)


def composed_time(
    accelerator: Accelerator, block: Block, operator: Operator, sizes: Mapping[str, int], direction: Pass
) -> float:
    """Return the seconds of an operator that runs the kernels of `COMPOSITIONS` on each of its results."""
    sizes, kind, is_backward = _with_imbalance(operator, sizes), streaming_kind(operator), direction is Pass.BACKWARD
    bandwidth = accelerator.bandwidth(OperatorKind.ELEMENTWISE)
    outputs = [block.tensor[name] for name in operator.outputs]
    return sum(
        streaming_time(local_size(tensor, sizes) * kernel_bytes, bandwidth, accelerator.launch)
        for tensor in outputs
        for kernel_bytes in list_kernel_bytes(kind, ITEMSIZE[tensor.dtype], backward=is_backward)
    )


def weight_gradient_time(
    accelerator: Accelerator,
    block: Block,
    operator: Operator,
    sizes: Mapping[str, int],
    *,
    quantised: bool = False,
    gradient_bytes: int = 0,
) -> float:
    """Return the seconds of an operator's backward that compute gradients of its parameters alone.

    That is one of the two products of a matrix product, and all of an embedding. It is 0 for operators that compute
    these gradients together with those of inputs. The cast to fp8 counts with the gradients of inputs, which need it
    first.
    """
    if not operator.parameters:
        return 0.0
    if operator.kind is OperatorKind.EMBEDDING:
        return operator_time(accelerator, block, operator, sizes, Pass.BACKWARD)
    if operator.kind not in PRODUCTS:
        return 0.0
    product = _Product(accelerator, block, operator, _with_imbalance(operator, sizes), quantised)
    _, weight_time = product.gradient_times(gradient_bytes)
    return accelerator.launch + weight_time


def operator_launches(operator: Operator, direction: Pass, *, quantised: bool = False) -> int:
    """Return the number of kernels that an operator launches.

    A product has two in backward, one for each gradient; a cast to fp8 is one more; a view launches none.
    """
    if operator.kind is OperatorKind.VIEW:
        return 0
    return (2 if operator.kind in PRODUCTS and direction is Pass.BACKWARD else 1) + quantised


def streaming_kind(operator: Operator) -> str:
    """Return the kind whose fraction of the memory bandwidth a memory-bound operator reaches.

    An elementwise operator whose backward reads tensors that forward saved is nonlinear: an activation. Sums and copies
    save nothing; of those, only rotary positions map several tensors to as many. An RMS norm takes one statistic, other
    norms take more.
    """
    if operator.kind is OperatorKind.NORM and sum(number for _, number in operator.statistics) == 1:
        return RMS_NORM
    if operator.kind is not OperatorKind.ELEMENTWISE:
        return operator.kind
    if operator.saved:
        return GATED_ACTIVATION if GATES in dict(operator.dims) else ACTIVATION
    return ROTARY if len(operator.inputs) >= len(operator.outputs) > 1 else operator.kind


def optimizer_time(accelerator: Accelerator, traffic: float, num_tensors: int = 0) -> float:
    """Return seconds of the optimizer's update of ``num_tensors``, which reads and writes ``traffic`` bytes."""
    launches = accelerator.launch + num_tensors * accelerator.optimizer_launch
    return launches + traffic / accelerator.bandwidth("optimizer")


def local_size(tensor: Tensor, sizes: Mapping[str, int]) -> int:
    """Return the number of elements of the local share of ``tensor``."""
    return prod(sizes.get(dim, size) for dim, size in zip(tensor.dims, tensor.shape, strict=True))


def local_bytes(tensor: Tensor, sizes: Mapping[str, int]) -> int:
    """Return the bytes of the local share of ``tensor``."""
    return local_size(tensor, sizes) * ITEMSIZE[tensor.dtype]


def _traffic(block: Block, operator: Operator, sizes: Mapping[str, int], direction: Pass) -> float:
    """Return the bytes that an operator reads and writes, each tensor once."""
    size = {
        name: local_bytes(block.tensor[name], sizes) for name in operator.inputs + operator.outputs + operator.saved
    }
    written_bytes = sum(size[name] for name in operator.outputs)
    if operator.kind is OperatorKind.EMBEDDING:
        return float(_gathered_bytes(block, operator, sizes) + written_bytes)
    read_bytes = sum(size[name] for name in operator.inputs)
    saved_names = [name for name in operator.saved if name not in operator.inputs + operator.outputs]
    mask_bytes = sum(size[name] for name in saved_names)
    if direction is Pass.FORWARD:
        return read_bytes + written_bytes + mask_bytes
    return sum(size[name] for name in operator.saved) + written_bytes + read_bytes


def _gathered_bytes(block: Block, operator: Operator, sizes: Mapping[str, int]) -> int:
    """Return the bytes of the rows of an embedding table that are gathered or, in backward, scattered."""
    table = block.tensor[operator.parameters[0]]
    rows = table.dims[0]
    return prod(sizes[dim] for dim, _ in operator.dims if dim != rows) * ITEMSIZE[table.dtype]


def _with_imbalance(operator: Operator, sizes: Mapping[str, int]) -> Mapping[str, int]:
    """Return the sizes on the rank whose experts have the most tokens."""
    return sizes if operator.imbalance == 1 else {**sizes, "capacity": _largest_capacity(operator, sizes)}


def _largest_capacity(operator: Operator, sizes: Mapping[str, int]) -> int:
    """Return the tokens of an expert on the most loaded rank: it has the most loaded expert, the others share the rest.

    >>> experts = Operator("up", OperatorKind.GROUPED_MATMUL, (("experts", 8),), (), (), imbalance=2.0)
    >>> [_largest_capacity(experts, {"experts": local, "capacity": 100}) for local in (1, 2, 8)]
    [200, 143, 100]
    """
    num_experts, num_local = dict(operator.dims)["experts"], sizes["experts"]
    other_load = (num_experts - operator.imbalance) / max(num_experts - 1, 1)
    load = (operator.imbalance + (num_local - 1) * other_load) / num_local
    # Rounded first: a float just above a whole number of tokens is that number.
    return ceil(round(sizes["capacity"] * load, 6))


class _Operands(NamedTuple):
    """A figure for each operand of a product: its input, its weight and its result."""

    image: int
    weight: int
    result: int


class _Product:
    """The matrix products of an operator on its local share of the work.

    Attributes
    ----------
    elements
        Elements of the operands; a convolution, as an implicit GEMM, reads the image, not patches.
    traffic
        Bytes moved by the product that computes each operand, or its gradient, from the two others. In fp8 the two
        others are read in fp8, and the result is as wide as the input was before the cast.
    """

    def __init__(
        self, accelerator: Accelerator, block: Block, operator: Operator, sizes: Mapping[str, int], quantised: bool
    ) -> None:
        self.accelerator, self.kind = accelerator, operator.kind
        self.matmul = product = _to_product(block, operator, sizes)
        input_dtype = block.tensor[operator.inputs[0]].dtype
        self.dtype, self.itemsize = "fp8" if quantised else input_dtype, ITEMSIZE[input_dtype]
        if operator.kind is OperatorKind.CONVOLUTION:
            names = operator.inputs, operator.parameters[:1], operator.outputs
            counts = [sum(local_size(block.tensor[name], sizes) for name in group) for group in names]
        else:
            sides = (product.m * product.k, product.k * product.n, product.m * product.n)
            counts = [product.count * side for side in sides]
        self.elements, read_itemsize = _Operands(*counts), ITEMSIZE[self.dtype]
        self.traffic = _Operands(
            *(sum(counts) * read_itemsize + count * (self.itemsize - read_itemsize) for count in counts)
        )

    def forward_time(self) -> float:
        """Return the seconds of the product of forward."""
        return self._time(self.matmul, self.traffic.result) * self._misalignment()

    def gradient_times(self, gradient_bytes: int) -> tuple[float, float]:
        """Return the seconds of the two products of backward: the gradients of the inputs, and those of the weights."""
        product, model, weight_bytes = self.matmul, self.accelerator.matmul, self.traffic.weight
        if gradient_bytes:
            # The sum is read and written, where else a gradient of the input's width would be written.
            weight_bytes += self.elements.weight * (2 * gradient_bytes - self.itemsize)
        # The gradient of the input is a sum over n, that of the weight a sum over m.
        input_time = self._time(Matmul(product.count, product.m, product.k, product.n), self.traffic.image)
        weight_time = self._time(Matmul(product.count, product.k, product.n, product.m), weight_bytes)
        slowdown = self._misalignment()
        return slowdown * input_time / model.data_gradient, slowdown * weight_time / model.weight_gradient

    def cast_time(self, direction: Pass, scaling: str) -> float:
        """Return the seconds that a product in fp8 takes to cast its input or, in backward, the gradient of its output.

        With a scale a row the input is cast a second time in backward, along its other dim. The first launch of the
        first cast is not counted here. A weight of which copies are kept is cast once a step, with the optimizer.
        """
        if direction is Pass.FORWARD:
            return self._time_cast(self.elements.image, direction, scaling)
        seconds = self._time_cast(self.elements.result, direction, scaling)
        if scaling == ROW_SCALING:
            seconds += self.accelerator.launch + self._time_cast(self.elements.image, direction, scaling)
        return seconds

    def weight_cast_time(self, direction: Pass, scaling: str) -> float:
        """Return the seconds that a product in fp8 takes to cast its weight where no copy is kept."""
        return self._time_cast(self.elements.weight, direction, scaling)

    def _time_cast(self, elements: int, direction: Pass, scaling: str) -> float:
        """Return the seconds of a cast from 16 bits, in `CAST_KERNELS` kernels that move `CAST_BYTES` an element."""
        is_strided = scaling == ROW_SCALING and direction is Pass.BACKWARD
        num_bytes = ROW_BACKWARD_BYTES if is_strided else CAST_BYTES[scaling]
        launches = (CAST_KERNELS[scaling] - 1) * self.accelerator.launch
        return launches + elements * num_bytes / self.accelerator.bandwidth(OperatorKind.ELEMENTWISE)

    def _time(self, product: Matmul, traffic: float) -> float:
        is_grouped = self.kind is OperatorKind.GROUPED_MATMUL
        return matmul_time(self.accelerator, self.dtype, product, traffic, grouped=is_grouped)

    def _misalignment(self) -> float:
        """Return the slowdown of matrices that have rows of an odd number of elements, ``k`` or ``n``."""
        is_odd = self.matmul.n % 2 or self.matmul.k % 2
        return UNALIGNED if is_odd and ITEMSIZE[self.dtype] == 2 and self.kind is not OperatorKind.CONVOLUTION else 1.0


def _to_product(block: Block, operator: Operator, sizes: Mapping[str, int]) -> Matmul:
    """Return an operator as a batch of matrix products.

    Dims that are reduced make up ``k``, dims of both operands ``count``, of the second one alone ``n``, and all others
    ``m``. Where each row is of one of several experts, whose dim is reduced, all experts have equally many rows.
    """
    left_dims = set(block.tensor[operator.inputs[0]].dims)
    right_dims = set(block.tensor[(operator.parameters or operator.inputs[1:])[0]].dims)
    count = m = n = k = num_experts = 1
    for dim, size in operator.dims:
        if dim in operator.reduced and operator.kind is OperatorKind.GROUPED_MATMUL and dim not in left_dims:
            count, num_experts = count * sizes[dim], num_experts * size
        elif dim in operator.reduced:
            k *= sizes[dim]
        elif dim in left_dims & right_dims:
            count *= sizes[dim]
        elif dim in right_dims:
            n *= sizes[dim]
        else:
            m *= sizes[dim]
    return Matmul(count, -(-m // num_experts), n, k)


def _to_attention(block: Block, operator: Operator, sizes: Mapping[str, int]) -> AttentionShape:
    """Return the shape of fused attention, whose query has dims ``batch sequence heads group head_dim``.

    If the query has no ``sequence``, its tokens are along the dims that the keys do not have.
    """
    query, keys, context = (block.tensor[name] for name in (*operator.inputs[:2], operator.outputs[0]))
    token_dims = [dim for dim in query.dims[:-1] if dim not in keys.dims]
    token_dims = [SEQUENCE] if SEQUENCE in query.dims[:-1] else token_dims
    heads = prod(sizes[dim] for dim in query.dims[:-1] if dim not in token_dims)
    num_keys = prod(sizes[dim] for dim in keys.dims[:-1] if dim not in query.dims)
    widths = query.shape[-1], context.shape[-1]
    width = sum(widths) / 2
    flops = operator.flops_per_point * operator.executed_fraction * prod(sizes[dim] for dim, _ in operator.dims)
    num_queries = prod(sizes[dim] for dim in token_dims)
    mean_keys = flops / (4.0 * heads * num_queries * width)
    return AttentionShape(heads, num_queries, num_keys, width, mean_keys, float(max(widths)))
