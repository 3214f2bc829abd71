"""A space as a tree of decisions, which learning searches walk, and what is known of a layout without an evaluation.

The degrees are decided first, in any order, and then one group of fields per level, those that matter most for the
step time first. Partial plans that leave the same layouts open are one node, whatever the order of their decisions.
Fields in which the open layouts agree need no decision, so no branch leads to an illegal plan or a dead end.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from meshwise.simulator.brief import brief, in_brief
from meshwise.strategies.cost_model import CostModel
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import DECISIONS, DEGREES, Layout
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.space import Space, listed

_FIRST = ("tensor", "pipeline", "data")
_DEGREES = (*_FIRST, *(name for name in DEGREES if name not in _FIRST))
"""Fields decided first, in any order."""

ORDERED = (
    ("microbatch",),
    ("schedule", "chunks", "stages"),
    ("recompute",),
    ("zero", "zero_shards", "reshard_after_forward"),
    ("sequence_parallel",),
)
"""Fields decided after the degrees, in this order, the fields of a row together; then every other field by itself."""


def _levels() -> tuple[tuple[str, ...], ...]:
    named = {name for names in (_DEGREES, *ORDERED) for name in names}
    return ORDERED + tuple((name,) for name in DECISIONS if name not in named)


LEVELS = _levels()


@dataclass(eq=False, slots=True)
class Partial:
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

    open: tuple[Layout, ...]
    families: bool
    closed: bool = False
    branches: "tuple[Branch, ...] | None" = None

    __repr__ = brief()

    @property
    def layout(self) -> Layout | None:
        """The layout, where everything is decided; otherwise ``None``."""
        return self.open[0] if len(self.open) == 1 and not self.families else None


@in_brief
class Branch(NamedTuple):
    """One decision: fields, their values, and the partial plan after it."""

    fields: tuple[str, ...]
    values: tuple[object, ...]
    after: Partial


class Decisions:
    """The layouts of a space as a tree, whose nodes are made when they are visited."""

    def __init__(self, problem: Problem, space: Space) -> None:
        self.node = problem.cluster.first.devices
        self._members: dict[Layout, list[Layout]] = {}
        for layout in listed(problem, space):
            self._members.setdefault(_family(layout), []).append(layout)
        self._partials: dict[tuple[bool, tuple[int, ...]], Partial] = {}
        self._left = {family: len(members) for family, members in self._members.items()}
        self._visited: set[Layout] = set()
        self.root = self._partial(tuple(self._members), families=True)

    def by_habit(self) -> Iterator[Layout]:
        """Yield all layouts, roughly in the order of `meshwise.strategies.search.space.by_habit`.

        Families are sorted, not layouts, so that the first layouts come before most are sorted.
        """

        def key(family: Layout) -> tuple[bool, bool, int, int]:
            across = family.tensor * family.tensor_rows > self.node
            return family.microbatch != 1, across, family.tensor * family.pipeline, family.pipeline

        for family in sorted(self._members, key=key):
            yield from sorted(self._members[family], key=lambda layout: layout.schedule != "1f1b")

    def branches(self, partial: Partial) -> tuple[Branch, ...]:
        """Return every next decision with something left to visit; none where all is decided or closed."""
        if partial.branches is None:
            every = () if partial.layout else self._decided(partial)
            # several decisions may lead to the same node: one branch each
            partial.branches = tuple({branch.after: branch for branch in every}.values())
        partial.branches = tuple(branch for branch in partial.branches if not self.closed(branch.after))
        return partial.branches

    def close(self, layout: Layout) -> None:
        """Mark a layout as visited: it is left out from now on."""
        if layout not in self._visited:
            self._visited.add(layout)
            self._left[_family(layout)] -= 1

    def closed(self, partial: Partial) -> bool:
        """Return whether no layout of a partial plan is left to visit."""
        if not partial.closed:
            if partial.families:
                partial.closed = not any(self._left[family] for family in partial.open)
            else:
                partial.closed = self._visited.issuperset(partial.open)
        return partial.closed

    def _decided(self, partial: Partial) -> Iterator[Branch]:
        # families stand for their layouts until one is left, so that the top of the tree needs no lists of layouts
        if partial.families and len(partial.open) == 1:
            partial = self._partial(tuple(self._members[partial.open[0]]), families=False)

        def differ(names: tuple[str, ...]) -> bool:
            return len({_values(each, names) for each in partial.open}) > 1

        degrees = tuple((name,) for name in _DEGREES if differ((name,)))
        for names in degrees or (next(filter(differ, LEVELS)),):
            parts: dict[tuple[object, ...], list[Layout]] = {}
            for each in partial.open:
                parts.setdefault(_values(each, names), []).append(each)
            for values, part in parts.items():
                yield Branch(names, values, self._partial(tuple(part), families=partial.families))

    def _partial(self, left: tuple[Layout, ...], *, families: bool) -> Partial:
        if families and len(left) == 1 and len(members := self._members[left[0]]) == 1:
            left, families = tuple(members), False
        # ids hash faster than layouts, and the tree keeps its layouts alive
        key = families, tuple(map(id, left))
        return self._partials.setdefault(key, Partial(left, families))


def _values(layout: Layout, names: tuple[str, ...]) -> tuple[object, ...]:
    return tuple(getattr(layout, name) for name in names)


def _family(layout: Layout) -> Layout:
    """Return the family of a layout in the tree: its degrees and microbatch, and defaults for the rest."""
    shared = {name: getattr(layout, name) for name in (*_DEGREES, "microbatch")}
    return replace(_NOTHING, **shared)


_NOTHING = Layout()


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
        self.capacity = min(problem.usable(each) for each in problem.cluster.accelerators)

    def __missing__(self, layout: Layout) -> Outlook:
        plan = complete(self.problem, layout)
        if self.costs.fits(plan):
            self[layout] = Outlook(self.costs.bound(plan), 0.0)
        else:
            self[layout] = Outlook(inf, max(0.0, 1 - self.capacity / self.costs.peak_memory(plan)))
        return self[layout]
