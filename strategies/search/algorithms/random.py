"""Random search: the baseline that every other search must beat.

References
----------
.. [1] Bergstra, Bengio, "Random search for hyper-parameter optimization", JMLR 13, 2012.
.. [2] Durstenfeld, "Algorithm 235: random permutation", Communications of the ACM 7(7), 1964.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from random import Random
from typing import ClassVar

import numpy as np

from meshwise.strategies.evaluation import CostModel
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.group import Group
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.proposals import Proposals, propose_ahead
from meshwise.strategies.search.space import Space, find_choices


@dataclass(frozen=True, slots=True)
class RandomSearch:
    """Uniform draws from the plans that fit, none twice (Bergstra and Bengio, JMLR 2012)."""

    name: ClassVar[str] = "random"

    seed: int = 0

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the plans that fit in a random order; prove nothing."""
        plans = (complete(problem, layout) for layout in draw_layouts(problem, space, Random(self.seed)))
        yield from propose_ahead(plan for plan in plans if costs.fits(plan))
        return None


def draw_layouts(problem: Problem, space: Space, random: Random) -> Iterator[Layout]:
    """Yield the layouts of a space in a random order, each once, without listing them all."""
    choices = find_choices(problem, space)
    families = list(choices.families())
    starts = [0, *accumulate(map(choices.count_layouts, families))]

    @lru_cache(maxsize=4096)
    def list_groups(family: int) -> tuple[Group, ...]:
        return tuple(choices.groups(families[family]))

    # a number is a position among all layouts; only the groups of its family are made to find the layout
    for number in permute_range(starts[-1], random):
        family = bisect_right(starts, number) - 1
        offset = number - starts[family]
        for group in list_groups(family):
            if offset < group.num_members:
                row, column = np.argwhere(group.member_mask)[offset].tolist()
                yield group.build_layout(row, column)
                break
            offset -= group.num_members


def permute_range(size: int, random: Random) -> Iterator[int]:
    """Yield 0 to ``size`` - 1 in a random order (Durstenfeld 1964), keeping only the swapped numbers.

    >>> sorted(permute_range(5, Random(0)))
    [0, 1, 2, 3, 4]
    """
    swaps: dict[int, int] = {}
    for index in range(size - 1, -1, -1):
        target = random.randrange(index + 1)
        yield swaps.get(target, target)
        swaps[target] = swaps.pop(index, index)
