"""Parameters that some forwards leave unused, under shards: ranks reduce all gradients of a unit together.

Every parameter of a unit gets a gradient, of zeros where forward did not use it. One whose module no rank has called
has none in the end, and neither has one that never had a gradient: as in one process, the optimizer passes them over.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwise.executor.modules.batches import map_tensors


class UnusedParameters:
    """Gives all parameters of units a gradient, and takes it away from those that no rank has used in a step.

    It is made before the units are sharded, so that its hooks run while their parameters are whole.

    Parameters
    ----------
    units
        Modules whose own parameters are gathered together; those of nested units are not among them. The last one is
        the whole module.
    idle_names
        Parameters that never had a gradient (`meshwise.executor.modules.probe.Findings`).
    """

    def __init__(self, units: Sequence[nn.Module], idle_names: frozenset[str]) -> None:
        parameters = dict(units[-1].named_parameters())
        idle = {id(parameters[name]) for name in idle_names}
        for unit in units:
            unit.register_forward_hook(partial(_touch, _list_owners(unit, units)))
        owners = list(dict.fromkeys(owner for unit in units for owner in _list_owners(unit, units)))
        self._slots = [
            (place, owner, name, id(parameter) in idle)
            for place, owner in enumerate(owners)
            for name, parameter in owner.named_parameters(recurse=False)
            if parameter.requires_grad
        ]
        self._called: set[int] = set()
        for place, owner in enumerate(owners):
            owner.register_forward_pre_hook(partial(self._note_call, place))

    def _note_call(self, place: int, module: nn.Module, arguments: Any) -> None:
        self._called.add(place)

    def drop_gradients(self, device: torch.device) -> None:
        """Take the gradients of zeros from parameters that no rank has used in a step."""
        parameters = [getattr(owner, name) for _, owner, name, _ in self._slots]
        flags = [
            float(_is_zero(parameter) and (is_idle or place not in self._called))
            for parameter, (place, _, _, is_idle) in zip(parameters, self._slots, strict=True)
        ]
        are_unused = torch.tensor(flags, device=device)
        dist.all_reduce(are_unused, dist.ReduceOp.MIN)
        for parameter, is_unused in zip(parameters, are_unused.tolist(), strict=True):
            if is_unused:
                parameter.grad = None
        self.forget_calls()

    def forget_calls(self) -> None:
        """Forget what was called, as in an evaluation between two steps."""
        self._called.clear()


def _list_own(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad]


def _list_owners(unit: nn.Module, units: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules in a unit, and in no unit inside it, that have parameters of their own."""
    nested = {id(part) for other in units if other is not unit for part in other.modules()}
    is_outer = id(unit) not in nested
    parts = [part for part in unit.modules() if not is_outer or id(part) not in nested]
    return [part for part in parts if _list_own(part)]


def _touch(owners: Sequence[nn.Module], unit: nn.Module, arguments: Any, outputs: Any) -> Any:
    """Return outputs that depend on all parameters of a unit, and are the same numbers."""
    if not torch.is_grad_enabled():
        return outputs
    first_values = [parameter.flatten()[0] for owner in owners for parameter in _list_own(owner)]
    if not first_values:
        return outputs
    nothing = 0.0 * torch.stack([value.float() for value in first_values]).sum()

    def bind(tensor: Tensor) -> Tensor:
        return tensor + nothing.to(tensor.dtype) if tensor.is_floating_point() else tensor

    if not is_dataclass(outputs) or isinstance(outputs, type):
        return map_tensors(outputs, bind)
    result = copy(outputs)  # as transformers' models return
    for field in fields(outputs):
        value = getattr(outputs, field.name)
        if value is not None:
            setattr(result, field.name, map_tensors(value, bind))
    return result


def _is_zero(parameter: nn.Parameter) -> bool:
    """Return whether this rank's part of a gradient is zeros, or none."""
    gradient: Tensor | None = parameter.grad
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return local is None or not bool(local.any())
