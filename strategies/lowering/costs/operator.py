"""Operator parallelism: the operators of a block on one rank, and the collectives between them.

Each operator runs on its local share. Where its reader asks for another layout of a tensor, the collectives of a
redistribution come in between, and their mirror image in backward, where the gradient returns to the layout of its
tensor. An operator also has collectives of its own: gathers and scatters of parameters that are kept cut, and sums of
statistics.
"""

from collections.abc import Iterator
from itertools import chain
from math import prod
from typing import NamedTuple

from meshwise.simulator.collective import Collective
from meshwise.simulator.machine.compute import Pass, backward_parameters, streaming_kind
from meshwise.simulator.operator_graph import ITEMSIZE, SEQUENCE, Operator, OperatorKind
from meshwise.simulator.program import TaskKind
from meshwise.strategies.lowering.costs.layout import BlockLayout, defers
from meshwise.strategies.lowering.costs.segments import (
    BlockSegments,
    Kernels,
    Ring,
    Segment,
    Streaming,
    build_communication,
    build_ring_backward,
    build_ring_forward,
)
from meshwise.strategies.plan.mesh import CONTEXT, EXPERT, OPERATOR_AXES, TENSOR
from meshwise.strategies.plan.parallelism import EXPERTS
from meshwise.strategies.plan.sharding import (
    OperatorSharding,
    Redistribution,
    ShardingSpec,
    apply_move,
    redistribute,
)


def list_transfers(
    layout: BlockLayout, name: str, source: ShardingSpec, target: ShardingSpec
) -> Iterator[tuple[Redistribution, float]]:
    """Yield the collectives that move a tensor from one layout to another, each with its bytes.

    The bytes are those of the tensor that a group has together; of an all-to-all those that each rank has before it.
    """
    current_spec = source
    for move in redistribute(source, target):
        is_exchange, spec_before = move.collective is Collective.ALL_TO_ALL, move.apply_free_cuts(current_spec)
        yield (
            move,
            float(
                layout.tensor_bytes(
                    name, spec_before.without_partial if is_exchange else spec_before.without_axis(move.axis)
                )
            ),
        )
        current_spec = apply_move(current_spec, move)


def build_collectives(
    layout: BlockLayout, name: str, source: ShardingSpec, target: ShardingSpec, prefix: str = ""
) -> list[Segment]:
    """Return the collectives that move a tensor from one layout to another; labels begin with ``prefix``."""
    return [
        build_communication(move.axis, move.collective, size, f"{prefix}{name}")._replace(tensor=name)
        for move, size in list_transfers(layout, name, source, target)
        if layout.mesh.size(move.axis) > 1
    ]


def find_exchange_axes(layout: BlockLayout) -> frozenset[str]:
    """Return the axes along which redistributions between the operators of a block run all-to-alls."""
    pairs = {
        (layout.produced_layouts[name], layout.input_layout(operator, name))
        for operator in layout.block.operators
        for name in operator.inputs
    }
    # Gradients go the other way, to the complete layout of the producer.
    moves = (
        move
        for source, target in pairs
        for move in (*redistribute(source, target), *redistribute(target, source.without_partial))
    )
    return frozenset(move.axis for move in moves if move.collective is Collective.ALL_TO_ALL)


class SurroundingSegments(NamedTuple):
    """The segments around an operator: before its forward, before its backward and after its backward."""

    before_forward: list[Segment]
    before_backward: list[Segment]
    after_backward: list[Segment]


def build_surrounding(layout: BlockLayout, operator: Operator, inputs: tuple[str, ...]) -> SurroundingSegments:
    """Return the gathers and scatters of what an operator keeps cut, and the sums of its statistics.

    Parameters
    ----------
    inputs
        Inputs that are gathered again for the gradients of its weights.
    """
    names = [name for name in operator.parameters if layout.gathers_again(operator, name)]
    statistics, is_deferred = _build_statistics(layout, operator), defers(operator)
    gradient_statistics = [
        segment._replace(tensor="") for segment in statistics
    ]  # they move nothing that another operator makes
    parameter_gathers = {name: _build_gathers(layout, operator, name) for name in names}
    input_gathers = chain.from_iterable(_build_gathers(layout, operator, name) for name in inputs)
    weight_gathers = chain.from_iterable(
        parameter_gathers[name] for name in backward_parameters(operator) if name in parameter_gathers
    )
    gradient_scatters = chain.from_iterable(_build_scatters(layout, operator, name) for name in names)
    return SurroundingSegments(
        [*chain.from_iterable(parameter_gathers.values()), *statistics],
        [*(segment._replace(deferred=is_deferred) for segment in input_gathers), *weight_gathers, *gradient_statistics],
        [segment._replace(deferred=is_deferred) for segment in gradient_scatters],
    )


