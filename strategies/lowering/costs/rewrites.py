"""Rewrites of a block's segments: overlap of tensor collectives, split backward, sums of gradients, shared tables.

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
from meshwise.simulator.operator_graph import ITEMSIZE, Operator, OperatorKind
from meshwise.simulator.program import TaskKind
from meshwise.strategies.lowering.costs.layout import BlockLayout, defers
from meshwise.strategies.lowering.costs.segments import (
    WHOLE,
    BlockSegments,
    Kernels,
    Portion,
    Segment,
    Share,
    Streaming,
    build_table_backward,
    build_table_forward,
)
from meshwise.strategies.plan.mesh import TENSOR
from meshwise.strategies.tables.embeddings import Embeddings
from meshwise.strategies.tables.loads import TableWork
from meshwise.strategies.tables.table import Table

_HIDDEN_COLLECTIVES = (Collective.REDUCE_SCATTER, Collective.ALL_REDUCE)
"""Collectives that sum the gradient of an input, and overlap the product for the gradient of the weight."""


def with_overlap(layout: BlockLayout, segments: BlockSegments, *, in_chunks: bool) -> BlockSegments:
    """Return the segments of a block whose tensor collectives overlap its cut products.

    Parameters
    ----------
    in_chunks
        Whether all collectives and products run chunk by chunk; else only sums and scatters of the gradients of inputs
        overlap the products for gradients of weights.
    """
    forward, backward = (
        _overlap_products(layout, pass_segments, in_chunks) for pass_segments in (segments.forward, segments.backward)
    )
    return BlockSegments(forward, backward, segments.num_loss_segments)


def _overlap_products(layout: BlockLayout, segments: Sequence[Segment], in_chunks: bool) -> tuple[Segment, ...]:
    """Return segments in which every collective next to its cut product overlaps a part of it where it can."""
    products = {operator.name: operator for operator in layout.block.operators if is_cut_product(layout, operator)}
    chunk = Portion(Share.CHUNK, layout.mesh.size(TENSOR))
    result: list[Segment] = []
    pending = list(reversed(segments))
    while pending:
        segment = pending.pop()
        operator = products.get(segment.label)
        is_backward = segment.kind is TaskKind.BACKWARD
        if operator is None or segment.portion != WHOLE or not (in_chunks or is_backward):
            result.append(segment)
            continue
        tensor_sides = operator.inputs, operator.outputs
        read_tensors, written_tensors = tensor_sides[::-1] if is_backward else tensor_sides
        if in_chunks and result and _moves_tensor(result[-1], (Collective.ALL_GATHER,), read_tensors):
            gather = result.pop()._replace(overlaps_next=True)
            result += [gather, *_cut_product(segment, chunk.rest)]
        elif pending and (
            is_gradient_sum(pending[-1], written_tensors)
            if is_backward
            else _moves_tensor(pending[-1], _HIDDEN_COLLECTIVES[:1], written_tensors)
        ):
            scatter = pending.pop()._replace(overlaps_next=True)
            head, tail = _cut_product(segment, Portion(Share.WEIGHTS).rest if is_backward else chunk)
            result += [head, scatter, tail]
        else:
            result.append(segment)
    return tuple(result)


def is_cut_product(layout: BlockLayout, operator: Operator) -> bool:
    """Return whether an operator is a product with a weight that tensor ranks cut."""
    if operator.kind is not OperatorKind.MATMUL or not operator.parameters:
        return False
    return any(TENSOR in axes for _, axes in layout.kept_layout(operator, operator.parameters[0]).cuts)


def is_gradient_sum(segment: Segment, tensors: Collection[str]) -> bool:
    """Return whether a segment sums the gradient of one of ``tensors`` along the tensor axis."""
    return _moves_tensor(segment, _HIDDEN_COLLECTIVES, tensors)


def _moves_tensor(segment: Segment, collectives: Collection[Collective], tensors: Collection[str]) -> bool:
    """Return whether a segment is one of ``collectives`` along the tensor axis on one of ``tensors``."""
    return segment.collective in collectives and segment.axis == TENSOR and segment.tensor in tensors


def _cut_product(product: Segment, portion: Portion) -> tuple[Segment, Segment]:
    """Return a product as two segments, the first a portion of it; both are launched at once."""
    return product._replace(portion=portion), product._replace(portion=portion.rest, num_launches=0)


class SplitBackward(NamedTuple):
    """A backward in two: the segments for the gradients of inputs, and those for the gradients of weights."""

    inputs: tuple[Segment, ...]
    weights: tuple[Segment, ...]


def split_backward(layout: BlockLayout, backward: Iterable[Segment]) -> SplitBackward:
    """Return the segments of a backward in two; together they take the same ticks.

    Recomputation belongs to the gradients of inputs, and so do collectives that are not deferred.
    """
    operators = {operator.name for operator in layout.block.operators if defers(operator)}
    weights_portion = Portion(Share.WEIGHTS)
    inputs: list[Segment] = []
    weights: list[Segment] = []
    for segment in backward:
        if segment.kind is TaskKind.BACKWARD and segment.label in operators:
            weights.append(Segment(TaskKind.WEIGHT_GRADIENT, segment.label, segment.work, portion=weights_portion))
            # An embedding makes no gradients of inputs.
            inputs.append(segment._replace(portion=weights_portion.rest, is_optional=True))
        else:
            (weights if segment.deferred else inputs).append(segment)
    return SplitBackward(tuple(inputs), tuple(weights))


def undeferred_elements(layout: BlockLayout) -> int:
    """Return the elements of a rank's parameters whose gradients are made with those of inputs: those of norms."""
    block = layout.block
    deferred_names = {name for operator in block.operators if defers(operator) for name in operator.parameters}
    return sum(layout.parameter_share(tensor) for tensor in block.parameters if tensor.name not in deferred_names)


