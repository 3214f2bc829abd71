"""Applies data parallelism and shards of states to a module, by torch's own parts.

Without shards `DistributedDataParallel` averages gradients in buckets beneath backward. With shards `fully_shard` cuts
parameters, gradients and optimizer states of every block, and of what is outside blocks, over the ranks [1]_:

- ZeRO 3 gathers the parameters of a block for each pass, and reduces gradients after each microbatch.
- ZeRO 2 keeps gathered parameters through a step.
- ZeRO 1 also keeps whole gradients, which are reduced once a step.

Parameters without dims are whole on every rank.

References
----------
.. [1] torch, ``torch.distributed.fsdp.fully_shard``; Rajbhandari et al. 2020, "ZeRO", section 5.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from meshwise.executor.modules.blocks import list_offloaded, recompute_blocks
from meshwise.executor.modules.layout import ModuleLayout
from meshwise.executor.modules.quiet import KeepDouble
from meshwise.executor.parallel.mixed_products import TurnToNarrow
from meshwise.executor.parallel.module_offload import BlockOffload, choose_offload_policy
from meshwise.executor.recording.accelerator import find_accelerator
from meshwise.executor.recording.private_torch import is_compiled

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
"""The dtype in which a precision computes; parameters of bf16 have fp32 copies that the optimizer steps."""


def build_mesh(layout: ModuleLayout, device_type: str) -> DeviceMesh | None:
    """Return the mesh of groups of ranks by ranks that share states; ``None`` for one rank."""
    if layout.data == 1:
        return None
    return init_device_mesh(
        device_type, (layout.data // layout.shards, layout.shards), mesh_dim_names=("replica", "shard")
    )


def shard_module(
    module: nn.Module,
    layout: ModuleLayout,
    device: torch.device,
    precision: str,
    units: Sequence[nn.Module],
    *,
    has_unused: bool,
    activations: BlockOffload | None = None,
) -> nn.Module:
    """Return a module that is trained under a layout; parameters have the same names.

    Parameters
    ----------
    units
        Blocks that are gathered one at a time; the module itself is the last unit.
    has_unused
        Whether some forward may leave parameters unused.
    activations
        Keeps on the host what blocks save for backward; ``None`` where that stays.
    """
    recompute_blocks(module, layout.find_recompute(0))
    if activations is not None:
        activations.wrap(list_offloaded(module))
    mesh = build_mesh(layout, device.type)
    if mesh is None:
        return module
    if not layout.zero:
        ids = [device.index] if device.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=ids, find_unused_parameters=has_unused)
    is_narrow = DTYPES[precision].itemsize == 2
    policy = MixedPrecisionPolicy(DTYPES[precision], torch.float32) if is_narrow else MixedPrecisionPolicy()
    shard_mesh = mesh["shard"] if layout.shards == layout.data else mesh
    reshard = layout.zero == 3 and layout.reshard_after_forward
    placement = choose_offload_policy(find_accelerator(device.type), is_on_host=bool(layout.offload.optimizer))
    options = {"mesh": shard_mesh, "mp_policy": policy, "offload_policy": placement}
    shard_units(units, reshard_after_forward=reshard, **options)
    # backward begins with the unit with which forward ends
    shard_units((module,), reshard_after_forward=False, **options)
    return module


def shard_units(units: Sequence[nn.Module], **options: Any) -> None:
    """Cut the parameters of units by ``fully_shard``, inner ones first; scalars stay whole on every rank.

    ``fully_shard`` cuts the first dim, which a scalar such as a temperature has not.
    """
    scalars = set(list_scalars(units))
    for unit in units:
        fully_shard(unit, ignored_params=scalars, **options)


def list_scalars(units: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of modules that have no dims, each once."""
    return [*dict.fromkeys(parameter for unit in units for parameter in unit.parameters() if not parameter.dim())]


def average_scalars(parameters: Iterable[nn.Parameter], groups: Sequence[dist.ProcessGroup | None]) -> None:
    """Average the gradients of parameters of which all ranks have copies, as ``fully_shard`` averages those of shards.

    Where no rank has a gradient there is none; a rank without one counts as zero. It is a collective of every group.
    """
    scalars = [parameter for parameter in parameters if parameter.requires_grad]
    if not scalars:
        return
    values = torch.stack([p.new_zeros(()) if p.grad is None else p.grad for p in scalars])
    has_gradient = values.new_tensor([parameter.grad is not None for parameter in scalars])
    sums = torch.stack((values, has_gradient)).double()
    num_ranks = 1
    for group in groups:
        dist.all_reduce(sums, group=group)
        num_ranks *= dist.get_world_size(group)
    for parameter, total, count in zip(scalars, *sums, strict=True):
        parameter.grad = (total / num_ranks).to(parameter.dtype) if count > 0 else None


def find_precision_context(module: nn.Module, device: torch.device, precision: str) -> Any:
    """Return the context of a forward: shards turn parameters to bf16 themselves, else torch casts operators.

    Of a compiled module with shards nothing else is turned. In fp64 nothing is turned to fp32.
    """
    if precision == "fp64":
        return KeepDouble()
    dtype = DTYPES[precision]
    if dtype.itemsize == 2 and isinstance(module, FSDPModule):
        return nullcontext() if any(map(is_compiled, module.modules())) else TurnToNarrow(dtype)
    return torch.autocast(device.type, dtype, enabled=dtype.itemsize == 2)


@contextmanager
def accumulate_gradients(module: nn.Module, layout: ModuleLayout, *, is_last: bool) -> Iterator[None]:
    """Run forward and backward of a microbatch; gradients are averaged after the last one, with ZeRO 2 and 3 always."""
    if isinstance(module, DistributedDataParallel) and not is_last:
        with module.no_sync():
            yield
        return
    if isinstance(module, FSDPModule):
        module.set_is_last_backward(is_last)
        module.set_requires_gradient_sync(is_last or layout.zero > 1)
        module.set_reshard_after_backward(is_last or (layout.zero == 3 and layout.reshard_after_forward))
    yield


def unwrap(module: nn.Module) -> nn.Module:
    """Return the user's own module."""
    return module.module if isinstance(module, DistributedDataParallel) else module


_IS_ALONE = ContextVar("is_alone", default=False)


@contextmanager
def act_alone() -> Iterator[None]:
    """Have steps that are made in the body be those of one process, whatever process group it is in."""
    token = _IS_ALONE.set(True)
    try:
        yield
    finally:
        _IS_ALONE.reset(token)


def count_ranks() -> int:
    """Return the number of ranks; 1 where there is no process group."""
    return dist.get_world_size() if dist.is_initialized() and not _IS_ALONE.get() else 1


def find_rank() -> int:
    """Return the number of this rank; 0 where there is no process group."""
    return dist.get_rank() if dist.is_initialized() and not _IS_ALONE.get() else 0
