"""A space as a tree of decisions, which learning searches walk, and what is known of a layout without an evaluation.

The degrees are decided first, in any order, and then one group of fields per level, those that matter most for the
step time first. Partial plans that leave the same layouts open are one node, whatever the order of their decisions.
Fields in which the open layouts agree need no decision, so no branch leads to an illegal plan or a dead end.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from meshwise.simulator.brief import brief_repr, with_brief_repr
from meshwise.strategies.evaluation import CostModel
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import DECISIONS, DEGREES, Layout
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.space import Space, list_layouts

_LEADING_DEGREES = ("tensor", "pipeline", "data")
_DEGREES = (*_LEADING_DEGREES, *(name for name in DEGREES if name not in _LEADING_DEGREES))
"""Fields decided first, in any order."""

ORDERED_FIELDS = (
    ("microbatch",),
    ("schedule", "chunks", "stages"),
    ("recompute",),
    ("zero", "zero_shards", "reshard_after_forward"),
    ("sequence_parallel",),
)
"""Fields decided after the degrees, in this order, the fields of a row together; then every other field by itself."""


_PLACED_FIELDS = {name for names in (_DEGREES, *ORDERED_FIELDS) for name in names}

TREE_LEVELS = (*ORDERED_FIELDS, *((name,) for name in DECISIONS if name not in _PLACED_FIELDS))


@dataclass(eq=False, slots=True)
class PartialPlan:
    """A partial plan: a node of the tree, with the layouts that it leaves open.

    Parameters
    ----------
    layouts
        The open layouts, or families of layouts.
    are_families
        Whether ``layouts`` are families, which stand for all layouts of their degrees and microbatch.
    is_closed
        Whether no open layout is left to visit.
    """

    layouts: tuple[Layout, ...]
    are_families: bool
    is_closed: bool = False
    branches: "tuple[Branch, ...] | None" = None

    __repr__ = brief_repr()

    @property
    def layout(self) -> Layout | None:
        """The layout, where everything is decided; otherwise ``None``."""
        return self.layouts[0] if len(self.layouts) == 1 and not self.are_families else None


@with_brief_repr
class Branch(NamedTuple):
    """One decision: fields, their values, and the partial plan after it."""

    fields: tuple[str, ...]
    values: tuple[object, ...]
    child: PartialPlan


class DecisionTree:
    """The layouts of a space as a tree, whose nodes are made when they are visited."""

    def __init__(self, problem: Problem, space: Space) -> None:
        self.node_size = problem.cluster.first_node.devices
        self._members: dict[Layout, list[Layout]] = {}
        for layout in list_layouts(problem, space):
            self._members.setdefault(_find_family(layout), []).append(layout)
        self._partials: dict[tuple[bool, tuple[int, ...]], PartialPlan] = {}
        self._num_left = {family: len(members) for family, members in self._members.items()}
        self._visited: set[Layout] = set()
        self.root = self._find_partial(tuple(self._members), are_families=True)

    def list_by_habit(self) -> Iterator[Layout]:
        """Yield all layouts, roughly in the order of `meshwise.strategies.search.space.list_by_habit`.

        Families are sorted, not layouts, so that the first layouts come before most are sorted.
        """

        def key(family: Layout) -> tuple[bool, bool, int, int]:
            crosses_nodes = family.tensor * family.tensor_rows > self.node_size
            return family.microbatch != 1, crosses_nodes, family.tensor * family.pipeline, family.pipeline

        for family in sorted(self._members, key=key):
            yield from sorted(self._members[family], key=lambda layout: layout.schedule != "1f1b")

    def list_branches(self, partial: PartialPlan) -> tuple[Branch, ...]:
        """Return every next decision with something left to visit; none where all is decided or closed."""
        if partial.branches is None:
            candidates = () if partial.layout else self._list_decided(partial)
            # several decisions may lead to the same node: one branch each
            partial.branches = tuple({branch.child: branch for branch in candidates}.values())
        partial.branches = tuple(branch for branch in partial.branches if not self.is_closed(branch.child))
        return partial.branches

    def close_layout(self, layout: Layout) -> None:
        """Mark a layout as visited: it is left out from now on."""
        if layout not in self._visited:
            self._visited.add(layout)
            self._num_left[_find_family(layout)] -= 1

    def is_closed(self, partial: PartialPlan) -> bool:
        """Return whether no layout of a partial plan is left to visit."""
        if not partial.is_closed:
            if partial.are_families:
                partial.is_closed = not any(self._num_left[family] for family in partial.layouts)
            else:
                partial.is_closed = self._visited.issuperset(partial.layouts)
        return partial.is_closed

    def _list_decided(self, partial: PartialPlan) -> Iterator[Branch]:
        # families stand for their layouts until one is left, so that the top of the tree needs no lists of layouts
        if partial.are_families and len(partial.layouts) == 1:
            partial = self._find_partial(tuple(self._members[partial.layouts[0]]), are_families=False)

        def differ(names: tuple[str, ...]) -> bool:
            return len({_read_values(layout, names) for layout in partial.layouts}) > 1

        degrees = tuple((name,) for name in _DEGREES if differ((name,)))
        for names in degrees or (next(filter(differ, TREE_LEVELS)),):
            parts: dict[tuple[object, ...], list[Layout]] = {}
            for layout in partial.layouts:
                parts.setdefault(_read_values(layout, names), []).append(layout)
            for values, part in parts.items():
                yield Branch(names, values, self._find_partial(tuple(part), are_families=partial.are_families))

    def _find_partial(self, layouts: tuple[Layout, ...], *, are_families: bool) -> PartialPlan:
        if are_families and len(layouts) == 1 and len(members := self._members[layouts[0]]) == 1:
            layouts, are_families = tuple(members), False
        # ids hash faster than layouts, and the tree keeps its layouts alive
        key = are_families, tuple(map(id, layouts))
        return self._partials.setdefault(key, PartialPlan(layouts, are_families))


def _read_values(layout: Layout, names: tuple[str, ...]) -> tuple[object, ...]:
    return tuple(getattr(layout, name) for name in names)


def _find_family(layout: Layout) -> Layout:
    """Return the family of a layout in the tree: its degrees and microbatch, and defaults for the rest."""
    return Layout(**{name: getattr(layout, name) for name in (*_DEGREES, "microbatch")})


class Outlook(NamedTuple):
    """What is known of a layout without an evaluation.

    Parameters
    ----------
    bound
        A lower bound of the step time, in seconds; infinite where the layout does not fit.
    shortfall
        The fraction of its peak memory that the smallest device lacks: 0 where it fits, always below 1.
    """

    bound: float
    shortfall: float

    @property
    def fits(self) -> bool:
        """Whether the layout fits in memory."""
        return self.bound < inf


class Outlooks(dict[Layout, Outlook]):
    """The outlooks of layouts of a problem, each computed once."""

    def __init__(self, problem: Problem, costs: CostModel) -> None:
        super().__init__()
        self.problem, self.costs = problem, costs
        self.capacity = min(problem.usable_memory(accelerator) for accelerator in problem.cluster.accelerators)

    def __missing__(self, layout: Layout) -> Outlook:
        plan = complete(self.problem, layout)
        if self.costs.fits(plan):
            self[layout] = Outlook(self.costs.plan_bound(plan), 0.0)
        else:
            self[layout] = Outlook(inf, max(0.0, 1 - self.capacity / self.costs.peak_memory(plan)))
        return self[layout]
