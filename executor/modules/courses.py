"""What ranks must have in common: equal first states and buffers, and under shards units and one course of a step.

Ranks gather the shards of a unit together. Where one of them runs another unit, gathers of equal size are paired
wrongly without any error, so that the order in which units run is compared before a step counts.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from meshwise.executor.modules.losses import LossError
from meshwise.executor.recording.private_torch import is_compiled
from meshwise.executor.recording.rank_files import UserError


class CallCourse:
    """The order in which the units of a module run."""

    def __init__(self, units: Sequence[nn.Module]) -> None:
        self._digest = 0
        for place, unit in enumerate(units):
            unit.register_forward_pre_hook(partial(self._note_call, place))

    def _note_call(self, place: int, module: nn.Module, arguments: Any) -> None:
        self._digest = crc32(str(place).encode(), self._digest)

    def take_digest(self) -> float:
        """Return a number of the course since the last one was taken."""
        digest, self._digest = self._digest, 0
        return float(digest)


class RenewedBuffers:
    """Finds buffers that a step makes of the samples of one rank or microbatch, where one process has one of all.

    Averages of codes are such buffers, and so are running statistics of norms of the user's own; torch's batch norms
    have those of all ranks. Whole numbers, such as counters of steps, do not count.

    Parameters
    ----------
    module
        As it is before a step.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._earlier = {name: buffer.detach().clone() for name, buffer in self._list_buffers().items()}

    def require_equal(self, num_microbatches: int) -> None:
        """Raise `LossError` where ranks have renewed a buffer differently, or several microbatches have renewed one."""
        for name, buffer in self._list_buffers().items():  # forward may have put others in their place
            change = torch.stack((self._measure(buffer), self._measure(self._earlier.get(name, buffer))))
            is_renewed = bool(change[0] != change[1])
            extremes = torch.stack((change[0], -change[0], change.new_tensor(float(is_renewed))))
            if dist.is_initialized():
                dist.all_reduce(extremes, dist.ReduceOp.MAX)
            most, least, renewed = extremes.tolist()
            rule = f"a buffer that forward renews is made once of a whole batch, met {name}"
            if most != -least:
                nearest = "data=1, or a sum over ranks by torch.distributed in forward"
                raise LossError(f"{rule}, which each rank makes of its own samples; nearest: {nearest}")
            if renewed and num_microbatches > 1:
                raise LossError(f"{rule}, which each microbatch renews; nearest: num_microbatches=1")

    def _list_buffers(self) -> dict[str, Tensor]:
        return {
            f"{name}.{key}".lstrip("."): buffer
            for name, part in self._module.named_modules()
            if not isinstance(part, _BatchNorm)
            for key, buffer in part.named_buffers(recurse=False)
            if buffer.is_floating_point() and buffer.numel()
        }

    @staticmethod
    def _measure(buffer: Tensor) -> Tensor:
        """Return a number that changes with the values of a buffer and with their order."""
        values = buffer.detach().double().nan_to_num().flatten()
        return (values * torch.arange(1, len(values) + 1, device=values.device, dtype=values.dtype).sqrt()).sum()


class CompilerError(UserError):
    """A part of a module that is compiled together with what ranks gather one at a time."""


def require_compiled_units(units: Sequence[nn.Module], module: nn.Module) -> None:
    """Raise `CompilerError` where a compiled part has units in it: it was traced with whole parameters of all."""
    unit_ids = set(map(id, units))
    for name, part in module.named_modules():
        has_units = part is module or any(id(inner) in unit_ids for inner in part.modules() if inner is not part)
        if has_units and is_compiled(part):
            met = f"met {name or type(part).__name__}, which is compiled whole"
            raise CompilerError(
                f"blocks are compiled one by one under ZeRO, {met}; nearest: block.compile(), or zero=0"
            )


def broadcast_states(module: nn.Module) -> None:
    """Give all ranks the parameters and buffers of rank 0; parameters without values are not yet there."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta:
            dist.broadcast(tensor.detach(), 0)


def list_own_units(units: Sequence[nn.Module], module: nn.Module) -> tuple[nn.Module, ...]:
    """Return the units whose parameters belong to no other unit, and to nothing outside units."""
    inside = {id(part) for unit in units for part in unit.modules()}
    outside = [part for part in module.modules() if id(part) not in inside]
    owners = Counter(id(parameter) for unit in units for parameter in unit.parameters())
    owners.update({id(parameter) for part in outside for parameter in part.parameters(recurse=False)})
    return tuple(unit for unit in units if all(owners[id(parameter)] == 1 for parameter in unit.parameters()))
