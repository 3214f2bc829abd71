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


TENSOR_SUMS = 4
"""Sums over tensor ranks of a layer's activations and gradients: behind attention and MLP, as in Megatron-LM."""


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
        size = len(self.pools)
        bandwidths, latencies = np.full((size, size), inf), np.zeros((size, size))
        for row, source in enumerate(self.pools):
            for column, target in enumerate(self.pools):
                target_device = target.nodes[-1][-1] if row == column else target.nodes[0][0]
                bandwidths[row, column], latencies[row, column] = self._find_link(source.nodes[0][0], target_device)
        return bandwidths, latencies

    def _find_link(self, source: int, target: int) -> tuple[float, float]:
        """Return bytes a second and seconds of latency from one device to another."""
        links = interconnect(self.problem.cluster)
        routes = links.routes(np.array([source]), np.array([target]))
        if not len(routes.link):
            return inf, 0.0
        bandwidth = (links.bandwidth[routes.link] / routes.share).min()
        return float(bandwidth), float((links.latency[routes.link] * routes.share).sum())

    def find_even_time(self, layout: Layout) -> float:
        """Return the least seconds of a step with even stages on the fastest devices, with the fastest links.

        Stages count as equal, with the layers of the smallest.
        """
        counts = layout.stages if isinstance(layout.stages, tuple) else (1,)
        share = min(counts) / sum(counts)
        times: list[float] = []
        num_left = 0
        for time, num_groups in self._list_model_times(layout):
            num_left += num_groups
            # a stage with a slower device among its replicas takes as long as that
            num_stages = min(num_left // layout.data, layout.pipeline - len(times))
            times += [time * share] * num_stages
            num_left -= num_stages * layout.data
        return self._add_communication(layout, sum(times), max(times, default=0.0))

    def find_shared_time(self, layout: Layout) -> float:
        """Return the least seconds of a step with work by speed on the fastest devices, with the fastest links."""
        num_left, speed = layout.data * layout.pipeline, 0.0
        for time, num_groups in self._list_model_times(layout):
            speed += min(num_groups, num_left) / time
            num_left -= min(num_groups, num_left)
        time = layout.data / speed
        return self._add_communication(layout, layout.pipeline * time, time)

    def _add_communication(self, layout: Layout, total: float, slowest: float) -> float:
        """Return the seconds of a step from those of all stages and of the slowest, with the fastest links."""
        num_microbatches = self.problem.training.global_batch // layout.sequences
        send_time = float(self.list_send_times(layout).min()) if layout.pipeline > 1 else 0.0
        slowest += min(layout.pipeline - 1, 2) * send_time
        sync_time = float(self.list_sync_times(layout).max(axis=0).min())
        return total + 2 * (layout.pipeline - 1) * send_time + (num_microbatches - 1) * slowest + sync_time

    def _list_model_times(self, layout: Layout) -> list[tuple[float, int]]:
        """Return the seconds of a microbatch of all layers on each pool and its number of groups, the fastest first."""
        return sorted(
            (self._find_model_time(pool, layout), len(pool.list_groups(layout.tensor))) for pool in self.pools
        )

    def _find_model_time(self, pool: Pool, layout: Layout) -> float:
        """Return the seconds of a microbatch of all layers on a pool, with the communication of tensor ranks.

        Tensor ranks share work evenly, and sum a boundary's activations twice a layer and pass.
        """
        time = find_blocks_time(pool.accelerator, self.graph, True, layout.microbatch) / layout.tensor
        if layout.tensor == 1:
            return time
        node = max(pool.nodes, key=len)
        bandwidth, latency = self._find_link(node[0], node[-1])
        share = 2 * (layout.tensor - 1) / layout.tensor
        sum_time = latency + share * (layout.sequences // layout.data) * self._boundary_bytes / bandwidth
        return time + TENSOR_SUMS * num_layers(self.graph) * sum_time

    def list_stage_times(self, layout: Layout) -> FloatArray:
        """Return the seconds of a microbatch by stage and pool.

        The last stage has the blocks before and after the layers, as in `divide_by_speed`.
        """
        layers = num_layers(self.graph)
        counts = layout.stages if isinstance(layout.stages, tuple) else (layers,)
        shares = np.array(counts) / max(layers, 1)
        if layout.recompute is Recompute.FULL:
            shares = shares * (1 + 1 / BACKWARD_SHARE)
        columns = []
        for pool in self.pools:
            times = shares * self._find_model_time(pool, layout)
            times[-1] += find_blocks_time(pool.accelerator, self.graph, False, layout.microbatch) / layout.tensor
            columns.append(times)
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
