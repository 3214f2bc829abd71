"""How many devices of which kind and region every pipeline stage gets (Sailor, SOSP 2025).

References
----------
Strati et al., "Sailor: automating distributed training over dynamic, heterogeneous, and geo-distributed clusters", SOSP
2025; code: eth-easl/sailor at cf2c8e3 (``sailor_planner/cpp_src/planner.cpp``).
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import permutations
from math import inf
from typing import ClassVar, NamedTuple

import numpy as np

from meshwise.strategies.bounds.memory import PlanMemory
from meshwise.strategies.evaluation import CostModel
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import ZERO_STAGES, Layout
from meshwise.strategies.plan.mesh import divisors
from meshwise.strategies.plan.partition import num_layers
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.search.algorithms.auto import Auto
from meshwise.strategies.search.algorithms.best_first import BestFirstSearch
from meshwise.strategies.search.algorithms.device_pools import PoolTimes, list_pools
from meshwise.strategies.search.algorithms.metis import BalancedSearch
from meshwise.strategies.search.proposals import OutOfTime, Proposals
from meshwise.strategies.search.space import Space
from meshwise.strategies.search.speed_division import balance_samples
from meshwise.strategies.stages.device_allocation import DevicePools, allocate_devices

MOST_POOLS = 6
"""Kinds of devices and regions together, at most."""

SLOWEST = 1.5
"""Degrees are left out whose time on the fastest devices and links is so many times that of the best."""

MOST_ALLOCATED = 100
"""Degrees, those with the least such times for which devices suffice, whose work is also shared by speed."""


FRUGAL = Layout(recompute=Recompute.FULL)
"""The layout of plans that need little memory."""


class _AllocatedLayout(NamedTuple):
    """A layout whose stages have their devices, and the seconds of a step by Sailor's formula."""

    time: float
    layout: Layout


