"""ZeRO 2 and 3: parameters, gradients and optimizer states of a stage as shards, by torch's ``fully_shard``.

A unit is a block of the network: it is gathered before its forward, and its gradients are reduced as its
backward ends, for every microbatch; where groups of ranks share states, their sums are summed once a step. ZeRO 2
keeps gathered parameters from the first forward of a step to the last backward; torch keeps only shards of them
between steps, which ZeRO 2 as published need not.

References
----------
Rajbhandari et al. 2020, "ZeRO", sections 5.2 and 5.3 (gradient and parameter partitioning).
Zhao et al., "PyTorch FSDP: experiences on scaling fully sharded data parallel", VLDB 2023, section 3.2 (units,
hybrid sharding).
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from meshwise.executor.model.network import Network
from meshwise.executor.parallel.offload import HostMemory


class Whole(nn.Module):
    """A stage that hides from torch's pipeline runtime that it is sharded.

    The runtime would gather all of a sharded stage before its first pass and keep it to the last, and reduce its
    gradients once, after that.

    Parameters
    ----------
    reshard
        Whether parameters are given up after every pass; else they stay to the last backward of a step.
    """

    def __init__(self, network: Network, *, reshard: bool) -> None:
        super().__init__()
        self.network, self.reshard = network, reshard

    def prepare_forward(self, *, turns: bool) -> None:
        """Say whether a backward follows the next forward at once: it begins with the unit that comes last."""
        blocks: list[Any] = blocks_of(self.network)
        last = blocks[-1]
        if self.reshard and isinstance(last, FSDPModule):
            last.set_reshard_after_forward(not turns, recurse=False)

    def prepare_backward(self, *, last: bool) -> None:
        """Say what follows the next backward: the last one of a step sums over replicas and gives parameters up."""
        sharded: Any = self.network
        sharded.set_requires_all_reduce(last)
        sharded.set_reshard_after_backward(last or self.reshard)

    def forward(self, x: Any) -> Any:
        """Return what the stage returns."""
        return self.network(x)


def shard(
    network: Network,
    mesh: DeviceMesh,
    *,
    experts: DeviceMesh | None,
    reshard: bool,
    precision: MixedPrecisionPolicy | None = None,
    away: int = 0,
    host: HostMemory | None = None,
) -> None:
    """Share the states of a stage over ``mesh`` in place: its last axis, and replicas along the one before it.

    Parameters
    ----------
    experts
        What the states of experts are shared over, where ranks have different ones.
    reshard
        Whether gathered parameters are given up after forward and gathered again for backward.
    precision
        In what parameters are gathered and gradients reduced, if not in that of the shards.
    away
        Of how many blocks, the first ones, the shards and their gradients are on ``host``.
    """
    policy = precision or MixedPrecisionPolicy()
    pins = host is not None and host.accelerator.pins
    policy_of = partial(_policy, pins=pins)
    distant = blocks_of(network)[:away]
    for layer in network.decoder_layers():
        if experts is not None and layer.mixture is not None:
            fully_shard(
                layer.mixture.experts,
                mesh=experts,
                reshard_after_forward=reshard,
                mp_policy=policy,
                offload_policy=policy_of(layer in distant),
            )
    ends = [network.embedding, network.head]
    if network.tied and None not in ends:
        ends = []  # they share a table: the root's unit
    for unit in (*ends, *network.decoder_layers()):
        if unit is not None:
            kept = unit is network.head  # its backward comes next
            fully_shard(
                unit,
                mesh=mesh,
                reshard_after_forward=reshard and not kept,
                mp_policy=policy,
                offload_policy=policy_of(unit in distant),
            )
    tied_away = network.tied and network.embedding in distant
    fully_shard(
        network, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=policy_of(tied_away)
    )
    first: Any = blocks_of(network)[0]
    if isinstance(first, FSDPModule):  # else the unit that another microbatch's forward ended with
        first.set_modules_to_backward_prefetch([first])
    if host is not None:
        _move(distant, host)


def blocks_of(network: Network) -> list[nn.Module]:
    """Return the blocks of a network in order."""
    every = (network.embedding, *network.decoder_layers(), network.head)
    return [block for block in every if block is not None]


def mixed(dtype: torch.dtype) -> MixedPrecisionPolicy:
    """Return how fp32 shards are trained in 16 bits: gathered in ``dtype``, gradients reduced in fp32."""
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


def _policy(away: bool, *, pins: bool) -> OffloadPolicy:
    return CPUOffloadPolicy(pin_memory=pins) if away else OffloadPolicy()


def _move(blocks: Sequence[nn.Module], host: HostMemory) -> None:
    """Put shards on the host; gradients follow as soon as they are reduced.

    Where the device has memory of its own torch has done so, and shards and gradients are counted.
    """
    moved: dict[DTensor, nn.Parameter] = {}  # tied ones once
    with torch.no_grad():
        for module in chain.from_iterable(block.modules() for block in blocks):
            for name, parameter in module.named_parameters(recurse=False):
                assert isinstance(parameter, DTensor)
                if host.holds(parameter.to_local()):
                    if parameter not in moved:
                        moved[parameter] = parameter
                        host.count(host.keep(parameter.to_local()).untyped_storage().nbytes())
                    continue
                if parameter not in moved:
                    moved[parameter] = nn.Parameter(_like(parameter, host.copy(parameter.to_local())))
                    follow: Callable[..., Any] = moved[parameter].register_post_accumulate_grad_hook
                    follow(partial(_follow, host))
                setattr(module, name, moved[parameter])


def _follow(host: HostMemory, parameter: Tensor) -> None:
    """Move a gradient to the host; later ones are added to it there."""
    gradient = parameter.grad
    assert isinstance(gradient, DTensor)
    with host.moving("gradients to host", *host.recorder.current):
        if not host.holds(gradient.to_local()):
            parameter.grad = _like(gradient, host.copy(gradient.to_local()))


def _like(whole: DTensor, part: Tensor) -> DTensor:
    """Return a tensor cut as another one, whose part on this rank is ``part``."""
    size, stride = whole.shape, whole.stride()
    return DTensor.from_local(part, whole.device_mesh, whole.placements, run_check=False, shape=size, stride=stride)
