"""Rewrites of a block's segments: overlap of tensor collectives, split backward, and accumulation of gradients.

**Overlap.** A gather of a sequence and the product behind it, or a product and the scatter behind it, are cut into
as many chunks as there are ranks, and one chunk moves while another is multiplied [1]_ [2]_ [3]_. A rank has its own
chunk of a gather from the start, and keeps its own chunk of a scatter, so that with n ranks, c ticks of the
collective and p ticks of the product

    gather:  max(c, p - p/n) + p/n = max(p, c + p/n)
    scatter: p/n + max(c, p - p/n) = max(p, c + p/n)

The first is what a ring takes: chunk k has arrived after k c / (n - 1), and n - k chunks are multiplied from then
on; the latest of these is k = 0 or n - 1. The second is the same, read backwards.

In backward, the gather of the gradient of a row-parallel product's output so overlaps the product for the gradient of
its input; the product for the gradient of its weight follows. In a column-parallel product two whole products hide
two whole collectives: the product for the gradient of the input hides the gather of the input, where only shards of
it were kept [4]_, and the product for the gradient of the weight hides the scatter of the gradient of the input.

The latter needs no chunks, and Megatron-LM always does it for all column-parallel products; without sequence
parallelism it so hides the sum of that gradient [5]_. The backward of such a product then takes

    max(gather, gradient of the input) + max(scatter or sum, gradient of the weight)

All chunks together take the ticks of the whole product and its one launch, though small products use a device less
well and the processors that move chunks multiply nothing. Memory is as without overlap: the buffers of Transformer
Engine, one of a whole microbatch's activation for each of its ten collectives, are not counted.

**Split backward.** The gradients of inputs, for which another stage waits, are computed apart from the gradients of
weights [6]_.

**Accumulation.** Kernels of their own add gradients of weights to those of a step's other microbatches, where the
products that make them do not. They read the gradient that backward makes of a parameter, and read and write the sum:
for fp16 gradients in an fp16 sum 6 bytes a parameter and microbatch. The first gradient costs the same, because
Megatron-LM adds it to zeros. The host launches nothing for it, because it is a hook of autograd's threads [7]_ [8]_.

References
----------
.. [1] Wang et al. 2023, "Overlap communication with dependent computation via decomposition in large deep learning
   models", ASPLOS (gathers and scatters in chunks).
.. [2] Chang et al. 2024, "FLUX: fast software-based communication overlap on GPUs through kernel fusion".
.. [3] NVIDIA/TransformerEngine, ``initialize_ub`` of ``pytorch/module/base.py``: ``ring_exchange`` or ``pipeline``
   for forward and for gradients of what ``proj`` and ``fc2`` read, ``bulk`` for the gradients of ``qkv`` and ``fc1``.
   Its linear layers alone do so: not the output layer (Megatron-LM's own, ``tensor_parallel/layers.py``), and not the
   products of experts.
.. [4] Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", section 4.2.2 (the
   gather again).
.. [5] Megatron-LM, ``LinearWithGradAccumulationAndAsyncCommunication`` of ``core/tensor_parallel/layers.py``, since
   2022: what is hidden without chunks, of the output layer too. In April 2021 ``mpu/layers.py`` waited for every sum.
.. [6] Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, section 1 and figure 1.
.. [7] PyTorch, ``torch/csrc/autograd/functions/accumulate_grad.h``.
.. [8] Megatron-LM, ``_make_param_hook`` of ``model/distributed.py`` (``main_grad.add_``); since 2022 its products add
   their gradients themselves (``--no-gradient-accumulation-fusion`` turns that off).
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from meshwise.simulator.collective import Collective
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.kernels import streaming_time
from meshwise.simulator.operator_graph import ITEMSIZE, Operator, OperatorKind
from meshwise.simulator.program import TaskKind
from meshwise.simulator.units import to_ticks
from meshwise.strategies.lowering.costs.operator import BlockLayout, BlockSteps, defers
from meshwise.strategies.lowering.costs.steps import Step
from meshwise.strategies.plan.mesh import TENSOR

_HIDDEN = (Collective.REDUCE_SCATTER, Collective.ALL_REDUCE)
"""Collectives that sum the gradient of an input, and overlap the product for the gradient of the weight."""


def with_overlap(layout: BlockLayout, accelerator: Accelerator, steps: BlockSteps, *, chunks: bool) -> BlockSteps:
    """Return the segments of a block whose tensor collectives overlap its cut products.

    Parameters
    ----------
    in_chunks
        Whether all collectives and products run chunk by chunk; else only sums and scatters of the gradients of inputs
        overlap the products for gradients of weights.
    """
    forward, backward = (_overlapped(layout, accelerator, each, chunks) for each in (steps.forward, steps.backward))
    return BlockSteps(forward, backward, steps.loss)


def _overlapped(layout: BlockLayout, accelerator: Accelerator, steps: Sequence[Step], chunks: bool) -> tuple[Step, ...]:
    """Return segments in which every collective next to its cut product overlaps a part of it where it can."""
    products = {operator.name: operator for operator in layout.block.operators if is_cut_product(layout, operator)}
    ranks = layout.mesh.size(TENSOR)
    result: list[Step] = []
    waiting = list(reversed(steps))
    while waiting:
        step = waiting.pop()
        operator = products.get(step.operators)
        backward = step.kind is TaskKind.BACKWARD
        if operator is None or not (chunks or backward):
            result.append(step)
            continue
        ends = operator.inputs, operator.outputs
        read, made = ends[::-1] if backward else ends
        weights = weight_gradient_ticks(layout, accelerator, operator, step) if backward else 0
        if chunks and result and _moves(result[-1], (Collective.ALL_GATHER,), read):
            gather = result.pop()
            result += _gathered(gather, step, (step.ticks - weights) // ranks + weights)
        elif waiting and (sums(waiting[-1], made) if backward else _moves(waiting[-1], _HIDDEN[:1], made)):
            rest = weights if backward else step.ticks - step.ticks // ranks
            result += _scattered(step, waiting.pop(), rest)
        else:
            result.append(step)
    return tuple(result)


def is_cut_product(layout: BlockLayout, operator: Operator) -> bool:
    """Return whether an operator is a product with a weight that tensor ranks cut."""
    if operator.kind is not OperatorKind.MATMUL or not operator.parameters:
        return False
    return any(TENSOR in axes for _, axes in layout.kept(operator, operator.parameters[0]).cuts)


def weight_gradient_ticks(layout: BlockLayout, accelerator: Accelerator, operator: Operator, step: Step) -> int:
    """Return the ticks that a product's backward spends on the gradient of its weight."""
    return min(to_ticks(layout.weight_gradient_time(accelerator, operator)), step.ticks)


