"""Devices of several kinds and places for the replicas of every pipeline stage, by a dynamic program over the stages.

A pool is the devices of one kind at one place. A stage has as many replicas as any other, each on devices of one pool,
and all of one region: gradients are summed over replicas, so that data parallelism stays where links are wide. With a
time t_s of a microbatch on the slowest replica of stage s, and c_s to send it on, a step of m microbatches takes

    ``sum(t_s) + 2 sum(c_s) + (m - 1) max(c_{s-1} + t_s + c_s) + max(sync_s)``

References
----------
Strati et al., "Sailor: automating distributed training over dynamic, heterogeneous, and geo-distributed clusters", SOSP
2025; code: eth-easl/sailor at cf2c8e3 (``sailor_planner/cpp_src``: ``solve_dp``, ``merge_stages_get_time``).
"""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from meshwise.simulator.memo import memoise
from meshwise.simulator.program import IntArray
from meshwise.strategies.stages.division import FloatArray

MOST_REMAINDERS = 2
"""Pools beside the one that fills a stage up, at most, of which a stage has the replicas that are left over."""

Replicas = tuple[int, ...]
"""The replicas of a stage by pool."""


class DevicePools(NamedTuple):
    """What a microbatch takes on the devices of every pool.

    Parameters
    ----------
    counts
        The number of devices by pool.
    regions
        The region of every pool, numbered in the order in which the pipeline passes through them.
    widths
        Devices of one replica by stage and pool.
    times
        Time of forward and backward of a microbatch by stage and pool; infinite where the pool cannot have the stage.
    send_times
        Time in which a boundary's activations cross from pool to pool, by boundary and both pools.
    sync_times
        Time in which the replicas of a stage sum gradients, by stage and pool; the slowest pool of a stage counts.
    """

    counts: tuple[int, ...]
    regions: tuple[int, ...]
    widths: IntArray
    times: FloatArray
    send_times: FloatArray
    sync_times: FloatArray


class Allocation(NamedTuple):
    """The replicas of every stage by pool, and the time of a step by the formula."""

    replicas: tuple[Replicas, ...]
    time: float


class _Label(NamedTuple):
    """What the stages so far take; no label of equal devices is better in all but the stages."""

    total: float
    slowest: float
    busy: float
    sync: float
    num_pools: int
    replicas: tuple[Replicas, ...]

    def is_below(self, label: "_Label") -> bool:
        """Return whether every figure is at most that of another label."""
        return (
            self.total <= label.total
            and self.slowest <= label.slowest
            and self.busy <= label.busy
            and self.sync <= label.sync
            and self.num_pools <= label.num_pools
        )


_State = tuple[tuple[int, ...], int, Replicas]
"""The devices that are left by pool, the region, and the replicas of the last stage."""


def allocate_devices(pools: DevicePools, data: int, num_microbatches: int) -> Allocation | None:
    """Return the replicas of every stage for which a step is fastest; ``None`` where the devices do not suffice.

    Regions are passed through in order. Of equally fast allocations the one whose stages have the fewest pools is
    taken. Where sending takes as long between any pools of two regions, and replicas have as many devices in every
    stage, no other allocation on one or two pools a region is faster. Between more pools, stages have at most
    `MOST_REMAINDERS` of them beside the one that fills the stage up.

    Parameters
    ----------
    data
        Replicas of every stage.
    num_microbatches
        Microbatches of every replica.

    Examples
    --------
    Two stages with two replicas each, on three fast devices and one that takes three times as long: the slow one is
    beside a fast one, for which it does not matter in which stage. With 4 microbatches, 1 + 3 + 3 * 3.

    >>> times = np.array([[1.0, 3.0], [1.0, 3.0]])
    >>> pools = DevicePools((3, 1), (0, 0), np.ones((2, 2), int), times, np.zeros((1, 2, 2)), np.zeros((2, 2)))
    >>> allocate_devices(pools, 2, 4)
    Allocation(replicas=((2, 0), (1, 1)), time=13.0)
    """
    labels: dict[_State, list[_Label]] = {(pools.counts, min(pools.regions), ()): [_Label(0, 0, 0, 0, 0, ())]}
    for stage in range(len(pools.times)):
        stage_costs = _StageCosts(pools, stage)
        next_labels: dict[_State, list[_Label]] = {}
        for (left, region, previous), rows in labels.items():
            for next_region in stage_costs.list_regions(region):
                for replicas in _list_replicas(pools, left, next_region, stage, data):
                    # what sending takes hangs on who sends to whom: equal devices are not one state without it
                    state = stage_costs.take(left, replicas), next_region, replicas
                    next_rows = next_labels.setdefault(state, [])
                    for label in rows:
                        _keep_label(next_rows, stage_costs.extend(label, previous, replicas))
        labels = next_labels
    best: tuple[float, int, tuple[Replicas, ...]] | None = None
    for label in (label for rows in labels.values() for label in rows):
        time = label.total + (num_microbatches - 1) * max(label.slowest, label.busy) + label.sync
        candidate = time, label.num_pools, label.replicas
        # of equal times the first pools have the first stages
        if best is None or candidate[:2] < best[:2] or (candidate[:2] == best[:2] and candidate[2] > best[2]):
            best = candidate
    return None if best is None else Allocation(best[2], best[0])


