"""Recompute: what a block keeps from forward to backward, and what backward computes again.

A recomputed operator keeps the inputs that it reads from outside and drops its results, with one exception: the
result of a product or of attention stays where an operator that is not recomputed reads it in its backward. Megatron-LM
does the same: the attention core is checkpointed while the projection keeps its input, and norms and activation
functions are checkpointed without their output [1]_ [2]_ [3]_.

Half of a product may run again: of its result, where recomputed operators read it, the other half is kept.

A collective runs again where the operator that reads its result is recomputed and the result is not there: a gather
along a tensor axis, because kept tensors are kept as they were produced; keys and values that go round a ring; and any
other collective whose input is itself recomputed. With full recompute all collectives run again. Keys gathered along
the context axis are assumed to be there in backward.

References
----------
.. [1] Chen et al. 2016, "Training deep nets with sublinear memory cost" (full).
.. [2] Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models" (selective).
.. [3] Megatron-LM, ``--recompute-modules`` and ``CheckpointWithoutOutput`` (operators).
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from meshwise.simulator.collective import Collective
from meshwise.simulator.machine.compute import PRODUCTS
from meshwise.simulator.operator_graph import Block, Operator, OperatorKind
from meshwise.simulator.program import TaskKind
from meshwise.strategies.lowering.costs.layout import defers
from meshwise.strategies.lowering.costs.liveness import KeptTensor, Liveness
from meshwise.strategies.lowering.costs.memory import BlockMemory
from meshwise.strategies.lowering.costs.segments import BlockSegments, Checkpoints, Portion, Segment, Share
from meshwise.strategies.plan.mesh import OPERATOR_AXES
from meshwise.strategies.plan.recomputation import LayerRecompute, Recompute, SomeOperators

_HALF_PORTION = Portion(Share.CHUNK, 2)
"""The kernels of half of a product."""

_HEAVY_KINDS = PRODUCTS | {OperatorKind.ATTENTION}
"""Kinds of operators whose results stay for operators that are not recomputed."""


def find_recomputed_operators(block: Block, recompute_choice: LayerRecompute) -> tuple[Operator, ...]:
    """Return the operators that backward runs again; only layers are recomputed."""
    if recompute_choice is Recompute.NONE or not block.layer:
        return ()
    if recompute_choice is Recompute.FULL:
        return block.operators
    if isinstance(recompute_choice, SomeOperators):
        return tuple(operator for operator in block.operators if operator.name in recompute_choice.operators)
    return tuple(operator for operator in block.operators if operator.recompute_selectively)


def find_halved_operators(recompute_choice: LayerRecompute) -> frozenset[str]:
    """Return the names of the operators of which backward runs one half again."""
    return recompute_choice.halved_operators if isinstance(recompute_choice, SomeOperators) else frozenset()


def find_backward_sources(block: Block) -> frozenset[str]:
    """Return the operators that lead to what the backward of a block reads: not those at the end of a layer.

    >>> from meshwise.simulator.models.transformer import Transformer
    >>> layer = Transformer(1, 64, 4, 4, 256, 512).graph(32, "bf16").blocks[1]
    >>> sorted({operator.name for operator in layer.operators} - find_backward_sources(layer))
    ['down', 'feed_forward_residual']
    """
    read_names = {name for operator in block.operators for name in operator.saved}
    sources: set[str] = set()
    for operator in reversed(block.operators):
        if not read_names.isdisjoint(operator.outputs):
            sources.add(operator.name)
            read_names |= set(operator.inputs)
    return frozenset(sources)


def with_recompute(
    block: Block,
    segments: BlockSegments,
    recompute_choice: LayerRecompute,
    *,
    reruns_unread: bool = True,
    num_launches: int = 0,
) -> BlockSegments:
    """Return the segments of a block with the recomputed part of forward before backward.

    ``reruns_unread`` says that operators whose results backward does not read run again too; ``num_launches`` is how
    many launches it takes a host to keep and set back the random state of a region.
    """
    operators = find_recomputed_operators(block, recompute_choice)
    if not operators:
        return segments
    names, remade_names = (
        {operator.name for operator in operators},
        {name for operator in operators for name in operator.outputs},
    )
    names = names if reruns_unread else names & find_backward_sources(block)
    halved_names = find_halved_operators(recompute_choice)
    is_full = len(operators) == len(block.operators)
    repeated_segments: list[Segment] = []
    pending: list[Segment] = []
    for segment in segments.forward:  # what moves the tensors that an operator reads comes right before it
        if segment.collective is not None or segment.tensor:
            is_gather = segment.collective is Collective.ALL_GATHER and segment.axis in OPERATOR_AXES
            repeated_move = segment if segment.collective else segment._replace(kind=TaskKind.RECOMPUTE)
            pending += (
                [repeated_move]
                if is_full or segment.overlaps_next or is_gather or segment.tensor in remade_names
                else []
            )
            continue
        if segment.label in names:
            portion = _HALF_PORTION if segment.label in halved_names else segment.portion
            repeated_segments += [*pending, segment._replace(kind=TaskKind.RECOMPUTE, portion=portion)]
        pending = []
    # Operators given by name are checkpointed one by one, others as one region.
    num_regions = len(operators) if isinstance(recompute_choice, SomeOperators) else 1
    checkpoints = Checkpoints(num_regions, len(names))
    kept_inputs = Segment(TaskKind.RECOMPUTE, "kept inputs", checkpoints, num_regions * num_launches, is_optional=True)
    return BlockSegments(segments.forward, (kept_inputs, *repeated_segments, *segments.backward))


class Moments(NamedTuple):
    """Bytes of one block on one rank, moment by moment: of activations, which grow with the batch, and of gradients.

    Parameters
    ----------
    kept_bytes, remade_bytes
        Held from forward to backward, and what backward can make again.
    forward
        Held at the fullest moment of forward.
    backward
        For every operator, the bytes held while its backward runs, and those of the gradients of its weights.
    deferred_bytes, gradients
        As in `BlockMemory`.
    inputs
        Where backward is split, for every operator the bytes held while the gradient of its input is made, with all of
        ``gradients``.
    weights
        For every operator that computes gradients of weights apart, the bytes held meanwhile, and those of the
        gradients.
    num_before_loss
        Number of operators that are not of a loss with which backward begins.
    lost_bytes
        As in `BlockMemory`.
    """

    kept_bytes: int
    remade_bytes: int
    forward: int
    backward: tuple[tuple[int, int], ...]
    deferred_bytes: int
    gradients: int
    inputs: tuple[int, ...]
    weights: tuple[tuple[int, int], ...]
    num_before_loss: int
    lost_bytes: int = 0

    def scale_memory(self, factor: int = 1) -> BlockMemory:
        """Return the memory of ``factor`` times as many sequences."""
        backward_peak = max(factor * live + gradient for live, gradient in self.backward)
        base_bytes = min(factor * (self.kept_bytes + self.remade_bytes), backward_peak)
        kept_bytes, input_peak = factor * self.kept_bytes, factor * (max(self.inputs) - self.gradients)
        base_inputs = max(base_bytes, kept_bytes)  # gradients of weights do not come then
        other_backward, other_inputs = self.backward[: self.num_before_loss], self.inputs[: self.num_before_loss]
        backward, inputs = backward_peak - base_bytes, max(input_peak - base_inputs, 0)
        return BlockMemory(
            kept_bytes,
            base_bytes - kept_bytes,
            max(factor * self.forward - kept_bytes, 0),
            backward,
            factor * self.deferred_bytes,
            factor * self.gradients,
            inputs,
            max((factor * live + gradient for live, gradient in self.weights), default=0),
            backward - max(max(factor * live + gradient for live, gradient in other_backward) - base_bytes, 0),
            inputs - max(factor * (max(other_inputs) - self.gradients) - base_inputs, 0),
            factor * self.lost_bytes,
        )


class PassTensors(NamedTuple):
    """The tensors that a block keeps from forward to backward, those that backward makes again, and for how long.

    ``remade_range`` are the operators during whose backward the latter are live.
    """

    kept: dict[str, KeptTensor]
    remade: dict[str, KeptTensor]
    remade_range: range


def find_pass_tensors(liveness: Liveness, recompute_choice: LayerRecompute) -> PassTensors:
    """Return the tensors that a block keeps from forward to backward, and those that backward makes again."""
    recomputed = set(find_recomputed_operators(liveness.block, recompute_choice))
    kept_tensors = _find_kept_tensors(liveness, recomputed, find_halved_operators(recompute_choice))
    saved_tensors = _find_saved_tensors(liveness)
    remade_tensors = {}
    for name, (tensor, _) in saved_tensors.items():
        kept_tensor = kept_tensors.get(name)
        if kept_tensor is None:
            remade_tensors[name] = tensor
        elif kept_tensor.is_half:
            remade_tensors[name] = tensor._replace(size=tensor.size - kept_tensor.size)
    last_reader = max((saved_tensors[name][1] for name in remade_tensors), default=-1)
    recomputed_indices = [index for index, operator in enumerate(liveness.operators) if operator in recomputed]
    # Remade tensors live from the backward of their last reader to that of the first recomputed operator.
    remade_range = range(min(recomputed_indices, default=0), max([last_reader, *recomputed_indices]) + 1)
    return PassTensors(kept_tensors, remade_tensors, remade_range)


def compute_moments(liveness: Liveness, recompute_choice: LayerRecompute, *, separate_bytes: int = 0) -> Moments:
    """Return the bytes that a block holds, moment by moment.

    ``separate_bytes`` are the bytes of an element of gradients that count elsewhere, from when they leave their block:
    then gradients that backward has not made yet are left out here.
    """
    operators, recomputed = liveness.operators, find_recomputed_operators(liveness.block, recompute_choice)
    kept_tensors, remade_tensors, remade_range = find_pass_tensors(liveness, recompute_choice)
    backward = liveness.list_backward_levels(kept_tensors, remade_tensors, remade_range)
    gradients = [liveness.weight_gradient_bytes(operator) for operator in operators]
    deferring = [operator for operator in operators if defers(operator)]
    extra_gradients = dict(zip(operators, gradients, strict=True))
    if separate_bytes:
        gradients = _list_unmade(liveness, gradients, separate_bytes)
        extra_gradients = {
            operator: max(num_bytes - count_elements(liveness, operator) * separate_bytes, 0)
            for operator, num_bytes in extra_gradients.items()
        }
    return Moments(
        sum(tensor.size for tensor in kept_tensors.values()),
        sum(tensor.size for tensor in remade_tensors.values()),
        liveness.find_forward_peak(kept_tensors),
        tuple(zip(backward, gradients, strict=True)),
        *_find_deferred(liveness, kept_tensors, remade_tensors, backward),
        tuple((liveness.regathered_bytes(operator), extra_gradients[operator]) for operator in deferring),
        len(operators) - (0 if recomputed else len(liveness.block.loss)),
        _count_lost(liveness, kept_tensors),
    )


def _list_unmade(liveness: Liveness, gradients: Sequence[int], element_bytes: int) -> list[int]:
    """Return, for every operator, the bytes of gradients that it makes and nothing keeps, less those yet to be made."""
    element_counts = [count_elements(liveness, operator) for operator in liveness.operators]
    earlier_bytes = accumulate((count * element_bytes for count in element_counts), initial=0)
    return [
        max(gradient - count * element_bytes, 0) - earlier
        for gradient, count, earlier in zip(gradients, element_counts, earlier_bytes, strict=False)
    ]


def count_elements(liveness: Liveness, operator: Operator) -> int:
    """Return the elements on a rank of an operator's parameters."""
    return sum(liveness.layout.parameter_share(liveness.block.tensor[name]) for name in operator.parameters)


