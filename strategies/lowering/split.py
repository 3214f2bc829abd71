"""Split backward: the gradients of inputs, for which another stage waits, apart from those of weights.

References
----------
Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, section 1 and figure 1.
"""

from collections.abc import Iterable
from typing import NamedTuple

from simulator.accelerator import Accelerator
from simulator.program import TaskKind
from simulator.units import to_ticks
from strategies.lowering.operator import BlockLayout
from strategies.lowering.redistribution import defers
from strategies.lowering.step import Step


class Split(NamedTuple):
    """A backward in two: the steps of the gradients of inputs, and of weights."""

    inputs: tuple[Step, ...]
    weights: tuple[Step, ...]


def split(layout: BlockLayout, accelerator: Accelerator, backward: Iterable[Step]) -> Split:
    """Return the steps of a backward in two; together they take the same ticks.

    Recomputation belongs to the gradients of inputs, and so do collectives that are not deferred. Either part of a
    block that has nothing to do in it is one step of no time.
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
    """Return the elements of a rank's parameters whose gradients are made with those of inputs: of norms."""
    block = layout.block
    later = {name for operator in block.operators if defers(operator) for name in operator.parameters}
    return sum(layout.parameter_share(tensor) for tensor in block.parameters if tensor.name not in later)
