"""Algorithms that choose a sharding for every operator.

`Frontier` is exact, by dynamic programming over frontiers with a price of memory; `IntegerProgramming` is Alpa's
integer program. The others are MindSpore's: dynamic programming by eliminations, the double recursion over the levels
of the machine and the operators at each level, and sharding propagation from operators that the user has decided.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from meshwise.simulator.collective import Collective
from meshwise.simulator.operator_graph import BATCH
from meshwise.strategies.bounds.step_time import least_step_time
from meshwise.strategies.evaluation import CostModel
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.operators.choices import resolve_pins
from meshwise.strategies.operators.cost_graph import Shortfall, Solution
from meshwise.strategies.operators.costs import OperatorCosts
from meshwise.strategies.operators.elimination import eliminate
from meshwise.strategies.operators.frontier import frontier
from meshwise.strategies.operators.integer_programming import integer_programming
from meshwise.strategies.operators.operator_plan import (
    build_operator_plan,
    list_operator_violations,
    with_all_kept,
    with_tied_layouts,
)
from meshwise.strategies.operators.recursion import Level, propagate, recurse
from meshwise.strategies.plan.mesh import OPERATOR_AXES
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.operator_search import (
    list_arrangements,
    list_microbatches,
    list_variants,
    search_operators,
)
from meshwise.strategies.search.proposals import Proof, Proposals
from meshwise.strategies.search.space import Space


@dataclass(frozen=True, slots=True)
class Frontier:
    """A sharding for every operator, proven best of their sums within a gap.

    Parameters
    ----------
    gap
        Fraction by which the summed times of operators and redistributions may be above the least sum.
    """

    name: ClassVar[str] = "frontier"

    gap: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.gap < 1:
            raise ValueError(f"frontier: gap is at least 0 and less than 1, met {self.gap}")

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the best plan of every arrangement of the devices; it proves nothing of simulated times."""
        return search_operators(problem, space, costs, lambda table, limit: frontier(table.graph, limit, gap=self.gap))


@dataclass(frozen=True, slots=True)
class IntegerProgramming:
    """A sharding for every operator by Alpa's integer program, on HiGHS.

    Parameters
    ----------
    gap
        Fraction by which the summed times of operators and redistributions may be above the least sum.
    seconds
        Time of one integer program, after which its best solution so far is taken; ``None`` for no limit.
    tie
        Whether layers that are copies of one another are cut alike.
    """

    name: ClassVar[str] = "integer_programming"

    gap: float = 0.01
    seconds: float | None = None
    tie: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.gap < 1:
            raise ValueError(f"integer_programming: gap is at least 0 and less than 1, met {self.gap}")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"integer_programming: seconds are more than 0, met {self.seconds}")

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the best plan of every arrangement of the devices; it proves nothing of simulated times."""
        return search_operators(problem, space, costs, self._solve, choices_text="layers cut alike" if self.tie else "")

    def _solve(self, table: OperatorCosts, limit: int) -> Solution | Shortfall:
        return integer_programming(table.graph, limit, gap=self.gap, seconds=self.seconds, tie=self.tie)


@dataclass(frozen=True, slots=True)
class DynamicProgramming:
    """A sharding for every operator by eliminations of operators and edges.

    Parameters
    ----------
    faithful
        As published, with its defects.
    """

    name: ClassVar[str] = "dynamic_programming"

    faithful: bool = False

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the best plan of every arrangement of the devices; it proves nothing of simulated times."""
        return search_operators(
            problem, space, costs, lambda table, limit: eliminate(table.graph, limit, faithful=self.faithful)
        )


PROBE_BYTES = float(2**26)
"""Bytes of the all-reduce that measures the rate of a level."""
MAX_RANKS = 1024
"""Devices that the published recursion divides at most."""


