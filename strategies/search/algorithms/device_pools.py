"""Pools of devices of one kind in one region, and what stages, sends and sums of gradients take there."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf

import numpy as np

from meshwise.simulator.interconnect.interconnect import interconnect
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.machine.topology import Dragonfly, Fabric, FatTree, LeafSpine
from meshwise.simulator.operator_graph import Block
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.partition import num_layers, partition_layers
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.search.speed_division import find_blocks_time
from meshwise.strategies.stages.division import FloatArray

MOST_REGIONS = 4
"""Regions of which all orders are tried; a fabric of more parts is one region."""

BACKWARD_SHARE = 3.0
"""Forward and backward together take about so many times as long as forward, which recomputation repeats."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Free devices of one kind in one region, by node."""

    accelerator: Accelerator
    region: int
    nodes: tuple[tuple[int, ...], ...]

    @property
    def most_devices(self) -> int:
        """The number of devices of its fullest node."""
        return max(map(len, self.nodes))

    def list_groups(self, size: int) -> list[tuple[int, ...]]:
        """Return groups of neighbouring devices of one node, for tensor parallelism; devices left over have none."""
        return [node[first : first + size] for node in self.nodes for first in range(0, len(node) // size * size, size)]


@lru_cache(maxsize=8)
def list_pools(cluster: Cluster) -> tuple[Pool, ...]:
    """Return the pools of the free devices of a cluster, in order of their first devices."""
    nodes_per_region = _find_nodes_per_region(cluster.fabric) or cluster.num_nodes
    if -(-cluster.num_nodes // nodes_per_region) > MOST_REGIONS:
        nodes_per_region = cluster.num_nodes
    pools: dict[tuple[int, int], dict[int, list[int]]] = {}
    for device in cluster.free_devices:
        node = cluster.node_of(device)
        key = node // nodes_per_region, int(cluster.device_kinds[device])
        pools.setdefault(key, {}).setdefault(node, []).append(device)
    return tuple(
        Pool(
            accelerator=cluster.accelerator_of(next(iter(nodes.values()))[0]),
            region=region,
            nodes=tuple(map(tuple, nodes.values())),
        )
        for (region, _), nodes in pools.items()
    )


def _find_nodes_per_region(fabric: Fabric) -> int:
    """Return the nodes of a part of a fabric beyond which links are narrower; 0 where none are."""
    match fabric:
        case Dragonfly():
            return fabric.nodes_per_router * fabric.routers_per_group
        case FatTree() if fabric.core_oversubscription > 1:
            return fabric.nodes_per_leaf * fabric.leaves_per_pod
        case LeafSpine() if fabric.oversubscription > 1:
            return fabric.nodes_per_leaf
        case _:
            return 0


class PoolTimes:
    """Seconds of a microbatch, of what stages send and of the sums of gradients, on the pools of a problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.graph = problem, problem.graph
        self.pools = list_pools(problem.cluster)
        self.bandwidths, self.latencies = self._find_links()
        self._boundary_bytes = max(sum(block.tensor[name].nbytes for name in block.outputs) for block in self.layers)

    @property
    def layers(self) -> list[Block]:
        """The kinds of layers; all kinds of blocks where none is a layer."""
        return [block for block in self.graph.blocks if block.layer] or list(self.graph.blocks)

    def _find_links(self) -> tuple[FloatArray, FloatArray]:
        """Return bytes a second and seconds of latency between pools; inside a pool those between its nodes."""
        links, size = interconnect(self.problem.cluster), len(self.pools)
        bandwidths, latencies = np.full((size, size), inf), np.zeros((size, size))
        for row, source in enumerate(self.pools):
            for column, target in enumerate(self.pools):
                pair = source.nodes[0][0], (target.nodes[-1][-1] if row == column else target.nodes[0][0])
                routes = links.routes(np.array(pair[:1]), np.array(pair[1:]))
                if len(routes.link):
                    bandwidths[row, column] = float((links.bandwidth[routes.link] / routes.share).min())
                    latencies[row, column] = float((links.latency[routes.link] * routes.share).sum())
        return bandwidths, latencies

    def find_least_time(self, layout: Layout) -> float:
        """Return the seconds of a step without communication if every stage had the fastest devices that are left.

        Stages count as equal, with the layers of the smallest.
        """
        rows = sorted(
            (self._find_model_time(pool, layout), len(pool.list_groups(layout.tensor))) for pool in self.pools
        )
        counts = layout.stages if isinstance(layout.stages, tuple) else (1,)
        share = min(counts) / sum(counts)
        times: list[float] = []
        num_left = 0
        for time, num_groups in rows:
            num_left += num_groups
            # a stage with a slower device among its replicas takes as long as that
            num_stages = min(num_left // layout.data, layout.pipeline - len(times))
            times += [time * share] * num_stages
            num_left -= num_stages * layout.data
        num_microbatches = self.problem.training.global_batch // layout.sequences
        return (sum(times) + (num_microbatches - 1) * max(times, default=inf)) if times else inf

    def _find_model_time(self, pool: Pool, layout: Layout) -> float:
        """Return the seconds of a microbatch of all layers on a pool, shared evenly by tensor ranks."""
        return find_blocks_time(pool.accelerator, self.graph, True, layout.microbatch) / layout.tensor

    def list_stage_times(self, layout: Layout) -> FloatArray:
        """Return the seconds of a microbatch by stage and pool, shared evenly by tensor ranks.

        The last stage has the blocks before and after the layers, as in `divide_by_speed`.
        """
        layers = num_layers(self.graph)
        counts = layout.stages if isinstance(layout.stages, tuple) else (layers,)
        shares = np.array(counts) / max(layers, 1)
        if layout.recompute is Recompute.FULL:
            shares = shares * (1 + 1 / BACKWARD_SHARE)
        columns = []
        for pool in self.pools:
            times = shares * find_blocks_time(pool.accelerator, self.graph, True, layout.microbatch)
            times[-1] += find_blocks_time(pool.accelerator, self.graph, False, layout.microbatch)
            columns.append(times / layout.tensor)
        return np.stack(columns, axis=1)

    def list_send_times(self, layout: Layout) -> FloatArray:
        """Return the seconds in which a microbatch crosses a boundary, by boundary and both pools."""
        times = self.latencies + layout.microbatch * self._boundary_bytes / self.bandwidths
        return np.repeat(times[None], layout.pipeline - 1, axis=0)

    def list_sync_times(self, layout: Layout) -> FloatArray:
        """Return the seconds in which a ring of replicas sums the gradients of a stage, by stage and pool."""
        sizes = {name: sum(item.nbytes for item in block.parameters) for name, block in self.graph.occurrences}
        stages = partition_layers(self.graph, layout.pipeline, layout.stages)
        stage_bytes = np.array([sum(map(sizes.__getitem__, stage.blocks)) for stage in stages]) / layout.tensor
        share = 2 * (layout.data - 1) / layout.data
        return share * stage_bytes[:, None] / self.bandwidths.diagonal()[None, :]

    def place(self, replicas: Sequence[Sequence[int]], tensor: int) -> tuple[int, ...]:
        """Return the device of every rank, those of each pool in order; empty for all free devices in order."""
        queues = [iter(pool.list_groups(tensor)) for pool in self.pools]
        placement = tuple(
            device
            for counts in replicas
            for queue, count in zip(queues, counts, strict=True)
            for _ in range(count)
            for device in next(queue)
        )
        return () if placement == tuple(self.problem.cluster.free_devices) else placement
