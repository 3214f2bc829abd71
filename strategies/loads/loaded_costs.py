"""The step time of a plan under loads that vary: one simulation for every draw that differs from others.

The step of a draw waits for the slowest data rank. What that costs is told at the median draw and at the quantile: its
step time less the mean of those in which every data rank had the work of one of them. What popular experts and slow
devices cost is its step time less that with even experts, or without slow devices.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import ceil, floor
from typing import NamedTuple

import numpy as np

from meshwise.simulator.memo import memoise
from meshwise.simulator.models.model import Model
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.loads.assignment import assign_sequences, list_cell_starts
from meshwise.strategies.loads.lengths import FloatArray, count_pairs
from meshwise.strategies.loads.levels import (
    Level,
    build_level_problem,
    choose_grid,
    choose_quantiles,
    find_attention_share,
    find_nearest,
    has_lengths,
)
from meshwise.strategies.loads.loaded_step import DEVICES, EXPERTS, LENGTHS, LoadedStep
from meshwise.strategies.loads.loads import Draw, Loads, draw_steps
from meshwise.strategies.loads.mixture import Mixture
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.mesh import CONTEXT, TENSOR, TENSOR_ROWS
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem

MOST_EVENTS = 20_000
"""Tasks of a step up to which draws are simulated by discrete events. Longer steps are longest paths, in which links
are not shared, times what sharing them costs a step of full sequences."""

TOKEN_UNIT = 256
"""Most tokens of which typical sequences are a multiple."""


class _Step(NamedTuple):
    """What tells the step time of a plan: loads by [data rank, microbatch], load of experts, and slow devices.

    A load is the index of a level, or lies between those of two.
    """

    loads: tuple[tuple[float, ...], ...]
    imbalance: float | None
    slowdowns: tuple[tuple[int, float], ...]


class LoadedCosts:
    """The cost model of one problem under loads that vary; all plans have the same draws.

    Parameters
    ----------
    spec
        The model that the problem's graph is built from.

    Raises
    ------
    ValueError
        Where lengths vary and samples of the model are no sequences of any length.
    """

    def __init__(self, problem: Problem, spec: Model, loads: Loads) -> None:
        if loads.lengths is not None and not has_lengths(spec):
            raise ValueError(f"lengths need a model of sequences of any length, met {spec.name}")
        self.problem, self.spec, self.loads = problem, spec, loads
        training, window = problem.training, getattr(spec, "window", None)
        self.draws = draw_steps(loads, training.global_batch, training.sequence, problem.cluster.num_devices, window)
        self.full_costs = SimulatedCost(problem)
        self._full_pairs = float(count_pairs(np.array([training.sequence]), window)[0])
        self._attention_share = find_attention_share(problem.graph)
        sequence_draws = [self._measure_sequences(draw) for draw in self.draws if draw.sequences is not None]
        self.grid = choose_grid(np.concatenate(sequence_draws)) if sequence_draws else np.array([training.sequence])
        # with lengths that vary too, each load of experts needs programs of all lengths
        imbalances = [draw.imbalance for draw in self.draws if draw.imbalance is not None and sequence_draws]
        self._imbalances = choose_quantiles(np.array(imbalances)) if imbalances else None

    def _measure_sequences(self, draw: Draw) -> FloatArray:
        """Return what makes the sequences of a draw differ: their tokens, or the density of packed ones."""
        sequence, sequences = self.problem.training.sequence, draw.sequences
        assert sequences is not None
        if self.loads.packing == "pack":
            # a token of padding attends to itself
            return (sequences.pairs + (sequence - sequences.tokens)) / self._full_pairs
        if self.loads.packing == "fixed":
            return np.full(len(sequences.tokens), float(sequence))
        return sequences.tokens.astype(np.float64)

    def _find_works(self, values: FloatArray) -> FloatArray:
        """Return the FLOP of sequences over those of a full one, by what makes them differ."""
        if self.loads.packing == "pack":
            return 1 + self._attention_share * (values - 1)
        tokens = values / self.problem.training.sequence
        return (1 - self._attention_share) * tokens + self._attention_share * tokens**2

    @memoise
    def list_level_costs(self, level: Level, slowdowns: tuple[tuple[int, float], ...]) -> StageCosts:
        """Return the costs of the stages of all plans at a level, on a machine with some devices slowed."""
        problem = self.problem
        if slowdowns:
            speeds = dict(problem.cluster.speeds)
            speeds |= {device: speeds.get(device, 1.0) / factor for device, factor in slowdowns}
            problem = replace(problem, cluster=replace(problem.cluster, speeds=tuple(speeds.items())))
        return StageCosts(build_level_problem(problem, self.spec, level))

    def build_typical_problem(self) -> Problem:
        """Return the problem whose sequences all have the mean load; the problem itself where lengths do not vary.

        Tokens are rounded up to a multiple of the power of two in the sequence, so that the same degrees divide them.
        """
        sequence = self.problem.training.sequence
        values = [self._measure_sequences(draw) for draw in self.draws if draw.sequences is not None]
        if not values:
            return self.problem
        mean = float(np.mean(np.concatenate(values)))
        if self.loads.packing == "pack":
            return build_level_problem(self.problem, self.spec, Level(sequence, mean))
        unit = min(sequence & -sequence, TOKEN_UNIT)
        return build_level_problem(self.problem, self.spec, Level(min(ceil(mean / unit) * unit, sequence)))

    def can_weigh(self, plan: Plan) -> bool:
        """Return whether each step of a plan ends by itself, or lengths do not vary."""
        return self.loads.lengths is None or not plan.asynchronous

    def weigh(self, plan: Plan, num_draws: int | None = None) -> LoadedStep:
        """Return the step times of a plan under the drawn loads, or under the first ``num_draws`` of them.

        Raises
        ------
        ValueError
            Where lengths vary and the plan's schedule has no flush.
        """
        if not self.can_weigh(plan):
            raise ValueError(f"lengths that vary need a schedule with a flush, met {plan.schedule}")
        return _PlanSteps(self, plan, self.draws[:num_draws]).weigh()

    def list_levels(self, plan: Plan) -> tuple[Level, ...]:
        """Return the levels of a plan, rising: lengths are padded to what ranks that share sequences divide."""
        sequence = self.problem.training.sequence
        if self.loads.packing == "pack" and self.loads.lengths is not None:
            return tuple(Level(sequence, density) for density in self.grid.tolist())
        tokens = dict.fromkeys(_pad_tokens(self.grid, plan, sequence).tolist())
        return tuple(Level(round(count)) for count in tokens)

    def build_step(self, plan: Plan, draw: Draw) -> _Step:
        """Return what tells the step time of a plan for a draw."""
        sizes = self.list_sizes(plan)
        cells = np.zeros((plan.num_microbatches, len(sizes)))
        if draw.sequences is not None:
            cells = self._place_cells(plan, draw).reshape(cells.shape)
        imbalance = None
        if draw.imbalance is not None:
            imbalance = draw.imbalance if self._imbalances is None else find_nearest(self._imbalances, draw.imbalance)
        return _Step(tuple(map(tuple, cells.T.tolist())), imbalance, draw.slowdowns)

    def _place_cells(self, plan: Plan, draw: Draw) -> FloatArray:
        """Return the load of every microbatch of every data rank, as the index of a level or between those of two."""
        values, levels = self._measure_cells(plan, draw), self.list_levels(plan)
        knots = [level.density if self.loads.packing == "pack" else level.tokens for level in levels]
        if self.loads.packing != "pack":
            values = _pad_tokens(values, plan, self.problem.training.sequence)
        # rounded, so that equal loads are equal
        return np.interp(values, knots, np.arange(len(knots))).round(6)

    def _measure_cells(self, plan: Plan, draw: Draw) -> FloatArray:
        """Return the load of every microbatch of every data rank: the longest length, or the mean density."""
        values, sizes, is_padded = self._measure_sequences(draw), self.list_sizes(plan), self.loads.packing != "pack"
        works = self._find_works(values)
        order = assign_sequences(works, sizes, plan.num_microbatches, self.loads.order, is_padded=is_padded)
        starts = list_cell_starts(sizes, plan.num_microbatches)
        if is_padded:
            longest: FloatArray = np.maximum.reduceat(values[order], starts)
            return longest
        mean: FloatArray = np.add.reduceat(values[order], starts) / np.tile(sizes, plan.num_microbatches)
        return mean

    def list_sizes(self, plan: Plan) -> list[int]:
        """Return the sequences of a microbatch of each data rank."""
        if not isinstance(plan.microbatch, int):
            return list(plan.microbatch)
        num_ranks = self.problem.training.global_batch // (plan.microbatch * plan.num_microbatches)
        return [plan.microbatch] * num_ranks

    def count_padding(self, plan: Plan) -> tuple[float | None, float]:
        """Return the share of computed tokens that belong to no sample, and the mean tokens of samples of a step.

        Lengths count as they are drawn, not as the nearest level.
        """
        training = self.problem.training
        draws = [draw for draw in self.draws if draw.sequences is not None]
        if not draws:
            return None, float(training.global_batch * training.sequence)
        own_tokens = sum(float(draw.sequences.tokens.sum()) for draw in draws if draw.sequences is not None)
        computed_tokens = float(len(draws) * training.global_batch * training.sequence)
        if self.loads.packing == "none":
            counts = np.tile(self.list_sizes(plan), plan.num_microbatches)
            computed_tokens = sum(float(self._measure_cells(plan, draw) @ counts) for draw in draws)
        return 1 - own_tokens / computed_tokens, own_tokens / len(draws)


def _pad_tokens(tokens: FloatArray, plan: Plan, sequence: int) -> FloatArray:
    """Return lengths rounded up to a multiple of the ranks that share a sequence, at most that of a full one."""
    unit = plan.mesh.size(CONTEXT) * plan.mesh.size(TENSOR) * plan.mesh.size(TENSOR_ROWS)
    padded: FloatArray = np.minimum(np.ceil(np.rint(tokens) / unit) * unit, sequence)
    return padded


class _PlanSteps:
    """The steps of one plan under drawn loads, each simulated once."""

    def __init__(self, costs: LoadedCosts, plan: Plan, draws: Sequence[Draw]) -> None:
        self.costs, self.plan, self.levels = costs, plan, costs.list_levels(plan)
        self.steps = [costs.build_step(plan, draw) for draw in draws]

    def weigh(self) -> LoadedStep:
        """Return the step times of all draws, and what the median one waits for."""
        times = tuple(map(self.time_step, self.steps))
        lengths = self.costs.loads.lengths
        padding, num_tokens = self.costs.count_padding(self.plan)
        order, num_faster = np.argsort(times, kind="stable"), [0.5, self.costs.loads.quantile]
        median_place, high_place = (int(order[ceil(share * len(times)) - 1]) for share in num_faster)
        return LoadedStep(
            quantile=self.costs.loads.quantile,
            step_times=times,
            num_simulated=len(set(self.steps)),
            waiting=self._list_waiting(median_place),
            high_waiting=self._list_waiting(high_place),
            padding=padding,
            cut=0.0 if lengths is None else lengths.find_share_above(self.costs.problem.training.sequence),
            tokens_per_second=num_tokens * len(times) / sum(times),
            peak_memory=self._find_peak_memory(),
            engine=self.engine,
        )

    @cached_property
    def engine(self) -> str:
        """What simulates the draws, the same for all."""
        first = next((step for step in self.steps if _is_apart(step)), self.steps[0])
        mixture = self._build_mixture(first.imbalance, first.slowdowns, _is_apart(first))
        return "discrete_event" if mixture.programs[-1].num_tasks <= MOST_EVENTS else "longest_path"

    def _find_peak_memory(self) -> float:
        largest = max(load for step in self.steps for row in step.loads for load in row)
        level = self.levels[ceil(largest)]
        if self.costs.loads.packing != "pack":
            counts = [level.tokens for level in self.levels]
            tokens = np.array([np.interp(largest, range(len(counts)), counts)])
            level = Level(round(_pad_tokens(tokens, self.plan, self.costs.problem.training.sequence).item()))
        return SimulatedCost(build_level_problem(self.costs.problem, self.costs.spec, level)).peak_memory(self.plan)

    def _list_waiting(self, place: int) -> tuple[tuple[str, float], ...]:
        """Return what the step of a draw waits for, with the seconds."""
        step, time, waiting = self.steps[place], self.time_step(self.steps[place]), []
        if _is_apart(step) and isinstance(self.plan.microbatch, int):
            num_ranks = len(step.loads)
            alone_times = [self.time_step(step._replace(loads=(row,) * num_ranks)) for row in step.loads]
            waiting.append((LENGTHS, time - float(np.mean(alone_times))))
        if step.imbalance is not None:
            waiting.append((EXPERTS, time - self.time_step(step._replace(imbalance=1.0))))
        if step.slowdowns:
            waiting.append((DEVICES, time - self.time_step(step._replace(slowdowns=()))))
        return tuple(waiting)

    @memoise
    def time_step(self, step: _Step) -> float:
        """Return the step time in seconds of one draw."""
        loads = {load for row in step.loads for load in row}
        if loads == {self.full_load} and not (step.imbalance or step.slowdowns):
            return self.costs.full_costs.step_time(self.plan)
        mixture = self._build_mixture(step.imbalance, step.slowdowns, _is_apart(step))
        rows = np.array(step.loads if _is_apart(step) else step.loads[:1])
        places = np.interp(rows, self.used_levels, np.arange(len(self.used_levels)))
        seconds = mixture.time_step(places, self.engine)
        return seconds * self.sharing if self.engine == "longest_path" else seconds

    @cached_property
    def sharing(self) -> float:
        """The time of a step of full sequences with shared links over that without."""
        costs = self.costs.full_costs
        return costs.step_time(self.plan) / costs.longest_paths([self.plan])[0]

    @property
    def full_load(self) -> float | None:
        """The load of the problem itself; None where it is no level."""
        full_level = Level(self.costs.problem.training.sequence)
        return float(self.levels.index(full_level)) if full_level in self.levels else None

    @cached_property
    def used_levels(self) -> list[int]:
        """The levels of all draws, or next to their loads, rising."""
        loads = {load for step in self.steps for row in step.loads for load in row}
        return sorted({level for load in loads for level in (floor(load), ceil(load))})

    @memoise
    def _build_mixture(
        self, imbalance: float | None, slowdowns: tuple[tuple[int, float], ...], is_apart: bool
    ) -> Mixture:
        programs = []
        for level in self.used_levels:
            costs = self.costs.list_level_costs(self.levels[level]._replace(imbalance=imbalance), slowdowns)
            programs.append(lower(costs.problem, self.plan, costs=costs, apart=is_apart))
        return Mixture(programs, self.plan.mesh if is_apart else None)


def _is_apart(step: _Step) -> bool:
    """Return whether data ranks have other loads."""
    return len(set(step.loads)) > 1