@dataclass(frozen=True, slots=True)
class RecursiveProgramming:
    """A dim for every operator at every level of the machine, from what would have to be moved.

    Differences from the published form: a level divides into any number of parts instead of two, and has its own
    bandwidth; the dims of a level are chosen together, exactly, instead of one after another; and where a plan does
    not fit, parameters are kept cut.

    Parameters
    ----------
    faithful
        As published. A mesh has three operator axes: beyond 8 devices the first level divides into more than two.
    """

    name: ClassVar[str] = "recursive_programming"

    faithful: bool = False

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the plan of every arrangement of the devices, with the largest microbatches that fit."""
        yield Proof(least_step_time(problem))
        stage_costs = StageCosts(problem)
        device_arrangements = _bisect_devices(problem) if self.faithful else list_arrangements(problem, space)
        for degrees in device_arrangements:
            for microbatch in list_microbatches(problem, space, degrees):
                plan = build_operator_plan(problem, dict(degrees), microbatch)
                groups = stage_costs.machine(plan).rank(0).groups
                levels = [
                    Level(axis, n, groups[axis].ticks(Collective.ALL_REDUCE, PROBE_BYTES) / PROBE_BYTES)
                    for axis, n in degrees
                    if n > 1
                ]
                num_microbatches = plan.num_microbatches
                operator_shardings = recurse(
                    problem.graph, levels, microbatch, num_microbatches, faithful=self.faithful
                )
                chosen_plan = with_tied_layouts(
                    problem, build_operator_plan(problem, dict(degrees), microbatch, operator_shardings)
                )
                if any(list_operator_violations(problem, chosen_plan)):
                    continue
                fits = False
                for plan in (chosen_plan,) if self.faithful else (chosen_plan, with_all_kept(problem, chosen_plan)):
                    for variant in () if fits else list_variants(problem, plan, space):
                        fits = (yield variant).fits or fits
                if fits:
                    break
        return None


def _bisect_devices(problem: Problem) -> Iterator[tuple[tuple[str, int], ...]]:
    """Yield the one arrangement of the published recursion, which halves the devices again and again."""
    devices = len(problem.cluster.free_devices)
    if devices & (devices - 1) or devices > MAX_RANKS:
        raise ValueError(
            f"recursive_programming: faithful divides a power of two of at most {MAX_RANKS} devices, met {devices}"
        )
    levels = min(devices.bit_length() - 1, len(OPERATOR_AXES)) or 1
    inner_sizes = [2] * (levels - 1)
    yield tuple(zip(OPERATOR_AXES[-levels:], (devices >> (levels - 1), *inner_sizes), strict=True))


@dataclass(frozen=True, slots=True)
class ShardingPropagation:
    """Shardings that follow from those of the operators that the user has pinned.

    Difference from the published form: the other operators are chosen together, exactly and within memory, instead of
    one after another.

    Parameters
    ----------
    faithful
        As published: breadth first from the pinned operators, by the least redistribution. Where none is pinned, the
        first operator that can be cut along its batch is.
    """

    name: ClassVar[str] = "sharding_propagation"

    faithful: bool = False

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the plan of every arrangement of the devices on which the pins hold."""
        pinned_names = frozenset(resolve_pins(problem.graph, space.pin))
        return search_operators(problem, space, costs, partial(self._solve, pinned_names))

    def _solve(self, pinned_names: frozenset[str], table: OperatorCosts, limit: int) -> Solution | Shortfall:
        if not self.faithful:
            return frontier(table.graph, limit)
        names = (node.name for node in table.nodes)
        seeds = {number: 0 for number, name in enumerate(names) if name in pinned_names} or _find_first_batch(table)
        choice = propagate(table.graph, seeds)
        time, memory = table.graph.time(choice), table.graph.memory(choice)
        return Solution(choice, time, memory, 0) if memory <= limit else Shortfall(choice, memory, limit)


def _find_first_batch(table: OperatorCosts) -> dict[int, int]:
    """Return the first operator that all axes can cut along its batch, with that choice; empty where there is none."""
    axes = tuple(axis for axis, ranks in table.degrees.items() if ranks > 1)
    for number, shardings in enumerate(table.choices):
        for choice, sharding in enumerate(shardings):
            if sharding.cuts == ((BATCH, axes),):
                return {number: choice}
    return {}