def _build_gathers(layout: BlockLayout, operator: Operator, name: str) -> list[Segment]:
    """Return the collectives that bring a parameter or input from the layout in which it is kept to an operator."""
    return build_collectives(layout, name, layout.kept_layout(operator, name), layout.input_layout(operator, name))


def _build_scatters(layout: BlockLayout, operator: Operator, name: str) -> list[Segment]:
    """Return the collectives that sum the gradient of a parameter and leave it in the parameter's layout."""
    kept_spec, gradient_spec = (
        layout.kept_layout(operator, name),
        layout.shardings[operator.name].find_gradient_spec(layout.block.tensor[name]),
    )
    gathered_axes = {axis for _, axes in kept_spec.cuts for axis in axes} - {
        axis for _, axes in gradient_spec.cuts for axis in axes
    }
    partial_spec = ShardingSpec(
        gradient_spec.cuts, tuple(axis for axis in gradient_spec.partial if axis in gathered_axes)
    )
    return build_collectives(layout, name, partial_spec, kept_spec, "gradient of ")


def find_regathered_inputs(layout: BlockLayout) -> dict[str, tuple[str, ...]]:
    """Return the inputs that are gathered again in backward, by the last operator that reads each.

    The backward of the last reader is the first one to need the input.
    """
    last_readers: dict[tuple[str, ShardingSpec], str] = {}
    for operator in layout.block.operators:
        names = (name for name in operator.inputs if layout.gathers_again(operator, name))
        last_readers |= {(name, layout.input_layout(operator, name)): operator.name for name in names}
    inputs_of_reader: dict[str, tuple[str, ...]] = {}
    for (name, _), reader in last_readers.items():
        inputs_of_reader[reader] = (*inputs_of_reader.get(reader, ()), name)
    return inputs_of_reader


def _build_statistics(layout: BlockLayout, operator: Operator) -> list[Segment]:
    """Return the sums of an operator's statistics over the ranks that cut the dims they are taken along."""
    cuts = dict(layout.shardings[operator.name].cuts)
    sums = ((dim, count, axis) for dim, count in operator.statistics for axis in cuts.get(dim, ()))
    segments = []
    for dim, count, axis in sums:
        if layout.mesh.size(axis) > 1:
            size = layout.statistics_bytes(operator, dim, count)
            segment = build_communication(axis, Collective.ALL_REDUCE, size, f"statistics of {operator.name}")
            segments.append(segment._replace(tensor=operator.outputs[0]))
    return segments


_DISTRIBUTED_KINDS = frozenset(
    {
        OperatorKind.MATMUL,
        OperatorKind.GROUPED_MATMUL,
        OperatorKind.EMBEDDING,
        OperatorKind.NORM,
        OperatorKind.CROSS_ENTROPY,
    }
)
"""Kinds of operators that run on distributed tensors where they are cut along an operator axis. Operators between them
work on each rank's own part, as all operators do under context parallelism."""

FUSED_SQUARES = 4
"""Softmax with its scale, mask and casts is one kernel where a rank's heads of all sequences are a multiple of this
(Megatron-LM, ``model/fused_softmax.py``, ``is_kernel_available``)."""
EAGER_SOFTMAX_LAUNCHES = 5
"""Kernels of a softmax that is not fused: cast, scale, mask, softmax and cast (``forward_torch_softmax``)."""


