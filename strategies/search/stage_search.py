"""The part that searches for the layers and the recomputation of every stage have in common."""

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from math import ceil, inf
from typing import NamedTuple

import numpy as np

from meshwise.simulator.program import IntArray
from meshwise.strategies.bounds.path_times import WALKED_SCHEDULES
from meshwise.strategies.evaluation import CostModel, Evaluation
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import FirstLayers, PerStage, Recomputation, Recompute, StageRecompute
from meshwise.strategies.search.space import Space, list_layouts, to_core
from meshwise.strategies.stages.division import DivisionProblem, FloatArray

RECOMPUTE_CHOICES = (Recompute.SELECTIVE, Recompute.FULL)
"""The recompute choices of a layer, besides none."""

TimedLayout = tuple[float, Layout]
"""A layout and the seconds that a formula gives its step."""


def list_meshes(problem: Problem, space: Space) -> Iterator[Layout]:
    """Yield the layouts of the core of a space without recomputation, each once: each stands for all its divisions."""
    yield from dict.fromkeys(
        replace(layout, recompute=Recompute.NONE) for layout in list_layouts(problem, to_core(space))
    )


def is_dividable(layout: Layout) -> bool:
    """Return whether critical paths and memory have closed forms for all divisions of a layout's layers."""
    return layout.schedule in WALKED_SCHEDULES and not layout.offload and isinstance(layout.microbatch, int)


def list_flat_meshes(problem: Problem, space: Space) -> Iterator[tuple[Plan, Layout]]:
    """Yield the meshes whose schedules have one chunk per rank and closed forms, with their plans."""
    for layout in list_meshes(problem, space):
        if layout.chunks == 1 and is_dividable(layout):
            yield complete(problem, layout), layout


def list_recompute_choices(space: Space) -> tuple[Recompute, ...]:
    """Return the ways in which a space allows a layer to be recomputed."""
    return tuple(
        recompute_choice
        for recompute_choice in RECOMPUTE_CHOICES
        if space.recompute is None or recompute_choice in space.recompute
    )


def allows_whole_layers(space: Space) -> bool:
    """Return whether a space allows layers that recompute nothing, so that the layers of a stage may differ."""
    return space.recompute is None or Recompute.NONE in space.recompute


def find_promising(problem: Problem, space: Space, costs: CostModel) -> Layout | None:
    """Return the layout with the lowest bound of those of ``space`` that fit; ``None`` where none fits."""
    least_bound, best_layout = inf, None
    for layout in list_layouts(problem, to_core(space)):
        plan = complete(problem, layout)
        if costs.fits(plan) and (bound := costs.plan_bound(plan)) < least_bound:
            least_bound, best_layout = bound, layout
    return best_layout


def divide_layout(layout: Layout, counts: Sequence[int], recompute_choices: Sequence[StageRecompute]) -> Layout:
    """Return a layout with the given number of layers and the recompute choice of every stage."""
    recomputation: Recomputation = (
        recompute_choices[0] if len(set(recompute_choices)) == 1 else PerStage(tuple(recompute_choices))
    )
    return replace(layout, stages=tuple(counts), recompute=recomputation)


def list_stage_recomputes(
    counts: IntArray, num_recomputed: IntArray, allowed_choices: Sequence[Recompute]
) -> list[StageRecompute]:
    """Return the recompute choice of every stage.

    ``num_recomputed`` has the recomputed layers by way and stage. A plan has one way per stage: a stage of several
    recomputes all these layers in the last, which saves most memory.
    """
    result: list[StageRecompute] = []
    for stage, count in enumerate(counts):
        used_choices = [
            recompute_choice
            for recompute_choice, layer_counts in zip(allowed_choices, num_recomputed, strict=True)
            if layer_counts[stage] > 0
        ]
        layers = int(num_recomputed[:, stage].sum())
        result.append(recompute_layers(used_choices[-1] if used_choices else Recompute.NONE, layers, int(count)))
    return result


def recompute_layers(recompute_choice: Recompute, layers: int, count: int) -> StageRecompute:
    """Return the recompute choice of a stage of ``count`` layers that recomputes ``layers`` of them in one way."""
    if recompute_choice is Recompute.NONE or not layers:
        return Recompute.NONE
    return recompute_choice if layers >= count else FirstLayers(recompute_choice, layers)


