"""Plans that share the work among devices of several kinds by their speed (Metis, USENIX ATC 2024).

References
----------
Um et al., "Metis: fast automatic distributed training on heterogeneous GPUs", USENIX ATC 2024; code: SamsungLabs/Metis
at 4b24046 (``search_space/plan.py``, ``model/load_balancer.py``).
"""

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from meshwise.strategies.evaluation import CostModel, Evaluation
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.mesh import normalise_microbatch
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import ACTIVATION, FirstLayers, Recomputation, Recompute, SomeOperators
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.schedules.schedule import find_rule
from meshwise.strategies.search.algorithms.auto import Auto
from meshwise.strategies.search.algorithms.best_first import BestFirstSearch
from meshwise.strategies.search.choices import find_family
from meshwise.strategies.search.proposals import OutOfTime, Proposals
from meshwise.strategies.search.space import Space
from meshwise.strategies.search.speed_division import (
    balance_samples,
    divide_by_speed,
    estimate_step_time,
    list_placements,
)
from meshwise.strategies.search.stage_search import list_meshes

SCHEDULES_TRIED = (("1f1b", 1), ("zb1p", 1), ("zbv", 2), ("interleaved", 2))
"""Schedules of a pipeline, and stages a rank; Metis has the first one."""

MOST_BOUNDED = 1000
"""Plans with balanced loads whose memory and bounds are looked at, those with the least time by the formula."""


