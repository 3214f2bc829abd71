"""Recompute: what a block keeps from forward to backward, and what backward computes again.

A recomputed operator keeps the inputs that it reads from outside and drops its results, with one exception: the
result of a product or of attention stays where an operator that is not recomputed reads it in its backward. Megatron-LM
does the same: the attention core is checkpointed while the projection keeps its input, and norms and activation
functions are checkpointed without their output [1]_ [2]_ [3]_.

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
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.compute import PRODUCTS
from meshwise.simulator.operator_graph import Block, Operator, OperatorKind
from meshwise.simulator.program import TaskKind
from meshwise.simulator.units import to_ticks
from meshwise.strategies.lowering.costs.liveness import Held, Liveness
from meshwise.strategies.lowering.costs.operator import BlockSteps, defers
from meshwise.strategies.lowering.costs.steps import Step
from meshwise.strategies.plan.mesh import OPERATOR_AXES
from meshwise.strategies.plan.recomputation import HOOKS, OfLayer, Recompute, SomeOperators
from meshwise.strategies.schedules.schedule import ActionKind

_HEAVY = PRODUCTS | {OperatorKind.ATTENTION}
"""Kinds of operators whose results stay for operators that are not recomputed."""


class BlockMemory(NamedTuple):
    """Bytes of one microbatch of one block on one rank.

    Parameters
    ----------
    kept_bytes
        Held from forward to backward.
    recomputed_bytes
        Made again at the start of backward and held until its end; below 0 where gradients count from the start on
        that are made only after activations are freed.
    forward, backward
        Held beyond those at the fullest moment of each pass.
    deferred_bytes
        Needed for the gradients of weights once those of inputs are made.
    gradients
        The part of ``deferred_bytes`` that exists only then: gradients of outputs of operators with weights.
    inputs, weights
        Where backward is split, held beyond those at the fullest moment of each part; ``weights`` may be below 0 as
        ``recomputed_bytes`` may.
    loss, loss_inputs
        The parts of ``backward`` and of ``inputs`` that exist only during the backward of a loss, which comes first.
    lost_bytes
        The part of ``deferred_bytes`` that a stage frees when the gradients of its inputs are made.
    """

    kept: int
    recomputed: int
    forward: int
    backward: int
    deferred: int = 0
    gradients: int = 0
    inputs: int = 0
    weights: int = 0
    loss: int = 0
    loss_inputs: int = 0
    lost: int = 0

    def changes(self, kind: ActionKind) -> tuple[int, int]:
        """Return the bytes that a pass takes at its start and gives back at its end, besides `working_bytes`."""
        if kind is ActionKind.FORWARD:
            return self.kept, 0
        if kind is ActionKind.WEIGHT:
            early = min(self.weights, 0)
            return early, early + self.deferred
        if kind is ActionKind.BACKWARD:
            return self.recomputed, self.recomputed + self.kept
        taken = max(self.recomputed, 0) + self.gradients
        return taken, taken + self.kept - self.deferred

    def late(self) -> "BlockMemory":
        """Return the memory where a split backward makes all gradients with those of weights."""
        weights = self.recomputed + self.backward
        return self._replace(
            deferred=self.kept, gradients=-max(self.recomputed, 0), inputs=0, weights=weights, loss_inputs=0, lost=0
        )

    def kept_whole(self, before: int, after: int) -> "BlockMemory":
        """Return the memory as `with_buffers` does, where a split backward gives nothing back before its end."""
        found, gradients = self.within(before, after), max(self.gradients - after, 0)
        return found._replace(
            gradients=gradients, deferred=self.deferred - min(before, self.kept) + gradients - self.gradients + after
        )

    def within(self, before: int, after: int) -> "BlockMemory":
        """Return the memory where received bytes lie in a buffer, and sent bytes stay until backward."""
        backward, inputs = max(self.backward - after, 0), max(self.inputs - after, 0)
        return self._replace(
            kept=max(self.kept - before, 0) + after,
            forward=max(self.forward - after, 0),
            backward=backward,
            inputs=inputs,
            loss=min(self.loss, backward),
            loss_inputs=min(self.loss_inputs, inputs),
        )

    def working(self, kind: ActionKind) -> int:
        """Return the bytes that a pass holds at its fullest moment beyond those it takes."""
        if kind is ActionKind.FORWARD:
            return self.forward
        if kind is ActionKind.BACKWARD:
            return self.backward
        return self.inputs if kind is ActionKind.INPUT else max(self.weights, 0)

    def of_loss(self, kind: ActionKind) -> int:
        """Return the part of `working_bytes` that a pass frees before it reads parameters."""
        if kind is ActionKind.BACKWARD:
            return self.loss
        return self.loss_inputs if kind is ActionKind.INPUT else 0


def recomputed_operators(block: Block, how: OfLayer) -> tuple[Operator, ...]:
    """Return the operators that backward runs again; only layers are recomputed."""
    if how is Recompute.NONE or not block.layer:
        return ()
    if how is Recompute.FULL:
        return block.operators
    if isinstance(how, SomeOperators):
        return tuple(operator for operator in block.operators if operator.name in how.names)
    return tuple(operator for operator in block.operators if operator.recompute_selectively)


def read_again(block: Block) -> frozenset[str]:
    """Return the operators that lead to what the backward of a block reads: not those at the end of a layer.

    >>> from meshwise.simulator.models.transformer import Transformer
    >>> layer = Transformer(1, 64, 4, 4, 256, 512).graph(32, "bf16").blocks[1]
    >>> sorted({operator.name for operator in layer.operators} - read_again(layer))
    ['down', 'feed_forward_residual']
    """
    read = {name for operator in block.operators for name in operator.saved}
    found: set[str] = set()
    for operator in reversed(block.operators):
        if not read.isdisjoint(operator.outputs):
            found.add(operator.name)
            read |= set(operator.inputs)
    return frozenset(found)


def with_recompute(
    block: Block, steps: BlockSteps, how: OfLayer, accelerator: Accelerator, *, unread: bool = True
) -> BlockSteps:
    """Return the segments of a block with the recomputed part of forward before backward.

    ``reruns_unread`` says that operators whose results backward does not read run again too.
    """
    again = recomputed_operators(block, how)
    if not again:
        return steps
    names, made = {operator.name for operator in again}, {name for operator in again for name in operator.outputs}
    names = names if unread else names & read_again(block)
    whole = len(again) == len(block.operators)
    repeated: list[Step] = []
    waiting: list[Step] = []
    for step in steps.forward:  # what moves the tensors that an operator reads comes right before it
        if step.collective is not None or step.tensor:
            gathered = step.collective is Collective.ALL_GATHER and step.axis in OPERATOR_AXES
            again_moved = step if step.collective else step._replace(kind=TaskKind.RECOMPUTE)
            waiting += [again_moved] if whole or step.beside or gathered or step.tensor in made else []
            continue
        if step.operators in names:
            repeated += [*waiting, step._replace(kind=TaskKind.RECOMPUTE)]
        waiting = []
    if accelerator.recompute_launch:
        # Operators given by name are checkpointed one by one, others as one region.
        regions = len(again) if isinstance(how, SomeOperators) else 1
        seconds = regions * accelerator.recompute_launch + HOOKS * len(names) * accelerator.launch
        repeated.insert(0, Step(TaskKind.RECOMPUTE, to_ticks(seconds), "kept inputs", 0))
    return BlockSteps(steps.forward, (*repeated, *steps.backward))


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

    kept: int
    remade: int
    forward: int
    backward: tuple[tuple[int, int], ...]
    deferred: int
    gradients: int
    inputs: tuple[int, ...]
    weights: tuple[tuple[int, int], ...]
    before_loss: int
    lost: int = 0

    def memory(self, times: int = 1) -> BlockMemory:
        """Return the memory of ``factor`` times as many sequences."""
        most = max(times * live + gradient for live, gradient in self.backward)
        held = min(times * (self.kept + self.remade), most)
        kept, without = times * self.kept, times * (max(self.inputs) - self.gradients)
        held_inputs = max(held, kept)  # gradients of weights do not come then
        rest, rest_inputs = self.backward[: self.before_loss], self.inputs[: self.before_loss]
        backward, inputs = most - held, max(without - held_inputs, 0)
        return BlockMemory(
            kept,
            held - kept,
            max(times * self.forward - kept, 0),
            backward,
            times * self.deferred,
            times * self.gradients,
            inputs,
            max((times * live + gradient for live, gradient in self.weights), default=0),
            backward - max(max(times * live + gradient for live, gradient in rest) - held, 0),
            inputs - max(times * (max(rest_inputs) - self.gradients) - held_inputs, 0),
            times * self.lost,
        )


def moments(live: Liveness, how: OfLayer, *, apart_gradients: int = 0) -> Moments:
    """Return the bytes that a block holds, moment by moment.

    ``separate_bytes`` are the bytes of an element of gradients that count elsewhere, from when they leave their block:
    then gradients that backward has not made yet are left out here.
    """
    operators = live.operators
    again = set(recomputed_operators(live.block, how))
    held, saved = _kept(live, again), _saved(live)
    remade = {name: each for name, (each, _) in saved.items() if name not in held}
    last = max((saved[name][1] for name in remade), default=-1)
    where = [index for index, operator in enumerate(operators) if operator in again]
    # Remade tensors live from the backward of their last reader to that of the first recomputed operator.
    backward = live.backward(held, remade, range(min(where, default=0), max([last, *where]) + 1))
    gradients = [live.weight_gradient(operator) for operator in operators]
    apart = [operator for operator in operators if defers(operator)]
    besides = dict(zip(operators, gradients, strict=True))
    if apart_gradients:
        gradients = _not_made(live, gradients, apart_gradients)
        besides = {
            operator: max(made - _own(live, operator) * apart_gradients, 0) for operator, made in besides.items()
        }
    return Moments(
        sum(each.size for each in held.values()),
        sum(each.size for each in remade.values()),
        live.forward(held),
        tuple(zip(backward, gradients, strict=True)),
        *_deferred(live, held, remade, backward),
        tuple((live.gathered_apart(operator), besides[operator]) for operator in apart),
        len(operators) - (0 if again else len(live.block.loss)),
        _lost(live, held),
    )


def _not_made(live: Liveness, gradients: Sequence[int], each: int) -> list[int]:
    """Return, for every operator, the bytes of gradients that it makes and nothing keeps, less those yet to be made."""
    kept = [_own(live, operator) for operator in live.operators]
    later = accumulate((count * each for count in kept), initial=0)
    return [max(made - count * each, 0) - left for made, count, left in zip(gradients, kept, later, strict=False)]


def _own(live: Liveness, operator: Operator) -> int:
    """Return the elements on a rank of an operator's parameters."""
    return sum(live.layout.parameter_share(live.block.tensor[name]) for name in operator.parameters)