class StageTimes(NamedTuple):
    """By stage and number of layers: the ticks of a microbatch, and the recompute choice with which it fits."""

    times: FloatArray
    recompute_choices: list[dict[int, StageRecompute]]


def find_least_recompute(
    stage_problem: DivisionProblem, allowed_choices: Sequence[Recompute], *, ignores_memory: bool = False
) -> StageTimes:
    """Return the times of stages that recompute no more than memory requires, for schedules with one stage per rank.

    Stages that cannot fit have infinite time; ``ignores_memory`` takes memory to be unlimited.
    """
    times = np.full((stage_problem.num_stages, stage_problem.max_layers + 1), inf)
    recompute_choices: list[dict[int, StageRecompute]] = [{} for _ in range(stage_problem.num_stages)]
    for stage in range(stage_problem.num_stages):
        for count in range(stage_problem.min_layers, stage_problem.max_layers + 1):
            options = list_stage_options(stage_problem, allowed_choices, stage, count, ignores_memory=ignores_memory)
            if options:
                times[stage, count], recompute_choices[stage][count] = min(options, key=lambda option: option[0])
    return StageTimes(times, recompute_choices)


def list_stage_options(
    stage_problem: DivisionProblem,
    allowed_choices: Sequence[Recompute],
    stage: int,
    count: int,
    *,
    ignores_memory: bool = False,
) -> list[tuple[float, StageRecompute]]:
    """Return the options of a stage of ``count`` layers: the ticks of a microbatch, and the recompute choice.

    One option without recomputation where that fits, otherwise one per way of recomputation that fits.
    """
    stage_passes = slice(2 * stage, 2 * stage + 2)
    plain_time = float(
        stage_problem.base_ticks[stage_passes].sum() + count * stage_problem.layer_ticks[stage_passes].sum()
    )
    if ignores_memory or _count_needed_layers(stage_problem, stage, count, None) == 0:
        return [(plain_time, Recompute.NONE)]
    needed_layers = [
        (choice_index, recompute_choice, _count_needed_layers(stage_problem, stage, count, choice_index))
        for choice_index, recompute_choice in enumerate(allowed_choices)
    ]
    return [
        (
            plain_time + layers * float(stage_problem.recompute_ticks[choice_index, stage]),
            recompute_layers(recompute_choice, layers, count),
        )
        for choice_index, recompute_choice, layers in needed_layers
        if layers <= count
    ]


def _count_needed_layers(stage_problem: DivisionProblem, stage: int, count: int, choice_index: int | None) -> int:
    """Return how many layers of a stage must be recomputed in one way; more than ``count`` where all are too few.

    ``choice_index`` ``None`` is no recomputation: the result is then 0 where the stage fits.
    """
    # a stage has several moments of many live microbatches: the one that needs most decides
    num_needed, moments = 0, stage_problem.moments[stage]
    for num_alive, room in zip(moments.num_alive[:, stage].tolist(), moments.free_bytes.tolist(), strict=True):
        device_memory = (
            num_alive * (stage_problem.base_kept_bytes[stage] + count * stage_problem.layer_kept_bytes[stage])
            + count * stage_problem.state_bytes[stage]
        )
        saved_bytes = 0.0 if choice_index is None else num_alive * stage_problem.saved_bytes[choice_index, stage]
        if device_memory > room:
            num_needed = max(num_needed, ceil((device_memory - room) / saved_bytes) if saved_bytes else count + 1)
    return num_needed


def propose_best(
    problem: Problem, space: Space, costs: CostModel, mesh_results: Iterable[TimedLayout | None], choices: int
) -> Generator[Plan, Evaluation, None]:
    """Yield the most promising uniform plan of ``space``, then ``choices`` results that fit at most, by rising time."""
    uniform_layout = find_promising(problem, space, costs)
    if uniform_layout is not None:
        yield complete(problem, uniform_layout)
    results: list[TimedLayout] = []
    for result in mesh_results:
        costs.check_time()  # tables of meshes look at no plan, and would not notice that time is up
        results += [] if result is None else [result]
    num_tried = 0
    for _, layout in sorted(results, key=lambda result: result[0]):
        plan = complete(problem, layout)
        if costs.fits(plan):
            yield plan
            num_tried += 1
        if num_tried == choices:
            break