def sums(step: Step, tensors: Collection[str]) -> bool:
    """Return whether a segment sums the gradient of one of ``tensors`` along the tensor axis."""
    return _moves(step, _HIDDEN, tensors)


def _moves(step: Step, collectives: Collection[Collective], tensors: Collection[str]) -> bool:
    """Return whether a segment is one of ``collectives`` along the tensor axis on one of ``tensors``."""
    return step.collective in collectives and step.axis == TENSOR and step.tensor in tensors


def _gathered(gather: Step, product: Step, last: int) -> list[Step]:
    """Return a gather that overlaps a product except for the product's last ticks."""
    first, second = _cut(product, product.ticks - last)
    return [gather._replace(beside=True), first, second]


def _scattered(product: Step, scatter: Step, rest: int) -> list[Step]:
    """Return a scatter that overlaps the last ticks of a product."""
    first, second = _cut(product, product.ticks - rest)
    return [first, scatter._replace(beside=True), second]


def _cut(product: Step, ticks: int) -> tuple[Step, Step]:
    """Return a product as two segments, the first of so many ticks; both are launched at once."""
    return product._replace(ticks=ticks), product._replace(ticks=product.ticks - ticks, launches=0)


class Split(NamedTuple):
    """A backward in two: the segments for the gradients of inputs, and those for the gradients of weights."""

    inputs: tuple[Step, ...]
    weights: tuple[Step, ...]


def split(layout: BlockLayout, accelerator: Accelerator, backward: Iterable[Step]) -> Split:
    """Return the segments of a backward in two; together they take the same ticks.

    Recomputation belongs to the gradients of inputs, and so do collectives that are not deferred. A part in which a
    block has nothing to do is one segment of no ticks.
    """
    operators = {operator.name: operator for operator in layout.block.operators if defers(operator)}
    inputs: list[Step] = []
    weights: list[Step] = []
    for step in backward:
        operator = operators.get(step.operators) if step.kind is TaskKind.BACKWARD else None
        if operator is None:
            (weights if step.deferred else inputs).append(step)
            continue
        ticks = min(to_ticks(layout.weight_gradient_time(accelerator, operator)), step.ticks)
        weights.append(Step(TaskKind.WEIGHT_GRADIENT, ticks, step.operators))
        if step.ticks > ticks:
            inputs.append(step._replace(ticks=step.ticks - ticks))
    nothing = Step(TaskKind.BACKWARD, 0, "nothing", 0)
    return Split(tuple(inputs) or (nothing,), tuple(weights) or (nothing._replace(kind=TaskKind.WEIGHT_GRADIENT),))


def undeferred_elements(layout: BlockLayout) -> int:
    """Return the elements of a rank's parameters whose gradients are made with those of inputs: those of norms."""
    block = layout.block
    later = {name for operator in block.operators if defers(operator) for name in operator.parameters}
    return sum(layout.parameter_share(tensor) for tensor in block.parameters if tensor.name not in later)


def with_accumulation(
    layout: BlockLayout, accelerator: Accelerator, steps: BlockSteps, gradient_bytes: int
) -> BlockSteps:
    """Return the segments of a block whose gradients are added to a buffer of ``gradient_bytes`` an element.

    The sums of an operator's gradients follow the last segment of its backward.
    """
    block = layout.block
    operators = {operator.name: operator for operator in block.operators if operator.parameters}
    last = {step.operators: at for at, step in enumerate(steps.backward) if step.kind is TaskKind.BACKWARD}
    backward: list[Step] = []
    for at, step in enumerate(steps.backward):
        backward.append(step)
        operator = operators.get(step.operators)
        if operator is None or last.get(step.operators) != at:
            continue
        parameters = [block.tensor[name] for name in operator.parameters]
        traffic = sum(layout.parameter_share(each) * (ITEMSIZE[each.dtype] + 2 * gradient_bytes) for each in parameters)
        launch = len(parameters) * accelerator.launch
        seconds = streaming_time(traffic, accelerator.bandwidth(OperatorKind.ELEMENTWISE), launch)
        what = f"gradients of {operator.name} added"
        backward.append(Step(TaskKind.BACKWARD, to_ticks(seconds), what, 0, deferred=defers(operator)))
    return steps._replace(backward=tuple(backward))
