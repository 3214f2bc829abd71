"""A genetic algorithm over vectors of decisions.

References
----------
.. [1] Goldberg, "Genetic algorithms in search, optimization, and machine learning", Addison-Wesley, 1989: a population,
   selection, crossover, mutation, generation by generation.
.. [2] Goldberg, Deb, "A comparative analysis of selection schemes used in genetic algorithms", FOGA 1, 1991:
   tournaments.
.. [3] Syswerda, "Uniform crossover in genetic algorithms", ICGA 1989.
.. [4] De Jong, "An analysis of the behavior of a class of genetic adaptive systems", University of Michigan, 1975: the
   best are kept unchanged (elitism).
.. [5] Kao et al., "DiGamma: domain-aware genetic algorithm for HW-mapping co-optimization for DNN accelerators", DATE
   2022 (arXiv 2201.11220): a genetic algorithm for mappings, with operators that know what their decisions mean.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from random import Random
from typing import Any, ClassVar, TypeVar

from meshwise.strategies.evaluation import CostModel
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.group import Group
from meshwise.strategies.plan.layout import DEGREES, Layout, Level, names_at
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.algorithms.random import draw_layouts
from meshwise.strategies.search.decisions import TREE_LEVELS
from meshwise.strategies.search.proposals import Proposals, Upcoming
from meshwise.strategies.search.space import Space, find_choices, neighbours

TRIES = 64
"""Children of a generation that are drawn in vain, known or too large for memory, before a random layout takes their
place."""

GENES = (*((name,) for name in DEGREES), *TREE_LEVELS)
"""Decisions that a child has from one parent together, such as a schedule with its chunks and stages."""

FAMILY_NAMES = names_at(Level.DEGREE, Level.FAMILY)
GROUP_NAMES = names_at(Level.SCHEDULE, Level.GROUP)
MEMBER_NAMES = names_at(Level.PASS, Level.STATE)
"""Decisions by the level at which a layout is repaired."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Genetic:
    """Crossover and mutation of the faster plans of a population (Goldberg 1989).

    An individual is a layout as a vector of decisions, and its fitness the step time. The first population is drawn
    uniformly from the plans that fit. For every child two parents are selected, each as the fastest of ``tournament``
    random individuals [2]_. With probability ``crossover`` the child has each decision from either parent [3]_, and is
    repaired to the nearest legal layout; otherwise it is the first parent. With probability ``mutation``, and where it
    is one of its parents, it is replaced by a uniformly drawn neighbour, which is one decision away
    (`meshwise.strategies.search.space.neighbours`). The ``elite`` fastest individuals and the children are the next
    population [4]_.

    A child that was evaluated before or does not fit is drawn again, without an evaluation. Where too many are, a
    random layout takes its place, so that in the end every plan that fits is evaluated once.

    Differences from [1]_: no individual is evaluated twice, and a mutation changes a decision to another legal value,
    with what depends on it, instead of flipping a bit.

    Parameters
    ----------
    population
        Individuals of a generation.
    crossover, mutation
        Probabilities for a child.
    """

    name: ClassVar[str] = "genetic"

    seed: int = 0
    population: int = 10
    tournament: int = 3
    elite: int = 3
    crossover: float = 0.9
    mutation: float = 0.3

    def __post_init__(self) -> None:
        if self.population < 2 or not 1 <= self.tournament <= self.population:
            raise ValueError(
                "genetic: population is at least 2 and tournament from 1 to population, "
                f"met {self.population} and {self.tournament}"
            )
        if not 0 <= self.elite < self.population:
            raise ValueError(f"genetic: elite is at least 0 and less than population, met {self.elite}")
        if not 0 <= self.crossover <= 1 or not 0 <= self.mutation <= 1:
            raise ValueError(
                f"genetic: crossover and mutation are from 0 to 1, met {self.crossover} and {self.mutation}"
            )

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the individuals of every generation that fit, none twice; prove nothing."""
        rng = Random(self.seed)
        repair = Repair(problem, space, rng)
        known_layouts: set[Layout] = set()

        def is_new(layout: Layout) -> bool:
            """Return whether a layout fits and is met for the first time."""
            if layout in known_layouts:
                return False
            known_layouts.add(layout)
            return costs.fits(complete(problem, layout))

        # a generator of its own: how many random layouts are needed does not change the rest of the search
        random_layouts = filter(is_new, draw_layouts(problem, space, Random(f"{self.seed} random")))
        times: dict[Layout, float] = {}
        population: list[Layout] = []
        children = list(islice(random_layouts, self.population))
        while children:
            yield Upcoming(tuple(complete(problem, layout) for layout in children))
            for layout in children:
                times[layout] = (yield complete(problem, layout)).step_time
            elite = sorted(population, key=times.__getitem__)[: self.elite]
            population = [*elite, *children]
            children = []
            for _ in range(self.population - self.elite):
                tries = (self._breed_child(problem, space, repair, population, times, rng) for _ in range(TRIES))
                children += islice(chain(filter(is_new, tries), random_layouts), 1)
        return None

    def _breed_child(
        self,
        problem: Problem,
        space: Space,
        repair: "Repair",
        population: Sequence[Layout],
        times: Mapping[Layout, float],
        rng: Random,
    ) -> Layout:
        """Return a legal layout of two selected parents."""
        first, second = (
            min(rng.sample(population, min(self.tournament, len(population))), key=times.__getitem__) for _ in range(2)
        )
        child = repair.find_layout(cross_layouts(first, second, rng)) if rng.random() < self.crossover else first
        if child in (first, second) or rng.random() < self.mutation:
            child = rng.choice(neighbours(problem, space, child) or (child,))
        return child


def cross_layouts(layout: Layout, other: Layout, rng: Random) -> dict[str, Any]:
    """Return decisions of which each is that of either layout, legal together or not."""
    return {name: getattr(parent, name) for gene in GENES for parent in [rng.choice((layout, other))] for name in gene}


class Repair:
    """The nearest legal layout of any decisions: as many as possible agree, those first that others depend on.

    Degrees, cuts and microbatch are taken first, then the schedule and what goes with it, last how passes run and where
    states are; among layouts as near one is drawn.
    """

    def __init__(self, problem: Problem, space: Space, rng: Random) -> None:
        choices = find_choices(problem, space)
        self._families = tuple(family for family in choices.families() if choices.count_layouts(family))
        self._rng = rng

        @lru_cache(maxsize=4096)
        def list_groups(family: Layout) -> tuple[Group, ...]:
            return tuple(choices.groups(family))

        @lru_cache(maxsize=4096)
        def list_members(group: Group) -> tuple[Layout, ...]:
            return tuple(group)

        self._list_groups, self._list_members = list_groups, list_members

    def find_layout(self, decisions: Mapping[str, Any]) -> Layout:
        """Return a legal layout that agrees with as many decisions as any, level by level."""
        family = self._draw_nearest(self._families, lambda family: count_differences(family, decisions, FAMILY_NAMES))
        groups = self._list_groups(family)
        group = self._draw_nearest(groups, lambda group: count_differences(group.layout, decisions, GROUP_NAMES))
        members = self._list_members(group)
        return self._draw_nearest(members, lambda layout: count_differences(layout, decisions, MEMBER_NAMES))

    def _draw_nearest(self, candidates: Sequence[T], find_distance: Callable[[T], int]) -> T:
        distances = [find_distance(candidate) for candidate in candidates]
        least = min(distances)
        return self._rng.choice(
            [item for item, distance in zip(candidates, distances, strict=True) if distance == least]
        )


def count_differences(layout: Layout, decisions: Mapping[str, Any], names: Sequence[str]) -> int:
    """Return how many of the named decisions a layout takes otherwise.

    >>> count_differences(Layout(data=2, tensor=4), {"data": 2, "tensor": 2, "pipeline": 2}, ("data", "tensor"))
    1
    """
    return sum(getattr(layout, name) != decisions[name] for name in names)
