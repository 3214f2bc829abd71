"""What costs of operators are taken on: a mesh, a microbatch, and a rank of the machine."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from simulator.operator_graph import Block, Operator
from strategies.lowering.machine import Machine, Rank
from strategies.lowering.operator import BlockLayout, OperatorSteps, operator_steps
from strategies.lowering.stage import StageCosts
from strategies.plan import Plan
from strategies.problem import Problem
from strategies.sharding import OperatorSharding
from strategies.training import Training


@dataclass(frozen=True, eq=False)
class Setting:
    """A plan that cuts no operator, on a machine; ``costs`` are what the lowering of whole plans has measured there."""

    problem: Problem
    plan: Plan
    costs: StageCosts

    @property
    def training(self) -> Training:
        """The training of the problem."""
        return self.problem.training

    @cached_property
    def machine(self) -> Machine:
        """The devices with the groups of the plan's mesh."""
        return self.costs.machine(self.plan)

    @cached_property
    def rank(self) -> Rank:
        """A rank of the machine, which stands for all."""
        return self.machine.rank(0)

    def layout(self, block: Block, shardings: Mapping[str, OperatorSharding] | None = None) -> BlockLayout:
        """Return the layout of a block whose operators are cut so; whole where nothing is said."""
        training = self.training
        summed = training.gradient_bytes if training.conventions.fused_gradients else 0
        return BlockLayout(
            block,
            self.plan.mesh,
            shardings or {},
            self.plan.sequences,
            training.precision,
            gradient_bytes=summed,
            frozen=training.frozen,
        )

    def alone(self, block: Block, operator: Operator, sharding: OperatorSharding) -> BlockLayout:
        """Return the layout of an operator whose inputs come as it reads them."""
        alone = replace(
            block, operators=(operator,), inputs=operator.inputs, outputs=operator.outputs, repeat=1, layer=block.layer
        )
        return self.layout(alone, {f"{block.name}.{operator.name}": sharding})

    def steps(self, layout: BlockLayout) -> OperatorSteps:
        """Return the steps of the one operator of a layout."""
        return operator_steps(layout, self.rank.accelerator, self.rank.groups, layout.block.operators[0])
