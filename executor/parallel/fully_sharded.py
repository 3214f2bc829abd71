"""ZeRO 2 and 3 [1]_: parameters, gradients and optimizer states of a stage as shards, by torch's ``fully_shard`` [2]_.

A unit is a block of the network. For every microbatch it is gathered before its forward, and its gradients are reduced
as its backward ends; where several groups of ranks shard states, their sums are added once a step. ZeRO 2 keeps
gathered parameters from the first forward of a step to the last backward. Between steps torch keeps only shards of
them, which ZeRO 2 as published does not ask for.

References
----------
.. [1] Rajbhandari et al. 2020, "ZeRO", sections 5.2 and 5.3 (gradient and parameter partitioning).
.. [2] Zhao et al., "PyTorch FSDP: experiences on scaling fully sharded data parallel", VLDB 2023, section 3.2 (units,
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
from meshwise.executor.recording.tensors import read_cut


class OpaqueStage(nn.Module):
    """A stage that hides from torch's pipeline runtime that it is sharded.

    The runtime would gather a whole sharded stage before its first pass, keep it to the last pass, and only then reduce
    its gradients. With ``reshard`` gathered parameters are freed after every pass; else they stay to the last backward
    of a step.
    """

    def __init__(self, network: Network, *, reshard: bool) -> None:
        super().__init__()
        self.network, self.reshard = network, reshard

    def prepare_forward(self, *, turns: bool) -> None:
        """Prepare the next forward; where ``turns``, a backward follows at once and the last unit stays gathered."""
        blocks: list[Any] = list_blocks(self.network)
        last = blocks[-1]
        if self.reshard and isinstance(last, FSDPModule):
            last.set_reshard_after_forward(not turns, recurse=False)

    def prepare_backward(self, *, is_last: bool) -> None:
        """Prepare the next backward; the last one of a step sums over replicas and frees gathered parameters."""
        sharded: Any = self.network
        sharded.set_requires_all_reduce(is_last)
        sharded.set_reshard_after_backward(is_last or self.reshard)

    def forward(self, x: Any) -> Any:
        """Return the result of the stage."""
        return self.network(x)


def shard(
    network: Network,
    mesh: DeviceMesh,
    *,
    experts: DeviceMesh | None,
    reshard: bool,
    dtype: torch.dtype,
    num_offloaded: int,
    host: HostMemory,
) -> None:
    """Shard the states of a stage over the last axis of ``mesh``, in place; the axis before it has replicas.

    Parameters
    ----------
    experts
        The mesh over which the states of experts are sharded, where ranks have different experts.
    reshard
        Whether gathered parameters are freed after forward and gathered again for backward.
    dtype
        The dtype of gathered parameters. Those of 16 bits have shards in fp32, and reduce gradients in fp32.
    num_offloaded
        How many of the first blocks have their shards and gradients on ``host``.
    """
    is_narrow = dtype.itemsize == 2
    policy = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32) if is_narrow else MixedPrecisionPolicy()
    host_blocks = list_blocks(network)[:num_offloaded]

    def shard_unit(unit: nn.Module, on_host: bool, mesh: DeviceMesh = mesh, reshard: bool = reshard) -> None:
        fully_shard(
            unit,
            mesh=mesh,
            reshard_after_forward=reshard,
            mp_policy=policy,
            offload_policy=CPUOffloadPolicy(pin_memory=host.accelerator.pins) if on_host else OffloadPolicy(),
        )

    for layer in network.decoder_layers():
        if experts is not None and layer.mixture is not None:
            shard_unit(layer.mixture.experts, layer in host_blocks, mesh=experts)
    ends = [network.embedding, network.head]
    if network.ties_embeddings and None not in ends:
        ends = []  # they share a table, which must be in one unit: the root's
    for unit in (*ends, *network.decoder_layers()):
        if unit is not None:
            is_head = unit is network.head  # its backward comes next: freeing it would gather it twice
            shard_unit(unit, unit in host_blocks, reshard=reshard and not is_head)
    shard_unit(network, network.ties_embeddings and network.embedding in host_blocks)
    first_block: Any = list_blocks(network)[0]
    # by default it prefetches the unit that another microbatch's forward ended with
    if isinstance(first_block, FSDPModule):
        first_block.set_modules_to_backward_prefetch([first_block])
    _move_to_host(host_blocks, host)


def list_blocks(network: Network) -> list[nn.Module]:
    """Return the blocks of a network as modules, in order."""
    modules = (network.embedding, *network.decoder_layers(), network.head)
    return [block for block in modules if block is not None]


def _move_to_host(blocks: Sequence[nn.Module], host: HostMemory) -> None:
    """Move the shards of blocks to the host; their gradients follow as soon as they are reduced.

    Where the device has memory of its own, torch has moved both already, and they are only counted.
    """
    host_parameters: dict[DTensor, nn.Parameter] = {}  # a tied parameter occurs in two modules and is moved once
    with torch.no_grad():
        for module in chain.from_iterable(block.modules() for block in blocks):
            for name, parameter in module.named_parameters(recurse=False):
                assert isinstance(parameter, DTensor)
                if host.holds(parameter.to_local()):
                    if parameter not in host_parameters:
                        host_parameters[parameter] = parameter
                        host.count_bytes(host.ensure_on_host(parameter.to_local()).untyped_storage().nbytes())
                    continue
                if parameter not in host_parameters:
                    host_parameters[parameter] = nn.Parameter(
                        read_cut(parameter).restore(host.copy_to_host(parameter.to_local()))
                    )
                    register_hook: Callable[..., Any] = host_parameters[parameter].register_post_accumulate_grad_hook
                    register_hook(partial(_move_gradient, host))
                setattr(module, name, host_parameters[parameter])


def _move_gradient(host: HostMemory, parameter: Tensor) -> None:
    """Move a gradient to the host, where later gradients are added to it."""
    gradient = parameter.grad
    assert isinstance(gradient, DTensor)
    with host.record_copy("gradients to host", *host.recorder.current_pass):
        if not host.holds(gradient.to_local()):
            parameter.grad = read_cut(gradient).restore(host.copy_to_host(gradient.to_local()))
