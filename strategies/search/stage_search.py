"""What searches have in common that choose the layers of every stage, and what each of them recomputes."""

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from math import ceil, inf
from typing import NamedTuple

import numpy as np

from meshwise.simulator.program import IntArray
from meshwise.strategies.bounds.path_times import WALKED
from meshwise.strategies.cost_model import CostModel
from meshwise.strategies.evaluation import Evaluation
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import FirstLayers, OfStage, PerStage, Recomputation, Recompute
from meshwise.strategies.search.space import Space, core_of, listed
from meshwise.strategies.stages.division import DivisionProblem, FloatArray
from meshwise.strategies.stages.tables import WAYS

Found = tuple[float, Layout]
"""Seconds that a formula gives a step, and the layout of which."""


def meshes(problem: Problem, space: Space) -> Iterator[Layout]:
    """Yield every layout once that differs in more than recomputation: it stands for all divisions.

    Of the core of the space.
    """
    yield from dict.fromkeys(replace(layout, recompute=Recompute.NONE) for layout in listed(problem, core_of(space)))


def dividable(layout: Layout) -> bool:
    """Return whether critical paths and what is kept on devices are known for all divisions of a layout's layers."""
    return layout.schedule in WALKED and not layout.offload and isinstance(layout.microbatch, int)


def ways(space: Space) -> tuple[Recompute, ...]:
    """Return how a space allows layers to be recomputed."""
    return tuple(way for way in WAYS if space.recompute is None or way in space.recompute)


def whole_layers(space: Space) -> bool:
    """Return whether a space allows layers that keep all, so that layers of a stage may differ."""
    return space.recompute is None or Recompute.NONE in space.recompute


def promising(problem: Problem, space: Space, costs: CostModel) -> Layout | None:
    """Return the layout of ``space`` that fits whose bound is least; ``None`` where none fits."""
    least, found = inf, None
    for layout in listed(problem, core_of(space)):
        plan = complete(problem, layout)
        if costs.fits(plan) and (bound := costs.bound(plan)) < least:
            least, found = bound, layout
    return found


def divided(layout: Layout, counts: Sequence[int], hows: Sequence[OfStage]) -> Layout:
    """Return a layout with so many layers in every stage, and what each of them recomputes."""
    how: Recomputation = hows[0] if len(set(hows)) == 1 else PerStage(tuple(hows))
    return replace(layout, stages=tuple(counts), recompute=how)


def recomputed(counts: IntArray, again: IntArray, allowed: Sequence[Recompute]) -> list[OfStage]:
    """Return what every stage recomputes: a stage that does so in several ways recomputes those layers in the last."""
    result: list[OfStage] = []
    for stage, count in enumerate(counts):
        chosen = [way for way, of in zip(allowed, again, strict=True) if of[stage] > 0]
        layers = int(again[:, stage].sum())
        result.append(of_layers(chosen[-1] if chosen else Recompute.NONE, layers, int(count)))
    return result


def of_layers(way: Recompute, layers: int, count: int) -> OfStage:
    """Return the recomputation of ``layers`` of the ``count`` layers of a stage in one way."""
    if way is Recompute.NONE or not layers:
        return Recompute.NONE
    return way if layers >= count else FirstLayers(way, layers)


class StageTimes(NamedTuple):
    """For every stage and number of layers the ticks of a microbatch, and the recomputation with which it fits."""

    times: FloatArray
    hows: list[dict[int, OfStage]]


def least_recompute(given: DivisionProblem, allowed: Sequence[Recompute], *, forgets: bool = False) -> StageTimes:
    """Return what stages take that recompute no more than they must, of a schedule with one stage a rank.

    Stages that cannot fit take for ever; ``forgets`` takes memory to have no end.
    """
    times = np.full((given.stages, given.most + 1), inf)
    hows: list[dict[int, OfStage]] = [{} for _ in range(given.stages)]
    for stage in range(given.stages):
        for count in range(given.fewest, given.most + 1):
            options = stage_options(given, allowed, stage, count, forgets=forgets)
            if options:
                times[stage, count], hows[stage][count] = min(options, key=lambda option: option[0])
    return StageTimes(times, hows)


def stage_options(
    given: DivisionProblem, allowed: Sequence[Recompute], stage: int, count: int, *, forgets: bool = False
) -> list[tuple[float, OfStage]]:
    """Return the ticks of a microbatch on a stage with so many layers.

    Without recomputation where that fits, else in every way that does.
    """
    own = slice(2 * stage, 2 * stage + 2)
    plain = float(given.base_ticks[own].sum() + count * given.layer[own].sum())
    if forgets or _needed(given, stage, count, None) == 0:
        return [(plain, Recompute.NONE)]
    needed = [(number, way, _needed(given, stage, count, number)) for number, way in enumerate(allowed)]
    return [
        (plain + layers * float(given.again[number, stage]), of_layers(way, layers, count))
        for number, way, layers in needed
        if layers <= count
    ]


def _needed(given: DivisionProblem, stage: int, count: int, way: int | None) -> int:
    """Return how many layers of a stage are recomputed in a way at least; more than it has where that is too few."""
    most, moments = 0, given.moments[stage]
    for alive, room in zip(moments.alive[:, stage].tolist(), moments.room.tolist(), strict=True):
        held = alive * (given.kept[stage] + count * given.kept_layer[stage]) + count * given.states[stage]
        saved = 0.0 if way is None else alive * given.saved[way, stage]
        if held > room:
            most = max(most, ceil((held - room) / saved) if saved else count + 1)
    return most


def best_of(
    problem: Problem, space: Space, costs: CostModel, meshes: Iterable[Found | None], choices: int
) -> Generator[Plan, Evaluation, None]:
    """Yield the most promising uniform plan of ``space``, and those found on meshes that fit, the least times first."""
    first = promising(problem, space, costs)
    if first is not None:
        yield complete(problem, first)
    found: list[Found] = []
    for each in meshes:
        costs.check_time()
        found += [] if each is None else [each]
    tried = 0
    for _, layout in sorted(found, key=lambda each: each[0]):
        plan = complete(problem, layout)
        if costs.fits(plan):
            yield plan
            tried += 1
        if tried == choices:
            break