def with_accumulation(layout: BlockLayout, segments: BlockSegments, gradient_bytes: int) -> BlockSegments:
    """Return the segments of a block whose gradients are added to a buffer of ``gradient_bytes`` an element.

    The sums of an operator's gradients follow the last segment of its backward.
    """
    block = layout.block
    operators = {operator.name: operator for operator in block.operators if operator.parameters}
    last_segments = {
        segment.label: index for index, segment in enumerate(segments.backward) if segment.kind is TaskKind.BACKWARD
    }
    backward: list[Segment] = []
    for index, segment in enumerate(segments.backward):
        backward.append(segment)
        operator = operators.get(segment.label)
        if operator is None or last_segments.get(segment.label) != index:
            continue
        parameters = [block.tensor[name] for name in operator.parameters]
        traffic = sum(
            layout.parameter_share(parameter) * (ITEMSIZE[parameter.dtype] + 2 * gradient_bytes)
            for parameter in parameters
        )
        addition = Streaming(traffic, OperatorKind.ELEMENTWISE, len(parameters))
        label = f"gradients of {operator.name} added"
        backward.append(Segment(TaskKind.BACKWARD, label, addition, 0, deferred=defers(operator)))
    return segments._replace(backward=tuple(backward))


def with_tables(
    segments: BlockSegments, tables: Collection[Table], work: TableWork, embeddings: Embeddings
) -> BlockSegments:
    """Return the segments of a block with one look-up for all ``tables`` that data ranks share, not one for each."""
    operators = {table.operator for table in tables}
    lookups, gradients = (
        build(work, pipelined=embeddings.pipelined) for build in (build_table_forward, build_table_backward)
    )
    return segments._replace(
        forward=_replace_kernels(segments.forward, operators, lookups),
        backward=_replace_kernels(segments.backward, operators, gradients),
    )


def _replace_kernels(
    segments: Sequence[Segment], operators: Collection[str], replacement: Sequence[Segment]
) -> tuple[Segment, ...]:
    """Return segments with others in place of the first kernels of some operators, and nothing in place of the rest."""
    places = [place for place, segment in enumerate(segments) if _runs(segment, operators)]
    kept = [segment for place, segment in enumerate(segments) if place not in places]
    first_place = places[0]
    return (*kept[:first_place], *replacement, *kept[first_place:])


def _runs(segment: Segment, operators: Collection[str]) -> bool:
    return isinstance(segment.work, Kernels) and segment.work.operator.name in operators
