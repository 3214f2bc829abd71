"""ZeRO 2 and 3: parameters, gradients and optimizer states of a stage as shards, by torch's ``fully_shard``.

A unit is a block of the network: it is gathered before its forward, and its gradients are reduced as its
backward ends, for every microbatch. ZeRO 2 keeps gathered parameters from a forward to its backward; torch
keeps only shards of them between steps, which ZeRO 2 as published need not.

References
----------
Rajbhandari et al. 2020, "ZeRO", sections 5.2 and 5.3 (gradient and parameter partitioning).
Zhao et al., "PyTorch FSDP: experiences on scaling fully sharded data parallel", VLDB 2023, section 3.2 (units,
hybrid sharding).
"""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from executor.model import Network


class Whole(nn.Module):
    """A stage that hides from torch's pipeline runtime that it is sharded.

    The runtime would gather all of a sharded stage before its first pass and keep it to the last, and reduce its
    gradients once, after that.
    """

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Any) -> Any:
        """Return what the stage returns."""
        return self.network(x)


def shard(network: Network, mesh: DeviceMesh, *, experts: DeviceMesh | None, reshard: bool) -> None:
    """Share the states of a stage over ``mesh`` in place: its last axis, and replicas along the one before it.

    Parameters
    ----------
    experts
        What the states of experts are shared over, where ranks have different ones.
    reshard
        Whether gathered parameters are given up after forward and gathered again for backward.
    """
    for layer in network.decoder_layers():
        if experts is not None and layer.mixture is not None:
            fully_shard(layer.mixture.experts, mesh=experts, reshard_after_forward=reshard)
    ends = [network.embedding, network.head]
    if network.tied and None not in ends:
        ends = []  # they share a table: the root's unit
    for unit in (*ends, *network.decoder_layers()):
        if unit is not None:
            kept = unit is network.head  # its backward comes next
            fully_shard(unit, mesh=mesh, reshard_after_forward=reshard and not kept)
    fully_shard(network, mesh=mesh, reshard_after_forward=reshard)