def _keep_label(rows: list[_Label], label: _Label) -> None:
    """Add a label unless another one is as good; remove those that are no better."""
    if not any(row.is_below(label) for row in rows):
        rows[:] = [row for row in rows if not label.is_below(row)]
        rows.append(label)


class _StageCosts:
    """What one more stage takes; each figure is looked up once for equal replicas."""

    def __init__(self, pools: DevicePools, stage: int) -> None:
        self.pools, self.stage = pools, stage
        self.widths: list[int] = pools.widths[stage].tolist()

    def list_regions(self, region: int) -> list[int]:
        """Return the regions in which a stage behind one in a region may be."""
        return sorted({place for place in self.pools.regions if place >= region})

    def take(self, left: tuple[int, ...], replicas: Replicas) -> tuple[int, ...]:
        """Return the devices that are left by pool behind the replicas of the stage."""
        return tuple(count - number * width for count, number, width in zip(left, replicas, self.widths, strict=True))

    def extend(self, label: _Label, previous: Replicas, replicas: Replicas) -> _Label:
        """Return the label with the stage behind that of other replicas."""
        time, sync, num_pools = self._find_figures(replicas)
        send_time = self._find_send_time(previous, replicas) if self.stage else 0.0
        return _Label(
            total=label.total + time + 2 * send_time,
            slowest=max(label.slowest, label.busy + send_time),
            busy=time + send_time,
            sync=max(label.sync, sync),
            num_pools=label.num_pools + num_pools,
            replicas=(*label.replicas, replicas),
        )

    @memoise
    def _find_figures(self, replicas: Replicas) -> tuple[float, float, int]:
        """Return the times of a microbatch and of the sum of gradients, and the number of pools."""
        places = [pool for pool, count in enumerate(replicas) if count]
        time, sync = (float(table[self.stage, places].max()) for table in (self.pools.times, self.pools.sync_times))
        return time, sync, len(places)

    @memoise
    def _find_send_time(self, senders: Replicas, receivers: Replicas) -> float:
        table = self.pools.send_times[self.stage - 1]
        return max(float(table[pair]) for pair in _list_pairs(senders, receivers))


def _list_pairs(senders: Sequence[int], receivers: Sequence[int]) -> set[tuple[int, int]]:
    """Return the pools between which replicas of two stages send: the first to the first, and so on.

    >>> sorted(_list_pairs((2, 1), (0, 3)))
    [(0, 1), (1, 1)]
    """
    columns = (np.repeat(np.arange(len(counts)), counts).tolist() for counts in (senders, receivers))
    return set(zip(*columns, strict=True))


def _list_replicas(pools: DevicePools, left: tuple[int, ...], region: int, stage: int, data: int) -> Iterator[Replicas]:
    """Yield ways to place the replicas of a stage in a region.

    All are of one pool, or one pool fills up what others leave over when all they can give to whole stages is given:
    stages of one pool are never slower, so that others have no more of two pools than that.
    """
    room = {
        pool: left[pool] // int(pools.widths[stage, pool])
        for pool in range(len(left))
        if pools.regions[pool] == region and np.isfinite(pools.times[stage, pool])
    }
    for size in range(1 + MOST_REMAINDERS):
        for others in combinations([pool for pool, count in room.items() if count % data], size):
            replicas = {pool: room[pool] % data for pool in others}
            missing = data - sum(replicas.values())
            for pool, count in room.items():
                if pool not in others and 0 < missing <= count:
                    yield tuple((replicas | {pool: missing}).get(place, 0) for place in range(len(left)))
