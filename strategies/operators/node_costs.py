"""What a choice of an operator costs alone: its ticks, the bytes that it keeps and those it holds while it runs."""

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from simulator.accelerator import Accelerator
from simulator.collective_kinds import Collective
from simulator.deadline import check_deadline
from simulator.operator_graph import Block, Operator
from strategies.lowering.accumulation import with_accumulation
from strategies.lowering.clipping import SQUARES, norm_ticks
from strategies.lowering.gradient_storage import begin_in_step
from strategies.lowering.liveness import Liveness
from strategies.lowering.machine import Rank
from strategies.lowering.memory import resident
from strategies.lowering.operator import BlockLayout, BlockSteps
from strategies.lowering.optimizer import optimizer_ticks
from strategies.lowering.parameters import Parameters
from strategies.lowering.placed import NORM
from strategies.lowering.recompute import moments
from strategies.lowering.replicated import replicated_elements
from strategies.lowering.step import Step, chain_ticks
from strategies.lowering.weights import factored_elements, quantised_elements
from strategies.mesh import OPERATOR_AXES
from strategies.operators.cost_graph import IntArray
from strategies.operators.setting import Setting
from strategies.plan import Recompute
from strategies.sharding import OperatorSharding

Columns = tuple[IntArray, IntArray, IntArray]
"""Ticks, bytes kept and bytes held besides, of each choice."""


@dataclass(frozen=True, eq=False)
class NodeCosts:
    """The costs of choices of operators; those of an operator that occurs again are known."""

    setting: Setting
    _columns: dict[tuple[str, tuple[OperatorSharding, ...]], Columns] = field(default_factory=dict)

    def of(self, block: Block, operator: Operator, options: tuple[OperatorSharding, ...]) -> Columns:
        """Return the ticks, the bytes kept and the bytes held while it runs, of each choice of an operator."""
        key = (f"{block.name}.{operator.name}", options)
        if key not in self._columns:
            rows = [self._of_choice(block, operator, each) for each in options]
            ticks, kept, transient = np.array(rows, dtype=np.int64).T.copy()
            self._columns[key] = ticks, kept, transient
        return self._columns[key]

    def _of_choice(self, block: Block, operator: Operator, sharding: OperatorSharding) -> tuple[int, int, int]:
        check_deadline()
        layout = self.setting.alone(block, operator, sharding)
        steps = self.setting.steps(layout)
        backward = self._accumulated(layout, steps.backward)
        chain = (*steps.gathers, steps.forward, *steps.before, *backward, *steps.after)
        ticks = chain_ticks(chain) * self.setting.plan.num_microbatches + self._ending(layout)
        return ticks, *self._bytes(layout, block)

    def _accumulated(self, layout: BlockLayout, backward: Step) -> tuple[Step, ...]:
        """Return the backward of an operator, and the addition of its gradients where that is one of its own."""
        if not self.setting.costs.blocks.adds_gradients(self.setting.plan):
            return (backward,)
        accelerator, size = self.setting.rank.accelerator, self.setting.training.gradient_bytes
        return with_accumulation(layout, accelerator, BlockSteps((), (backward,)), size).backward

    def _held(self, layout: BlockLayout) -> Parameters:
        seconds = {second for _, second in self.setting.problem.graph.tied}
        once = [each for each in layout.block.parameters if (layout.block.name, each.name) not in seconds]
        return Parameters(
            sum(map(layout.parameter_share, once)),
            len(layout.block.parameters),
            factored_elements(layout, once),
            quantised_elements(layout),
        )

    def _ending(self, layout: BlockLayout) -> int:
        """Return the ticks of an operator's part of what ends a step: its gradients are summed, and its update."""
        ticks = self._update(self._held(layout)) - self._update(Parameters(0, 0))
        parts = replicated_elements(layout, self.setting.training.conventions)
        for axis, elements in zip(OPERATOR_AXES, parts, strict=True):
            if elements:
                ticks += round(elements * self.setting.training.gradient_bytes * self._rates[axis])
        return ticks

    def _update(self, held: Parameters) -> int:
        """Return the ticks in which a rank updates parameters, and reads their gradients where they are clipped."""
        step = self.setting.rank.accelerator, self.setting.training, self.setting.plan, held
        return optimizer_ticks(*step) + (norm_ticks(*step) if self.setting.training.gradient_clipping else 0)

    @cached_property
    def once(self) -> int:
        """Ticks of the end of a step that no choice changes."""
        machine = self.setting.machine
        norm = machine.communicator(NORM, 0).ticks(*SQUARES) if NORM in machine.table.tables else 0
        return self._update(Parameters(0, 0)) + norm

    @cached_property
    def _rates(self) -> dict[str, float]:
        """Ticks of a byte of gradients that ranks along each axis sum, at the rate of all parameters together."""
        size = float(self.setting.problem.graph.num_parameters * self.setting.training.gradient_bytes)
        groups = self.setting.rank.groups
        sums = ((axis, groups[axis].ticks(Collective.ALL_REDUCE, size)) for axis in OPERATOR_AXES if axis in groups)
        return {axis: ticks / size for axis, ticks in sums}

    def _bytes(self, layout: BlockLayout, block: Block) -> tuple[int, int]:
        """Return the bytes that an operator keeps, and those it holds besides while it runs."""
        training, plan = self.setting.training, self.setting.plan
        held, bare = self._held(layout), _bare(self.setting.rank)
        states = sum(change.size for change in resident(bare, training, plan, held, 0, 0))
        if begin_in_step(training, plan):
            states += held.elements * training.gradient_bytes  # all are there as the last microbatch begins
        live = Liveness(layout, training.conventions)
        found = moments(live, Recompute.NONE).memory()
        (operator,) = layout.block.operators
        first = [name for name in live.saved(operator) if _first_to_save(block, name) == operator.name]
        saved = sum(dict(live.kept(operator, name) for name in first).values())
        saved += sum(live.unnamed(operator).values())
        besides = found.kept - saved + max(found.forward, found.backward)
        return states + saved, besides + self._around(layout)

    def _around(self, layout: BlockLayout) -> int:
        """Return the bytes of what an operator reads and makes, which others hold for it or wait for."""
        (operator,) = layout.block.operators
        names = dict.fromkeys((*operator.inputs, *operator.outputs))
        return sum(layout.tensor_bytes(name, layout.produced[name].complete) for name in names)

    @property
    def resident(self) -> int:
        """Bytes on a device whatever is chosen: what the runtime reserves, and buffers."""
        (buffers,) = self.setting.costs.buffers(self.setting.plan)
        return int(self.setting.rank.accelerator.reserved) + buffers


def _first_to_save(block: Block, name: str) -> str:
    return next(operator.name for operator in block.operators if name in operator.saved)


def _bare(rank: Rank) -> Accelerator:
    """Return the accelerator of a rank without what its runtime reserves, which no choice changes."""
    return replace(rank.accelerator, reserved=0.0)
