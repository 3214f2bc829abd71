"""MindSpore's double recursion over the levels of the machine and the operators at each."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from simulator.collective_kinds import Collective
from strategies.cost_model import CostModel
from strategies.floor import least_step_time
from strategies.lowering import StageCosts
from strategies.mesh import OPERATOR_AXES
from strategies.operators.complete import agreeing, all_kept, operator_plan
from strategies.operators.recursion import Level, recurse
from strategies.operators.rules import operator_violations
from strategies.problem import Problem
from strategies.search.driver import Proof, Proposals
from strategies.search.operators import arrangements, microbatches, variants
from strategies.search.space import Space

PROBE = float(2**26)
"""Bytes of the all-reduce by which the rate of a level is known."""
MOST_RANKS = 1024
"""Devices that the published recursion divides at most."""


@dataclass(frozen=True, slots=True)
class RecursiveProgramming:
    """A dim for every operator at every level of the machine, from what would have to be moved.

    What differs from the published form: a level has any number of ways and not only two, and its own bandwidth;
    the dims of a level are chosen together, exactly, instead of one after another; and where a plan does not fit,
    parameters are kept cut.

    Parameters
    ----------
    faithful
        As published. A mesh has three operator axes: beyond 8 devices the first level has more than two ways.
    """

    name: ClassVar[str] = "recursive_programming"

    faithful: bool = False

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the plan of every arrangement of the devices, of the largest microbatches of each that fit."""
        yield Proof(least_step_time(problem))
        measured = StageCosts(problem)
        ways = _bisected(problem) if self.faithful else arrangements(problem, space)
        for degrees in ways:
            for microbatch in microbatches(problem, space, degrees):
                plan = operator_plan(problem, dict(degrees), microbatch)
                groups = measured.machine(plan).rank(0).groups
                levels = [
                    Level(axis, n, groups[axis].ticks(Collective.ALL_REDUCE, PROBE) / PROBE)
                    for axis, n in degrees
                    if n > 1
                ]
                count = plan.num_microbatches
                found = recurse(problem.graph, levels, microbatch, count, faithful=self.faithful)
                chosen = agreeing(problem, operator_plan(problem, dict(degrees), microbatch, found))
                if any(operator_violations(problem, chosen)):
                    continue
                fits = False
                for plan in (chosen,) if self.faithful else (chosen, all_kept(problem, chosen)):
                    for variant in () if fits else variants(problem, plan, space):
                        fits = (yield variant).fits or fits
                if fits:
                    break
        return None


def _bisected(problem: Problem) -> Iterator[tuple[tuple[str, int], ...]]:
    """Yield the one arrangement of the published recursion: halves of halves."""
    devices = len(problem.cluster.free_devices)
    if devices & (devices - 1) or devices > MOST_RANKS:
        raise ValueError(
            f"recursive_programming: faithful divides a power of two of at most {MOST_RANKS} devices, met {devices}"
        )
    levels = min(devices.bit_length() - 1, len(OPERATOR_AXES)) or 1
    inner = [2] * (levels - 1)
    yield tuple(zip(OPERATOR_AXES[-levels:], (devices >> (levels - 1), *inner), strict=True))