def build_block_segments(layout: BlockLayout, *, keeps_gathered: bool = True) -> BlockSegments:
    """Return forward and backward of a block: compute, and collectives along its axes, in order.

    Where a product keeps only its shard of an input that it gathers along the tensor axis, backward gathers the input
    again beside the product, for the gradient of the weight (Korthikanti et al. 2022, section 4.2.2). Products of
    experts keep what they read: their dispatcher gathers it (Megatron-LM, ``moe/token_dispatcher.py``).
    """
    forward: list[Segment] = []
    backward: list[list[Segment]] = []
    available_inputs: dict[tuple[str, ShardingSpec], None] = {}
    regathered_inputs = find_regathered_inputs(layout)
    for operator in layout.block.operators:
        return_segments: list[Segment] = []
        regather_segments: list[Segment] = []
        keeps_shards = gathers_in_backward(layout, operator, keeps_gathered=keeps_gathered)
        for name in operator.inputs:
            target = layout.input_layout(operator, name)
            # A tensor is moved once into each layout; later readers of the same layout find it there.
            if (name, target) not in available_inputs:
                available_inputs[name, target] = None
                source = layout.produced_layouts[name]
                input_segments = build_arrivals(
                    layout, name, source, target, sums_first=layout.adds_before_cut(operator)
                )
                input_segments = add_token_sorts(layout, TaskKind.FORWARD, input_segments)
                forward += input_segments
                if keeps_shards:
                    regather_segments += [
                        segment._replace(overlaps_next=True) for segment in input_segments if is_tensor_gather(segment)
                    ]
                if any(layout.gives_gradient(reader) for reader in layout.list_readers(name, target)):
                    gradient_layout = find_gradient_layout(layout, name, target)
                    gradient_segments = build_returns(layout, name, gradient_layout, source)
                    return_segments += add_token_sorts(layout, TaskKind.BACKWARD, gradient_segments)
        operator_segments = build_operator_segments(layout, operator, regathered_inputs.get(operator.name, ()))
        return_segments = [*operator_segments.after_backward, *return_segments]
        num_turns = layout.mesh.size(CONTEXT)
        if layout.runs_ring(operator) and num_turns > 1:
            ring = find_ring(layout, operator)
            forward += [*operator_segments.gathers, *build_ring_forward(operator_segments.forward, num_turns, ring)]
            backward.append(
                [
                    *operator_segments.before_backward,
                    *build_ring_backward(operator_segments.backward, num_turns, ring),
                    *return_segments,
                ]
            )
        else:
            forward += [*operator_segments.gathers, operator_segments.forward]
            backward.append(
                [*operator_segments.before_backward, *regather_segments, operator_segments.backward, *return_segments]
            )
    # The operators of a loss are the last ones of forward, and so the first ones of backward.
    num_loss_segments = sum(map(len, backward[len(backward) - len(layout.block.loss) :]))
    return BlockSegments(
        tuple(forward), tuple(segment for segments in reversed(backward) for segment in segments), num_loss_segments
    )


RING_MERGE_BYTES = 51
"""Bytes that torch's merge of a part of ring attention moves for an element of the result: it casts, subtracts, scales
and subtracts in fp32 (torch 2.6, ``distributed/tensor/experimental/_attention.py``, ``_SDPAMerger._merge_one``). Timed
on an H200 (``reports/executor/device-kernels-h200.jsonl``): 1.53 ms for 134 million at 4.48 TB/s."""
RING_SUM_BYTES = 36
"""The same for its sums of gradients in fp32 (``_templated_ring_attention_backward``, of which every addition reads a
16-bit part and reads and writes the sum): 10 for queries, 10 for half of the keys and values, which are as many once
they are repeated, and 16 for the copy of both that is sent."""
RING_KERNELS = 6
"""Kernels of a merge, and of the sums of a part: a cast, two differences, a product, and two of logarithms of sums."""


def find_ring(layout: BlockLayout, operator: Operator) -> Ring:
    """Return what goes round in ring attention, and what a framework does with each part."""
    size = layout.ring_bytes(operator)
    if not layout.training.composes_ring:
        return Ring(size, size)
    output = operator.outputs[0]
    num_bytes = layout.tensor_bytes(output, layout.produced_layouts[output])
    elements = num_bytes // ITEMSIZE[layout.block.tensor[output].dtype]
    merge, sums = (
        Segment(kind, label, Streaming(element_bytes * elements, OperatorKind.ELEMENTWISE, RING_KERNELS), RING_KERNELS)
        for kind, label, element_bytes in (
            (TaskKind.FORWARD, "merge of parts", RING_MERGE_BYTES),
            (TaskKind.BACKWARD, "sums of gradients", RING_SUM_BYTES),
        )
    )
    gradient_size = size * ITEMSIZE["fp32"] / min(ITEMSIZE[layout.block.tensor[output].dtype], ITEMSIZE["fp32"])
    return Ring(size, gradient_size, merge, sums)


class OperatorSegments(NamedTuple):
    """The segments of one operator on one rank: its gathers, its passes, and the collectives around its backward."""

    gathers: list[Segment]
    forward: Segment
    before_backward: list[Segment]
    backward: Segment
    after_backward: list[Segment]


def build_operator_segments(
    layout: BlockLayout, operator: Operator, regathered_inputs: tuple[str, ...] = ()
) -> OperatorSegments:
    """Return an operator and its own collectives; ``regathered_inputs`` are gathered for its gradients of weights."""
    surrounding = build_surrounding(layout, operator, regathered_inputs)
    forward, backward = (_build_compute(layout, operator, direction) for direction in Pass)
    return OperatorSegments(
        surrounding.before_forward, forward, surrounding.before_backward, backward, surrounding.after_backward
    )


def gathers_in_backward(layout: BlockLayout, operator: Operator, *, keeps_gathered: bool) -> bool:
    """Return whether an operator keeps its shard of an input gathered along the tensor axis, and gathers it again."""
    return operator.kind is OperatorKind.MATMUL and not (keeps_gathered or layout.shardings[operator.name].kept)