@dataclass(frozen=True, slots=True)
class Metis:
    """Plans that share layers and samples by the speed of devices (Metis, USENIX ATC 2024), beside those of ``auto``.

    For every order of the kinds of devices along the pipeline, and every mesh, microbatches are divided among data
    ranks and layers among stages so that the slowest is as fast as it can be. What memory requires is computed again
    or sharded. The plans with the lowest bounds are simulated, and decisions of the best are changed one by one. Known
    plans come first, and ``auto`` last, whose proof holds for the uniform plans of the space; on a machine of one kind
    it is all there is.

    Parameters
    ----------
    choices
        The number of plans with balanced loads that are simulated, before changes of the best.
    """

    name: ClassVar[str] = "metis"

    choices: int = 32

    def __post_init__(self) -> None:
        if self.choices < 1:
            raise ValueError(f"metis: choices is at least 1, met {self.choices}; nearest: 1")

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield known plans, those with balanced loads, then those of ``auto``; return its proof."""
        if len(set(problem.cluster.device_kinds.tolist())) > 1:
            known_search = BestFirstSearch(problem, costs)
            yield from known_search.begin_with_known(space)
            search = BalancedSearch(problem, space, costs, known_search.incumbent.time)
            yield from search.run(_list_balanced(search), self.choices)
        return (yield from Auto().propose(problem, space, costs))


class BalancedSearch:
    """The search among plans with balanced loads; ``best_time`` drops those whose bounds are not below it."""

    def __init__(self, problem: Problem, space: Space, costs: CostModel, best_time: float) -> None:
        self.problem, self.space, self.costs = problem, space, costs
        self.best_time, self.best_layout = best_time, Layout()
        self.has_best = False

    def run(self, layouts: Iterable[Layout], choices: int) -> Generator[Plan, Evaluation, None]:
        """Yield the plans with the lowest bounds, then changes of the best of them while they make it faster.

        Layouts have no recomputation: each gets the least with which it fits.
        """
        bounds: dict[Layout, float] = {}
        # few of thousands are near the best by the formula, and each takes milliseconds to bound
        candidates = sorted(dict.fromkeys(layouts), key=self._estimate_time)
        for base_layout in candidates[:MOST_BOUNDED]:
            self.costs.check_time()
            layout = self._fit_memory(base_layout)
            if layout is not None and layout not in bounds:
                bounds[layout] = self.costs.plan_bound(complete(self.problem, layout))
        for layout in sorted(bounds, key=bounds.__getitem__)[:choices]:
            if bounds[layout] >= self.best_time:
                break
            yield from self._evaluate(layout)
        yield from self._improve_best()

    def limit_time(self, time: float) -> None:
        """Take a plan of another search, with its seconds of a step, for the best where it is faster."""
        if time < self.best_time:
            self.best_time, self.has_best = time, False

    def run_in_order(
        self, layouts: Iterable[Layout], choices: int, *, recomputes: bool = True
    ) -> Generator[Plan, Evaluation, None]:
        """Yield the first plans that fit and may be the best; with ``recomputes``, by computing again what they need.

        Where time is up before any is evaluated, it is the first one.
        """
        num_tried = 0
        for base_layout in layouts:
            try:
                layout = self._fit_memory(base_layout, recomputes)
            except OutOfTime:
                if num_tried:
                    raise
                layout, choices = base_layout, 1
            if layout is not None:
                yield from self._evaluate(layout)
                num_tried += 1
            if num_tried == choices:
                break

    def _improve_best(self) -> Generator[Plan, Evaluation, None]:
        """Yield changes of the best plan so far while they make it faster."""
        is_better = self.has_best
        while is_better:
            is_better = False
            for layout in self._list_changes(self.best_layout):
                plan = complete(self.problem, layout)
                if self.costs.fits(plan) and self.costs.plan_bound(plan) < self.best_time:
                    is_better = (yield from self._evaluate(layout)) or is_better

    def _estimate_time(self, layout: Layout) -> float:
        """Return the seconds of a step by Metis' formula."""
        positions = find_rule(layout.schedule).list_stage_ranks(layout.pipeline, layout.chunks)
        return estimate_step_time(self.problem, layout, positions if layout.pipeline > 1 else (0,))

    def _evaluate(self, layout: Layout) -> Generator[Plan, Evaluation, bool]:
        """Yield the plan of a layout; return whether it is the fastest so far."""
        evaluation = yield complete(self.problem, layout)
        is_faster = evaluation.fits and evaluation.step_time < self.best_time
        if is_faster:
            self.best_time, self.best_layout, self.has_best = evaluation.step_time, layout, True
        return is_faster

    def allows(self, layout: Layout) -> bool:
        """Return whether a layout is legal, and keeps the limits that are not about stages and recomputation."""
        limits = self.space.with_limits(stages=None, recompute=None)
        return limits.allows(layout) and not any(violations(self.problem, layout))

    def list_schedules(self, layout: Layout) -> Iterator[Layout]:
        """Yield a layout with each schedule, with stages by speed, and with states of data ranks whole or shared."""
        num_microbatches = self.problem.training.global_batch // layout.sequences
        for schedule, chunks in SCHEDULES_TRIED if layout.pipeline > 1 else SCHEDULES_TRIED[:1]:
            rule = find_rule(schedule)
            if layout.pipeline > 1 and rule.find_violation(layout.pipeline, num_microbatches, chunks):
                continue
            stages: str | tuple[int, ...] = "even"
            if layout.pipeline > 1:
                positions = rule.list_stage_ranks(layout.pipeline, chunks)
                stages = divide_by_speed(self.problem, layout, positions)
            for zero in (1, 3) if layout.data > 1 else (0,):
                changes: dict[str, Any] = {"schedule": schedule, "chunks": chunks, "stages": stages, "zero": zero}
                candidate = replace(layout, overlap_tensor=layout.sequence_parallel, **changes)
                if self.allows(candidate):
                    yield candidate

    def _fit_memory(self, layout: Layout, recomputes: bool = True) -> Layout | None:
        """Return a layout with the least recomputation with which it fits and may be the best; ``None`` for none."""
        for recompute in self._list_recomputes(layout) if recomputes else (layout.recompute,):
            plan = complete(self.problem, replace(layout, recompute=recompute))
            if self.costs.plan_bound(plan) >= self.best_time:
                return None  # to compute more again takes no less time
            if self.costs.fits(plan):
                return replace(layout, recompute=recompute)
        return None

    def _list_recomputes(self, layout: Layout) -> Iterator[Recomputation]:
        """Yield ways to compute more and more again."""
        num_layers = sum(block.repeat for block in self.problem.graph.blocks if block.layer)
        most_layers = max(layout.stages) if isinstance(layout.stages, tuple) else num_layers
        activation = SomeOperators((ACTIVATION,))
        parts = (FirstLayers(Recompute.FULL, max(most_layers * part // 4, 1)) for part in (1, 2, 3))
        ways: tuple[Recomputation, ...] = (Recompute.NONE, activation, *parts, Recompute.FULL)
        for recompute in ways:
            if not any(violations(self.problem, replace(layout, recompute=recompute))):
                yield recompute

    def _list_changes(self, layout: Layout) -> Iterator[Layout]:
        """Yield a layout with one decision changed: of the step, a layer moved, or a sequence moved."""
        values: dict[str, tuple[Any, ...]] = {
            "zero": (0, 1, 2, 3) if layout.data > 1 else (0,),
            "reshard_after_forward": (True, False),
            "overlap_tensor": (True, False),
            "recompute": (Recompute.NONE, SomeOperators((ACTIVATION,))),
            "stages": tuple(_list_moves(layout.stages)) if isinstance(layout.stages, tuple) else (),
            "microbatch": tuple(_list_size_moves(layout)),
        }
        for name, options in values.items():
            for value in options:
                changed_layout = replace(layout, **{name: value})
                if value != getattr(layout, name) and self.allows(changed_layout):
                    yield changed_layout


def _list_balanced(search: BalancedSearch) -> Iterator[Layout]:
    """Yield layouts with balanced microbatches and stages, without recomputation."""
    problem = search.problem
    families = dict.fromkeys(map(find_family, list_meshes(problem, search.space)))
    for family in families:
        search.costs.check_time()
        for placement in list_placements(problem, family.pipeline):
            placed_layout = replace(family, placement=placement)
            microbatch = balance_samples(problem, placed_layout)
            for layout in dict.fromkeys((replace(placed_layout, microbatch=microbatch), placed_layout)):
                yield from search.list_schedules(layout)


def _list_moves(counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield counts with one unit moved from one place to another, at least one left everywhere.

    >>> list(_list_moves((2, 1)))
    [(1, 2)]
    """
    for source, target in ((one, other) for one in range(len(counts)) for other in range(len(counts)) if one != other):
        if counts[source] > 1:
            yield tuple(count + (place == target) - (place == source) for place, count in enumerate(counts))


def _list_size_moves(layout: Layout) -> Iterator[Any]:
    """Yield microbatches with a sequence more on all data ranks of one size, and fewer on those of another."""
    if isinstance(layout.microbatch, int):
        return
    sizes = sorted(set(layout.microbatch))
    for fewer, more in ((one, other) for one in sizes for other in sizes if one != other):
        num_fewer, num_more = layout.microbatch.count(fewer), layout.microbatch.count(more)
        if num_fewer == num_more and fewer > 1:
            yield normalise_microbatch([size + (size == more) - (size == fewer) for size in layout.microbatch])
