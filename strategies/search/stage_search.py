"""The part that searches for the layers and the recomputation of every stage have in common."""

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
"""A layout and the seconds that a formula gives its step."""


def meshes(problem: Problem, space: Space) -> Iterator[Layout]:
    """Yield the layouts of the core of a space without recomputation, each once: each stands for all its divisions."""
    yield from dict.fromkeys(replace(layout, recompute=Recompute.NONE) for layout in listed(problem, core_of(space)))


def dividable(layout: Layout) -> bool:
    """Return whether critical paths and memory have closed forms for all divisions of a layout's layers."""
    return layout.schedule in WALKED and not layout.offload and isinstance(layout.microbatch, int)


def ways(space: Space) -> tuple[Recompute, ...]:
    """Return the ways in which a space allows a layer to be recomputed."""
    return tuple(way for way in WAYS if space.recompute is None or way in space.recompute)


def whole_layers(space: Space) -> bool:
    """Return whether a space allows layers that recompute nothing, so that the layers of a stage may differ."""
    return space.recompute is None or Recompute.NONE in space.recompute


def promising(problem: Problem, space: Space, costs: CostModel) -> Layout | None:
    """Return the layout with the lowest bound of those of ``space`` that fit; ``None`` where none fits."""
    least, found = inf, None
    for layout in listed(problem, core_of(space)):
        plan = complete(problem, layout)
        if costs.fits(plan) and (bound := costs.bound(plan)) < least:
            least, found = bound, layout
    return found


def divided(layout: Layout, counts: Sequence[int], hows: Sequence[OfStage]) -> Layout:
    """Return a layout with the given number of layers and the recompute choice of every stage."""
    how: Recomputation = hows[0] if len(set(hows)) == 1 else PerStage(tuple(hows))
    return replace(layout, stages=tuple(counts), recompute=how)


def recomputed(counts: IntArray, again: IntArray, allowed: Sequence[Recompute]) -> list[OfStage]:
    """Return the recompute choice of every stage.

    ``num_recomputed`` has the recomputed layers by way and stage. A plan has one way per stage: a stage of several
    recomputes all these layers in the last, which saves most memory.
    """
    result: list[OfStage] = []
    for stage, count in enumerate(counts):
        chosen = [way for way, of in zip(allowed, again, strict=True) if of[stage] > 0]
        layers = int(again[:, stage].sum())
        result.append(of_layers(chosen[-1] if chosen else Recompute.NONE, layers, int(count)))
    return result


def of_layers(way: Recompute, layers: int, count: int) -> OfStage:
    """Return the recompute choice of a stage of ``count`` layers that recomputes ``layers`` of them in one way."""
    if way is Recompute.NONE or not layers:
        return Recompute.NONE
    return way if layers >= count else FirstLayers(way, layers)


class StageTimes(NamedTuple):
    """By stage and number of layers: the ticks of a microbatch, and the recompute choice with which it fits."""

    times: FloatArray
    hows: list[dict[int, OfStage]]


def least_recompute(given: DivisionProblem, allowed: Sequence[Recompute], *, forgets: bool = False) -> StageTimes:
    """Return the times of stages that recompute no more than memory requires, for schedules with one stage per rank.

    Stages that cannot fit have infinite time; ``ignores_memory`` takes memory to be unlimited.
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
    """Return the options of a stage of ``count`` layers: the ticks of a microbatch, and the recompute choice.

    One option without recomputation where that fits, otherwise one per way of recomputation that fits.
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
    """Return how many layers of a stage must be recomputed in one way; more than ``count`` where all are too few.

    ``choice_index`` ``None`` is no recomputation: the result is then 0 where the stage fits.
    """
    # a stage has several moments of many live microbatches: the one that needs most decides
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
    """Yield the most promising uniform plan of ``space``, then ``choices`` results that fit at most, by rising time."""
    first = promising(problem, space, costs)
    if first is not None:
        yield complete(problem, first)
    found: list[Found] = []
    for each in meshes:
        costs.check_time()  # tables of meshes look at no plan, and would not notice that time is up
        found += [] if each is None else [each]
    tried = 0
    for _, layout in sorted(found, key=lambda each: each[0]):
        plan = complete(problem, layout)
        if costs.fits(plan):
            yield plan
            tried += 1
        if tried == choices:
            break
