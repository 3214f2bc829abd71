"""Recompute: what a block keeps from forward to backward, and what it computes again.

What a recomputed operator reads from outside stays. What it makes goes, with one exception: the
result of a product or of attention stays where an operator that is not recomputed reads it in
its backward. So does Megatron-LM: the attention core is checkpointed, and the projection keeps
its input; norms and activation functions are checkpointed without their output.

A collective runs again where the operator that reads what it makes is recomputed, and that is
not there: a gather along the tensor axis, for what is kept is kept as it was produced, keys and
values that go round a ring, and any other one where what it moves is itself computed again. With
full recompute all do. Keys gathered along the context axis are taken to be there in backward.

References
----------
Chen et al. 2016, "Training deep nets with sublinear memory cost" (full); Korthikanti et
al. 2022, "Reducing activation recomputation in large transformer models" (selective);
Megatron-LM, ``--recompute-modules`` and ``CheckpointWithoutOutput`` (operators).
"""

from typing import NamedTuple

from simulator.collective_kinds import Collective
from simulator.compute import PRODUCTS
from simulator.operator_graph import ITEMSIZE, Block, Operator, OperatorKind
from simulator.program import TaskKind
from strategies.lowering.operator import BlockLayout, BlockSteps
from strategies.lowering.split import defers
from strategies.lowering.step import Step
from strategies.mesh import TENSOR
from strategies.recomputation import OfLayer, Recompute, SomeOperators
from strategies.schedule import ActionKind

_HEAVY = PRODUCTS | {OperatorKind.ATTENTION}
"""Operators whose results stay for those that are not recomputed."""


class BlockMemory(NamedTuple):
    """Bytes of one microbatch of one block on one rank.

    Parameters
    ----------
    kept
        Held from forward to backward.
    recomputed
        Made again at the start of backward and held until its end.
    working
        Inputs and outputs of the operator that has the most, while the block runs.
    deferred
        What the gradients of weights need, once those of inputs are made.
    gradients
        The part of it that only then exists: gradients of what operators with weights put out.
    """

    kept: int
    recomputed: int
    working: int
    deferred: int = 0
    gradients: int = 0

    def changes(self, kind: ActionKind) -> tuple[int, int]:
        """Return what a pass of a kind takes at its start, and what it gives back at its end, besides ``working``."""
        if kind is ActionKind.FORWARD:
            return self.kept, 0
        if kind is ActionKind.WEIGHT:
            return 0, self.deferred
        if kind is ActionKind.BACKWARD:
            return self.recomputed, self.recomputed + self.kept
        taken = self.recomputed + self.gradients
        return taken, taken + self.kept - self.deferred


def recomputed_operators(block: Block, how: OfLayer) -> tuple[Operator, ...]:
    """Return the operators that backward runs again; only layers are recomputed."""
    if how is Recompute.NONE or not block.layer:
        return ()
    if how is Recompute.FULL:
        return block.operators
    if isinstance(how, SomeOperators):
        return tuple(operator for operator in block.operators if operator.name in how.names)
    return tuple(operator for operator in block.operators if operator.recompute_selectively)


def with_recompute(block: Block, steps: BlockSteps, how: OfLayer) -> BlockSteps:
    """Return the steps with the recomputed part of forward put before backward."""
    again = recomputed_operators(block, how)
    if not again:
        return steps
    names, made = {operator.name for operator in again}, {name for operator in again for name in operator.outputs}
    whole = len(again) == len(block.operators)
    repeated: list[Step] = []
    waiting: list[Step] = []
    for step in steps.forward:  # the collectives of what an operator reads come right before it
        if step.collective is not None:
            gathered = step.collective is Collective.ALL_GATHER and step.axis == TENSOR
            waiting += [step] if whole or step.beside or gathered or step.tensor in made else []
            continue
        if step.operators in names:
            repeated += [*waiting, step._replace(kind=TaskKind.RECOMPUTE)]
        waiting = []
    return BlockSteps(steps.forward, (*repeated, *steps.backward))


def block_memory(layout: BlockLayout, how: OfLayer) -> BlockMemory:
    """Return what one microbatch of a block holds on one rank."""
    block = layout.block
    again = set(recomputed_operators(block, how))
    saved = _saved(layout, block.operators)
    rest = tuple(operator for operator in block.operators if operator not in again)
    gone = {name for operator in again if operator.kind not in _HEAVY for name in operator.outputs}
    read = dict(_held(layout, o, name) for o in rest for name in o.saved if name not in gone)
    kept = read | _boundary(layout, block, again)
    total = sum((saved | kept).values())
    working = max(sum(_sizes(layout, operator).values()) for operator in block.operators)
    inputs, gradients = _deferred(layout)
    return BlockMemory(sum(kept.values()), total - sum(kept.values()), working, inputs + gradients, gradients)


def _deferred(layout: BlockLayout) -> tuple[int, int]:
    """Return what operators with weight gradients of their own keep for them: what they read, and of what gradients."""
    operators = [operator for operator in layout.block.operators if defers(operator)]
    outputs = dict(_held(layout, operator, name) for operator in operators for name in operator.outputs)
    return sum(_saved(layout, tuple(operators)).values()), sum(outputs.values())


def _saved(layout: BlockLayout, operators: tuple[Operator, ...]) -> dict[str, int]:
    """Return the bytes of every tensor that ``operators`` keep for backward."""
    return dict(_held(layout, operator, name) for operator in operators for name in operator.saved)


def _boundary(layout: BlockLayout, block: Block, again: set[Operator]) -> dict[str, int]:
    """Return what the recomputed operators read from outside: without it they cannot run again."""
    inside = {name for operator in again for name in operator.outputs}
    readers = [operator for operator in block.operators if operator in again]
    outside = ((operator, name) for operator in readers for name in operator.inputs if name not in inside)
    return dict(_held(layout, operator, name) for operator, name in outside)


def _held(layout: BlockLayout, operator: Operator, name: str) -> tuple[str, int]:
    """Return what an operator keeps of a tensor: a product in fp8 keeps its input as it was cast, in one byte.

    Another operator may keep the same tensor as it was. NVIDIA/TransformerEngine issue 1764: the fp8
    data is kept, or on Hopper its transpose.
    """
    size = _share(layout, operator, name)
    if not layout.quantises(operator):
        return name, size
    return f"{name} in fp8", size * ITEMSIZE["fp8"] // ITEMSIZE[layout.block.tensor[name].dtype]


def _sizes(layout: BlockLayout, operator: Operator) -> dict[str, int]:
    return {name: _share(layout, operator, name) for name in operator.inputs + operator.outputs}


def _share(layout: BlockLayout, operator: Operator, name: str) -> int:
    """Return the bytes of a tensor as kept: one gathered for a reader is kept as it was produced."""
    wanted = layout.tensor_bytes(name, layout.wanted(operator, name))
    if name not in layout.produced:
        return wanted
    return min(wanted, layout.tensor_bytes(name, layout.produced[name].complete))