@dataclass(frozen=True, slots=True)
class Sailor:
    """Devices of every kind and region for every stage by a dynamic program (Sailor, SOSP 2025), beside ``auto``.

    For every number of stages, size of microbatches, tensor degree inside a node and number of replicas, layers are
    divided evenly, kinds of devices without the memory for a stage are left out there, and a dynamic program over the
    stages chooses whose devices each stage has; the others stay idle. A stage has the devices of one region. The plans
    with the least time by the formula are simulated, then known plans, and then, with layers and samples shared by
    speed, those with the lowest bounds; decisions of the best are changed one by one. Last comes ``auto``, whose proof
    holds for the uniform plans of the space; on devices of one kind in one region it is all there is.

    Parameters
    ----------
    choices
        The number of plans that are simulated by time of the formula, and by bound.
    faithful
        As published: layers even, 1F1B, no recomputation and nothing shared among data ranks; the plans with the least
        time by the formula are simulated, and nothing is proven.
    """

    name: ClassVar[str] = "sailor"

    choices: int = 32
    faithful: bool = False

    def __post_init__(self) -> None:
        if self.choices < 1:
            raise ValueError(f"sailor: choices is at least 1, met {self.choices}; nearest: 1")

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield plans of the dynamic program, known ones, shared work, then those of ``auto``; return its proof.

        Raises
        ------
        ValueError
            Where the cluster has more kinds of devices and regions than the dynamic program takes.
        """
        num_pools = len(list_pools(problem.cluster))
        if num_pools > MOST_POOLS:
            raise ValueError(
                f"sailor: at most {MOST_POOLS} kinds of devices and regions together, met {num_pools}; nearest: metis, "
                "or auto"
            )
        search = BalancedSearch(problem, space, costs, inf)
        allocator = _Allocator(search)
        if self.faithful:
            layouts = _list_in_time(allocator.list_allocated((Layout(),), shares_work=False))
            yield from search.run_in_order(layouts, self.choices, recomputes=False)
            return None
        if num_pools > 1:
            zero_stages = space.zero or ZERO_STAGES
            levels = Layout(zero=1 if 1 in zero_stages else min(zero_stages)), replace(FRUGAL, zero=max(zero_stages))
            layouts = _list_in_time(allocator.list_allocated(levels, shares_work=True))
            layouts = list(dict.fromkeys(replace(layout, recompute=Recompute.NONE) for layout in layouts))
            yield from search.run_in_order(filter(search.allows, layouts), self.choices)
            known_search = BestFirstSearch(problem, costs)
            yield from known_search.begin_with_known(space)
            search.limit_time(known_search.incumbent.time)
            yield from search.run(_list_shared(search, layouts), self.choices)
        return (yield from Auto().propose(problem, space, costs))


def _list_in_time(rows: Iterable[_AllocatedLayout]) -> list[Layout]:
    """Return allocated layouts by rising time, those that are found before time is up."""
    timely_rows: list[_AllocatedLayout] = []
    with suppress(OutOfTime):
        for row in rows:
            timely_rows.append(row)
    return [row.layout for row in sorted(timely_rows, key=lambda row: row.time)]


def _list_shared(search: BalancedSearch, layouts: Iterable[Layout]) -> Iterator[Layout]:
    """Yield layouts with layers and samples shared by the speed of their devices, and with other schedules."""
    for layout in layouts:
        search.costs.check_time()
        microbatch = balance_samples(search.problem, layout)
        for sized_layout in dict.fromkeys((replace(layout, microbatch=microbatch), layout)):
            yield from search.list_schedules(sized_layout)


class _Allocator:
    """Allocates devices for all degrees of a space."""

    def __init__(self, search: BalancedSearch) -> None:
        self.search, self.problem = search, search.problem
        self.memory = StageCosts(self.problem).get_shared(PlanMemory)
        self.pool_times = PoolTimes(self.problem)

    def list_allocated(self, levels: tuple[Layout, ...], *, shares_work: bool) -> Iterator[_AllocatedLayout]:
        """Yield the fastest allocation of the degrees that may be near the best, at each level of memory.

        Levels say what is recomputed and what data ranks share; a level is taken where a stage does not fit some
        devices at the level before it. ``shares_work`` also takes degrees that are near the best if layers and samples
        are shared by speed.
        """
        degrees = list(self._list_degrees())
        most_allocated = MOST_ALLOCATED if shares_work else len(degrees)
        estimates = [self.pool_times.find_even_time, *([self.pool_times.find_shared_time] if shares_work else [])]
        allocated_degrees: set[Layout] = set()
        for estimate in estimates:
            best_time, num_allocated = inf, 0
            for least_time, layout in sorted(
                ((estimate(layout), layout) for layout in degrees), key=lambda row: row[0]
            ):
                self.search.costs.check_time()
                if least_time > SLOWEST * best_time or num_allocated == most_allocated:
                    break
                if layout in allocated_degrees:
                    continue
                allocated_degrees.add(layout)
                rows = list(self._list_levels(layout, levels))
                best_time = min([best_time, *(row.time for row in rows)])
                num_allocated += bool(rows)
                yield from rows

    def _list_levels(self, layout: Layout, levels: tuple[Layout, ...]) -> Iterator[_AllocatedLayout]:
        """Yield the fastest allocation of degrees at each level of memory, until all stages fit all devices."""
        for level in levels:
            zero = level.zero if layout.data > 1 else 0
            level_layout = replace(layout, zero=zero, recompute=level.recompute)
            if not self.search.allows(level_layout):
                continue
            allocated_layout, fits_all = self._allocate(level_layout)
            if allocated_layout is not None:
                yield allocated_layout
            if fits_all:
                break

    def _list_degrees(self) -> Iterator[Layout]:
        """Yield degrees, microbatches that are powers of two, and even stages, on the first devices that suffice."""
        batch, layers = self.problem.training.global_batch, num_layers(self.problem.graph)
        pools = self.pool_times.pools
        for tensor in divisors(max(pool.most_devices for pool in pools)):
            groups = [group for pool in pools for group in pool.list_groups(tensor)]
            for pipeline in range(1, min(len(groups), max(layers, 1)) + 1):
                stages = _divide_evenly(layers, pipeline)
                for sequences in divisors(batch):
                    for data in divisors(sequences):
                        microbatch = sequences // data
                        if data * pipeline > len(groups) or microbatch & (microbatch - 1):
                            continue
                        placement = tuple(device for group in groups[: data * pipeline] for device in group)
                        layout = Layout(
                            data=data,
                            tensor=tensor,
                            pipeline=pipeline,
                            microbatch=microbatch,
                            stages=stages if pipeline > 1 else "even",
                            placement=placement,
                            sequence_parallel=tensor > 1,
                        )
                        choices = (layout, replace(layout, sequence_parallel=False))
                        legal_layout = next(filter(self.search.allows, choices), None)
                        if legal_layout is not None:
                            yield legal_layout

    def _allocate(self, layout: Layout) -> tuple[_AllocatedLayout | None, bool]:
        """Return a layout with the devices of its stages, and whether all stages fit devices of all pools."""
        fits = self._find_fits(layout)
        pools = self.pool_times.pools
        counts = tuple(len(pool.list_groups(layout.tensor)) for pool in pools)
        times = np.where(fits, self.pool_times.list_stage_times(layout), inf)
        send_times = self.pool_times.list_send_times(layout)
        sync_times = self.pool_times.list_sync_times(layout)
        num_microbatches = self.problem.training.global_batch // layout.sequences
        best: _AllocatedLayout | None = None
        for order in permutations(sorted({pool.region for pool in pools})):
            regions = tuple(order.index(pool.region) for pool in pools)
            widths = np.ones(times.shape, int)
            device_pools = DevicePools(counts, regions, widths, times, send_times, sync_times)
            allocation = allocate_devices(device_pools, layout.data, num_microbatches)
            if allocation is not None and (best is None or allocation.time < best.time):
                placement = self.pool_times.place(allocation.replicas, layout.tensor)
                best = _AllocatedLayout(allocation.time, replace(layout, placement=placement))
        return best, bool(fits.all())

    def _find_fits(self, layout: Layout) -> np.ndarray:
        """Return by stage and pool whether a device has the memory for a rank of the stage."""
        allocated = self.memory.allocated(complete(self.problem, layout))
        accelerators = [pool.accelerator for pool in self.pool_times.pools]
        room = [self.problem.usable_memory(each) - int(each.reserved) for each in accelerators]
        return allocated[:, None] <= np.array(room)[None, :]


def _divide_evenly(layers: int, stages: int) -> tuple[int, ...]:
    """Return the layers of every stage, the last ones with one more where they do not divide.

    >>> _divide_evenly(26, 4)
    (6, 6, 7, 7)
    """
    count, rest = divmod(layers, stages)
    return tuple(count + (stage >= stages - rest) for stage in range(stages))
