"""Time of an operator on an accelerator: a roofline with measured efficiency.

A matrix multiplication takes ``2 m n k`` FLOP at the rate `MatmulModel` says, and never
less than its memory traffic; every other operator is bound by memory traffic. A
convolution is the product that an implicit GEMM computes: output points times channels
out, reduced over channels in and the kernel (Chetlur et al. 2014, "cuDNN", section 3).
Experts are a batch of products, one an expert.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, prod
from typing import NamedTuple

from simulator.accelerator import Accelerator
from simulator.operator_graph import ITEMSIZE, Block, Operator, OperatorKind, Tensor

PRODUCTS = frozenset(
    {OperatorKind.MATMUL, OperatorKind.BATCH_MATMUL, OperatorKind.GROUPED_MATMUL, OperatorKind.CONVOLUTION}
)
"""Kinds that are matrix products: their time follows `MatmulModel`, and backward does two."""


class Pass(StrEnum):
    """Which half of a training step an operator runs in."""

    FORWARD = "forward"
    BACKWARD = "backward"


FLASH_BACKWARD = 2.5
"""Backward of flash attention does 5 matrix multiplications for forward's 2 (Dao et al. 2022)."""

FLASH_EFFICIENCY = 0.75
"""Flash attention reaches this part of the matmul rate (A100, FlashAttention-2: 0.61 of peak at long sequences)."""


@dataclass(frozen=True, slots=True)
class Matmul:
    """A batch of ``count`` products of an [m, k] and a [k, n] matrix."""

    count: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        """FLOP of the batch."""
        return 2.0 * self.count * self.m * self.n * self.k


def matmul_time(accelerator: Accelerator, dtype: str, product: Matmul, traffic: int | None = None) -> float:
    """Return seconds of a batch of matrix products, without launch.

    Parameters
    ----------
    traffic
        Bytes read and written; by default both operands and the result once.

    >>> from simulator.accelerator import Accelerator
    >>> ideal = Accelerator("ideal", (("fp32", 1e12),), memory=1e9, memory_bandwidth=1e15)
    >>> matmul_time(ideal, "fp32", Matmul(count=1, m=1000, n=1000, k=1000))
    0.002
    """
    model, area, reduced = accelerator.matmul, product.count * product.m * product.n, float(product.k)
    if model.units:
        tiles = product.count * ceil(product.m / model.tile[0]) * ceil(product.n / model.tile[1])
        area = ceil(tiles / model.units) * model.units * model.tile[0] * model.tile[1]
        reduced /= max(model.units // tiles, 1)
    rate = accelerator.peak(dtype) * model.fraction * reduced / (reduced + model.half_k)
    if traffic is None:
        elements = product.count * (product.m * product.k + product.k * product.n + product.m * product.n)
        traffic = elements * ITEMSIZE[dtype]
    memory = traffic / accelerator.bandwidth(OperatorKind.MATMUL)
    return max(2.0 * area * reduced / rate, memory)


def operator_time(
    accelerator: Accelerator,
    block: Block,
    operator: Operator,
    sizes: Mapping[str, int],
    direction: Pass,
    *,
    quantised: bool = False,
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
    """
    sizes = _loaded(operator, sizes)
    if operator.kind in PRODUCTS:
        return _matmul_operator_time(accelerator, block, operator, sizes, direction, quantised)
    if operator.kind is OperatorKind.ATTENTION:
        return _attention_time(accelerator, block, operator, sizes, direction)
    traffic = _traffic(block, operator, sizes, direction)
    return accelerator.launch + traffic / accelerator.bandwidth(operator.kind)


def weight_gradient_time(
    accelerator: Accelerator, block: Block, operator: Operator, sizes: Mapping[str, int], *, quantised: bool = False
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
    _, right = _gradient_times(accelerator, block, operator, _loaded(operator, sizes), quantised)
    return accelerator.launch + right


def operator_launches(operator: Operator, direction: Pass, *, quantised: bool = False) -> int:
    """Return how many kernels an operator launches: a product has two gradients, a cast comes before fp8."""
    return (2 if operator.kind in PRODUCTS and direction is Pass.BACKWARD else 1) + quantised


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
) -> float:
    seconds = operator_launches(operator, direction, quantised=quantised) * accelerator.launch
    if quantised:
        seconds += _cast_time(accelerator, block, operator, sizes, direction)
    if direction is Pass.BACKWARD:
        return seconds + sum(_gradient_times(accelerator, block, operator, sizes, quantised))
    dtype, traffic = _multiplied(block, operator, quantised), _moved(block, operator, sizes, quantised)
    return seconds + matmul_time(accelerator, dtype, _product(block, operator, sizes), traffic.result)


def _gradient_times(
    accelerator: Accelerator, block: Block, operator: Operator, sizes: Mapping[str, int], quantised: bool
) -> tuple[float, float]:
    """Return the seconds of the two products of a backward: the gradients of the inputs, and of the weights."""
    product, traffic = _product(block, operator, sizes), _moved(block, operator, sizes, quantised)
    dtype, slower = _multiplied(block, operator, quantised), accelerator.matmul.gradient
    left = Matmul(product.count, product.m, product.k, product.n)
    right = Matmul(product.count, product.k, product.n, product.m)
    first = matmul_time(accelerator, dtype, left, traffic.image)
    second = matmul_time(accelerator, dtype, right, traffic.weight)
    return first / slower, second / slower


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
    flops = operator.flops_per_point * operator.executed_fraction * prod(sizes[dim] for dim, _ in operator.dims)
    work = flops * (1.0 if direction is Pass.FORWARD else FLASH_BACKWARD)
    rate = accelerator.peak(block.tensor[operator.inputs[0]].dtype) * accelerator.matmul.fraction * FLASH_EFFICIENCY
    traffic = _traffic(block, operator, sizes, direction)
    return accelerator.launch + max(work / rate, traffic / accelerator.bandwidth(operator.kind))
