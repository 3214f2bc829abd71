"""The choices of all operators on a mesh, and their costs for one microbatch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from meshwise.simulator.brief import brief_repr
from meshwise.simulator.deadline import check_deadline
from meshwise.simulator.memo import HashedTuple
from meshwise.simulator.operator_graph import Block, Operator
from meshwise.strategies.operators.choices import list_choices
from meshwise.strategies.operators.pass_costs import EdgeCosts, NodeCosts, OperatorPasses, Redistributions, Setting
from meshwise.strategies.plan.mesh import OPERATOR_AXES
from meshwise.strategies.plan.sharding import OperatorSharding

ChoiceFilter = Callable[[str, tuple[OperatorSharding, ...]], tuple[OperatorSharding, ...]]
"""Returns those of an operator's legal shardings that may be chosen; the name is that of ``Node.name``."""


class Node(NamedTuple):
    """An operator of one occurrence of a block."""

    occurrence: str
    block: Block
    operator: Operator

    @property
    def name(self) -> str:
        """The name by which a plan names this occurrence of the operator alone."""
        return f"{self.occurrence}.{self.operator.name}"


@dataclass(frozen=True, eq=False)
class PassTable:
    """The choices of all operators on a mesh, and their costs for one microbatch, which no degree outside changes.

    ``starts`` has for every occurrence of a block the number of its first node, and at the end that of all nodes.
    """

    setting: Setting
    nodes: tuple[Node, ...]
    choices: tuple[tuple[OperatorSharding, ...], ...]
    passes: tuple[OperatorPasses, ...]
    starts: tuple[int, ...]

    __repr__ = brief_repr()

    @cached_property
    def redistributions(self) -> tuple[Redistributions, ...]:
        """The redistributions between nodes, which take as long to price as all nodes."""
        return tuple(EdgeCosts(self.setting).list_redistributions(self.choices))

    @cached_property
    def least_forward_ticks(self) -> tuple[int, ...]:
        """For every occurrence of a block, the least ticks of its forward alone."""
        return self._sum_blocks([int(operator_passes.forward_kernels.min()) for operator_passes in self.passes])

    @cached_property
    def classes(self) -> tuple[int, ...]:
        """For every node a number, equal for copies of an operator that have the same choices."""
        numbers: dict[tuple[str, str, tuple[OperatorSharding, ...]], int] = {}
        keys = (
            (node.block.name, node.operator.name, options)
            for node, options in zip(self.nodes, self.choices, strict=True)
        )
        return tuple(numbers.setdefault(key, len(numbers)) for key in keys)

    @property
    def num_bytes(self) -> int:
        """Bytes of the table once its redistributions are priced, about: two numbers for every pair of choices."""
        sizes = [len(options) for options in self.choices]
        return 16 * sum(size * (size + 8) for size in sizes)

    @cached_property
    def least_kernel_ticks(self) -> tuple[int, ...]:
        """For every occurrence of a block, the least ticks in which a device computes a microbatch of it."""
        return self._sum_blocks([int(operator_passes.kernels.min()) for operator_passes in self.passes])

    def _sum_blocks(self, ticks: list[int]) -> tuple[int, ...]:
        totals = [0, *accumulate(ticks)]
        return tuple(totals[end] - totals[first] for first, end in zip(self.starts[:-1], self.starts[1:], strict=True))

    @cached_property
    def redistributions_by_target(self) -> tuple[tuple[Redistributions, ...], ...]:
        """For every node the redistributions of what it reads."""
        result: list[list[Redistributions]] = [[] for _ in self.nodes]
        for moves in self.redistributions:
            result[moves.target].append(moves)
        return tuple(map(tuple, result))


def compute_pass_table(setting: Setting, choice_filter: ChoiceFilter | None = None) -> PassTable:
    """Return the choices of all operators on the operator axes of a plan, and their costs for one microbatch.

    ``choice_filter`` says which legal shardings may be chosen, by default all.
    """
    plan, occurrences = setting.plan, setting.problem.graph.occurrences
    nodes = tuple(Node(name, block, operator) for name, block in occurrences for operator in block.operators)
    degrees = {axis: plan.mesh.size(axis) for axis in OPERATOR_AXES}
    legal_choices: dict[tuple[str, str], tuple[OperatorSharding, ...]] = {}  # copies of a block share theirs
    options: list[tuple[OperatorSharding, ...]] = []
    for node in nodes:
        check_deadline()
        key = (node.block.name, node.operator.name)
        if key not in legal_choices:
            # kept with its hash, for it is the key of many nodes
            legal_choices[key] = HashedTuple(
                list_choices(node.block.name, node.block, node.operator, degrees, plan.sequences)
            )
        shardings = legal_choices[key]
        options.append(shardings if choice_filter is None else choice_filter(node.name, shardings))
    choices, node_costs = tuple(options), NodeCosts(setting)
    passes = [
        node_costs.compute_passes(node.block.name, node.operator.name, shardings)
        for node, shardings in zip(nodes, choices, strict=True)
    ]
    for number, ticks in EdgeCosts(setting).count_first_reads(choices).items():
        passes[number] = passes[number]._replace(passes=passes[number].passes + ticks)
    starts = (0, *accumulate(len(block.operators) for _, block in occurrences))
    return PassTable(setting, nodes, choices, tuple(passes), starts)