def build_arrivals(
    layout: BlockLayout, name: str, source: ShardingSpec, target: ShardingSpec, *, sums_first: bool
) -> list[Segment]:
    """Return the collectives that bring a tensor from the layout in which it is made to that in which it is read.

    ``sums_first`` says that partial sums are completed before any dim is cut.
    """
    if not sums_first:
        return build_collectives(layout, name, source, target)
    complete_spec = source.without_partial
    return [
        *build_collectives(layout, name, source, complete_spec),
        *build_collectives(layout, name, complete_spec, target),
    ]


def add_token_sorts(layout: BlockLayout, kind: TaskKind, segments: list[Segment]) -> list[Segment]:
    """Return segments with a copy after every exchange of routed tokens between experts' ranks.

    Tokens arrive rank by rank, are read expert by expert, and go back the other way: they are sorted where a rank has
    several experts (Megatron-LM, ``moe/token_dispatcher.py``: ``sort_chunks_by_idxs`` after each all-to-all).
    """
    result: list[Segment] = []
    for segment in segments:
        result.append(segment)
        if segment.collective is not Collective.ALL_TO_ALL or segment.axis != EXPERT:
            continue
        tensor = layout.block.tensor[segment.tensor]
        if dict(zip(tensor.dims, tensor.shape, strict=True))[EXPERTS] > layout.mesh.size(EXPERT):
            sort = Streaming(2 * segment.size, OperatorKind.PERMUTE)
            result.append(Segment(kind, f"sort of {segment.tensor}", sort, tensor=segment.tensor))
    return result


def build_returns(layout: BlockLayout, name: str, gradient: ShardingSpec, source: ShardingSpec) -> list[Segment]:
    """Return the collectives that bring the gradient of a tensor, if it has one, back to the tensor's layout."""
    if not layout.has_gradient(name):
        return []
    return build_collectives(layout, name, gradient, source.without_partial, "gradient of ")


def is_tensor_gather(segment: Segment) -> bool:
    """Return whether a segment is a gather along the tensor axis."""
    return segment.collective is Collective.ALL_GATHER and segment.axis == TENSOR


def find_gradient_layout(layout: BlockLayout, name: str, target: ShardingSpec) -> ShardingSpec:
    """Return the layout of a gradient to which all readers of ``(name, target)`` have added."""
    partial_axes: dict[str, None] = {}
    for operator in layout.list_readers(name, target):
        spec = layout.shardings[operator.name].find_gradient_spec(layout.block.tensor[name])
        partial_axes |= dict.fromkeys(spec.partial)
    return ShardingSpec(target.cuts, tuple(partial_axes))


def _build_compute(layout: BlockLayout, operator: Operator, direction: Pass) -> Segment:
    """Return the segment of an operator's own kernels in one direction."""
    is_quantised, training = layout.quantises(operator), layout.training
    kernels = Kernels(
        layout.block,
        operator,
        layout.local_sizes(operator),
        direction,
        is_quantised,
        layout.gradient_bytes,
        layout.frozen,
        operator.kind in _DISTRIBUTED_KINDS and _has_operator_cut(layout.shardings[operator.name]),
        is_quantised and not training.keeps_quantised,
        streaming_kind(operator) in training.composed,
        training.scaling,
    )
    kind = TaskKind.FORWARD if direction is Pass.FORWARD else TaskKind.BACKWARD
    waits = operator.kind is OperatorKind.ATTENTION and direction is Pass.FORWARD and training.waits_in_attention
    num_launches = _count_launches(layout, operator) + is_quantised + waits
    return Segment(kind, operator.name, kernels, num_launches, host_waits=int(waits))


def _has_operator_cut(sharding: OperatorSharding) -> bool:
    """Return whether an operator axis cuts an operator."""
    return any(axis in OPERATOR_AXES for _, axes in sharding.cuts for axis in axes)


def _count_launches(layout: BlockLayout, operator: Operator) -> int:
    """Return how often the host starts kernels for an operator, or for its backward."""
    if operator.kind is OperatorKind.GROUPED_MATMUL and layout.training.loops_experts:
        return layout.local_sizes(operator).get(EXPERTS, 1)
    if operator.kind is not OperatorKind.SOFTMAX:
        return 1
    if operator.kind in layout.training.composed:
        return EAGER_SOFTMAX_LAUNCHES
    tokens = (SEQUENCE, operator.dims[-1][0])
    num_squares = prod(size for dim, size in layout.local_sizes(operator).items() if dim not in tokens)
    return 1 if num_squares % FUSED_SQUARES == 0 else EAGER_SOFTMAX_LAUNCHES
