"""Recompute: what a block keeps from forward to backward, and what it computes again.

References
----------
Chen et al. 2016, "Training deep nets with sublinear memory cost" (full); Korthikanti et
al. 2022, "Reducing activation recomputation in large transformer models" (selective).
"""

from typing import NamedTuple

from simulator.operator_graph import Block, Operator
from simulator.program import TaskKind
from strategies.lowering.operator import BlockLayout, BlockSteps
from strategies.lowering.split import defers
from strategies.plan import Recompute
from strategies.schedule import ActionKind


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


def recomputed_operators(block: Block, how: Recompute) -> tuple[Operator, ...]:
    """Return the operators that backward runs again; only layers are recomputed."""
    if how is Recompute.NONE or not block.layer:
        return ()
    if how is Recompute.FULL:
        return block.operators
    return tuple(operator for operator in block.operators if operator.recompute_selectively)


def with_recompute(block: Block, steps: BlockSteps, how: Recompute) -> BlockSteps:
    """Return the steps with the recomputed part of forward put before backward."""
    again = {operator.name for operator in recomputed_operators(block, how)}
    if not again:
        return steps
    whole = len(again) == len(block.operators)
    repeated = tuple(
        step._replace(kind=TaskKind.RECOMPUTE) if not step.kind.communicates else step
        for step, after in zip(steps.forward, (*steps.forward[1:], None), strict=True)
        if step.operators in again
        or (whole and step.kind.communicates)
        or (step.beside and after is not None and after.operators in again)
    )
    return BlockSteps(steps.forward, repeated + steps.backward)


def block_memory(layout: BlockLayout, how: Recompute) -> BlockMemory:
    """Return what one microbatch of a block holds on one rank."""
    block = layout.block
    again = set(recomputed_operators(block, how))
    saved = _saved(layout, block.operators)
    rest = tuple(operator for operator in block.operators if operator not in again)
    kept = _saved(layout, rest) | _boundary(layout, block, again)
    total = sum((saved | kept).values())
    working = max(sum(_sizes(layout, operator).values()) for operator in block.operators)
    inputs, gradients = _deferred(layout)
    return BlockMemory(sum(kept.values()), total - sum(kept.values()), working, inputs + gradients, gradients)


def _deferred(layout: BlockLayout) -> tuple[int, int]:
    """Return what operators with weight gradients of their own keep for them: what they read, and of what gradients."""
    operators = [operator for operator in layout.block.operators if defers(operator)]
    outputs = {name: _share(layout, operator, name) for operator in operators for name in operator.outputs}
    return sum(_saved(layout, tuple(operators)).values()), sum(outputs.values())


def _saved(layout: BlockLayout, operators: tuple[Operator, ...]) -> dict[str, int]:
    """Return the bytes of every tensor that ``operators`` keep for backward."""
    return {name: _share(layout, operator, name) for operator in operators for name in operator.saved}


def _boundary(layout: BlockLayout, block: Block, again: set[Operator]) -> dict[str, int]:
    """Return what the recomputed operators read from outside: without it they cannot run again."""
    inside = {name for operator in again for name in operator.outputs}
    readers = [operator for operator in block.operators if operator in again]
    return {
        name: _share(layout, operator, name) for operator in readers for name in operator.inputs if name not in inside
    }


def _sizes(layout: BlockLayout, operator: Operator) -> dict[str, int]:
    return {name: _share(layout, operator, name) for name in operator.inputs + operator.outputs}


def _share(layout: BlockLayout, operator: Operator, name: str) -> int:
    """Return the bytes of a tensor as kept: one gathered for a reader is kept as it was produced."""
    wanted = layout.tensor_bytes(name, layout.wanted(operator, name))
    if name not in layout.produced:
        return wanted
    return min(wanted, layout.tensor_bytes(name, layout.produced[name].complete))