def _kept(live: Liveness, again: set[Operator]) -> dict[str, Held]:
    """Return the tensors kept from forward to backward.

    Operators that are not recomputed keep what they save, and recomputed ones what they read from outside.
    """
    result: dict[str, Held] = {}
    inside = {name for operator in again for name in operator.outputs}
    gone = {name for operator in again if operator.kind not in _HEAVY for name in operator.outputs}
    for index, operator in enumerate(live.operators):
        if operator in again:
            found = dict(live.kept(operator, name) for name in operator.inputs if name not in inside)
        else:
            found = dict(live.kept(operator, name) for name in live.saved(operator) if name not in gone)
            found |= live.unnamed(operator)
        for name, size in found.items():
            result.setdefault(name, Held(size, index))
    return result


def _saved(live: Liveness) -> dict[str, tuple[Held, int]]:
    """Return the tensors that operators keep without recomputation, and the last operator that keeps each."""
    result: dict[str, tuple[Held, int]] = {}
    for index, operator in enumerate(live.operators):
        for name, size in (
            *(live.kept(operator, name) for name in live.saved(operator)),
            *live.unnamed(operator).items(),
        ):
            result[name] = result[name][0] if name in result else Held(size, index), index
    return result


def _deferred(
    live: Liveness, held: Mapping[str, Held], remade: Mapping[str, Held], backward: Sequence[int]
) -> tuple[int, int, tuple[int, ...]]:
    """Return the bytes for separate gradients of weights, the gradients among them, and the levels before.

    They are fields of `Moments`. Either the inputs of these operators and the gradients of their outputs stay, or all
    that forward kept and what was recomputed.
    """
    if not live.framework.keeps_graph:
        operators = [operator for operator in live.operators if defers(operator)]
        inputs = dict(live.kept(operator, name) for operator in operators for name in live.saved(operator))
        outputs = dict(live.kept(operator, name) for operator in operators for name in operator.outputs)
        gradients = sum(outputs.values())
        return sum(inputs.values()) + gradients, gradients, tuple(each + gradients for each in backward)
    writers = [operator for operator in live.operators if operator.parameters]
    gradients = sum(live.gradient(name) for operator in writers for name in operator.outputs)
    kept, again = (sum(tensor.size for tensor in found.values()) for found in (held, remade))
    moments = tuple(kept + again + each + gradients for each in live.captured())
    return kept + again + gradients, gradients, moments


def _lost(live: Liveness, held: Mapping[str, Held]) -> int:
    """Return the bytes that a loss keeps until all gradients of inputs are made, if other tensors are kept longer."""
    first = len(live.operators) - len(live.block.loss)
    return sum(each.size for each in held.values() if each.first >= first) if live.framework.keeps_graph else 0