def _find_kept_tensors(
    liveness: Liveness, recomputed: set[Operator], halved_operators: frozenset[str]
) -> dict[str, KeptTensor]:
    """Return the tensors kept from forward to backward.

    Operators that are not recomputed keep what they save, and recomputed ones what they read from outside, and half of
    what they read from an operator of which only half runs again.
    """
    result: dict[str, KeptTensor] = {}
    half_names = {name for operator in recomputed if operator.name in halved_operators for name in operator.outputs}
    inner_names = {name for operator in recomputed for name in operator.outputs}
    dropped_names = {name for operator in recomputed if operator.kind not in _HEAVY_KINDS for name in operator.outputs}
    for index, operator in enumerate(liveness.operators):
        if operator in recomputed:
            sizes = dict(liveness.describe_kept(operator, name) for name in operator.inputs if name not in inner_names)
        else:
            sizes = dict(
                liveness.describe_kept(operator, name)
                for name in liveness.list_saved(operator)
                if name not in dropped_names
            )
            sizes |= liveness.list_unnamed(operator)
        for name, size in sizes.items():
            result.setdefault(name, KeptTensor(size, index))
        if operator in recomputed:
            halves = (liveness.describe_kept(operator, name) for name in operator.inputs if name in half_names)
            for name, size in halves:
                result.setdefault(name, KeptTensor(size // 2, index, is_half=True))
    return result


def _find_saved_tensors(liveness: Liveness) -> dict[str, tuple[KeptTensor, int]]:
    """Return the tensors that operators keep without recomputation, and the last operator that keeps each."""
    result: dict[str, tuple[KeptTensor, int]] = {}
    for index, operator in enumerate(liveness.operators):
        for name, size in (
            *(liveness.describe_kept(operator, name) for name in liveness.list_saved(operator)),
            *liveness.list_unnamed(operator).items(),
        ):
            result[name] = result[name][0] if name in result else KeptTensor(size, index), index
    return result


def _find_deferred(
    liveness: Liveness,
    kept_tensors: Mapping[str, KeptTensor],
    remade_tensors: Mapping[str, KeptTensor],
    backward: Sequence[int],
) -> tuple[int, int, tuple[int, ...]]:
    """Return the bytes for separate gradients of weights, the gradients among them, and the levels before.

    They are fields of `Moments`. Either the inputs of these operators and the gradients of their outputs stay, or all
    that forward kept and what was recomputed.
    """
    if not liveness.framework.keeps_graph:
        operators = [operator for operator in liveness.operators if defers(operator)]
        input_sizes = dict(
            liveness.describe_kept(operator, name) for operator in operators for name in liveness.list_saved(operator)
        )
        output_sizes = dict(
            liveness.describe_kept(operator, name) for operator in operators for name in operator.outputs
        )
        gradients = sum(output_sizes.values())
        return sum(input_sizes.values()) + gradients, gradients, tuple(level + gradients for level in backward)
    writers = [operator for operator in liveness.operators if operator.parameters]
    gradients = sum(liveness.gradient_size(name) for operator in writers for name in operator.outputs)
    kept_bytes, remade_bytes = (
        sum(tensor.size for tensor in tensors.values()) for tensors in (kept_tensors, remade_tensors)
    )
    levels = tuple(kept_bytes + remade_bytes + level + gradients for level in liveness.list_captured_levels())
    return kept_bytes + remade_bytes + gradients, gradients, levels


def _count_lost(liveness: Liveness, kept_tensors: Mapping[str, KeptTensor]) -> int:
    """Return the bytes that a loss keeps until all gradients of inputs are made, if other tensors are kept longer."""
    first_loss = len(liveness.operators) - len(liveness.block.loss)
    return (
        sum(tensor.size for tensor in kept_tensors.values() if tensor.first_reader >= first_loss)
        if liveness.framework.keeps_graph
        else 0
    )
