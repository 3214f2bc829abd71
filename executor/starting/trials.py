"""Runs a module whose parameters have no values: each has some while an operator reads it.

So a forward is tried without the memory of the module. What is asked of it first, whether its loss adds up over
samples, is no matter of values: cheap ones answer it. First values, one after the other, decide where these do not.
"""

from collections.abc import Callable, Mapping
from math import ceil, prod
from typing import Any, Protocol, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from meshwise.executor.recording.rank_files import UserError

Result = TypeVar("Result")

POOL = 1_000_003
"""Random numbers that trial values repeat: a prime, so that the rows of a table differ."""
LEAST_KEPT = 2**24
"""Bytes of values that are kept for the next operator at least; else those of the largest parameter."""

_FORM_GETTERS = ("shape", "dtype", "layout", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn")
_FORM = {
    *(getattr(Tensor, name).__get__ for name in _FORM_GETTERS),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.element_size, Tensor.__len__),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.storage_offset),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}
"""What is asked of a parameter without its values."""
_DEVICE_GETTERS: Mapping[Any, Callable[[torch.device], Any]] = {
    Tensor.device.__get__: lambda device: device,
    Tensor.is_meta.__get__: lambda device: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda device: device.type == "cpu",  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda device: device.type == "cuda",  # type: ignore[attr-defined]
}


class Readable(Protocol):
    """Values of parameters by name."""

    def read(self, name: str) -> Tensor:
        """Return the values of a parameter."""


class TrialValues:
    """Random values as a network may have: products keep the size of what they are given, and factors are about 1.

    They cost no draws, nor reading of files: a rank may make those of all parameters, one after the other.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._parameters = dict(module.named_parameters())
        self._pool = torch.randn(POOL, generator=torch.Generator().manual_seed(0), device="cpu").to(device)

    def read(self, name: str) -> Tensor:
        """Return the values of a parameter."""
        parameter = self._parameters[name]
        shape, size, first = parameter.shape, parameter.numel(), crc32(name.encode()) % POOL
        values = self._pool.roll(-first)
        values = values / prod(shape[1:]) ** 0.5 if len(shape) > 1 and size else 1 + 0.1 * values
        return values.to(parameter.dtype).repeat(ceil(size / POOL))[:size].view(shape)


class PassingValues(TorchFunctionMode):
    """Gives operators the values of the parameters of a module, which has none itself, and drops them again.

    Parameters
    ----------
    device
        Where they are then, and where the module takes its parameters to be.

    Attributes
    ----------
    has_read
        Whether any operator has read a parameter.
    """

    def __init__(self, module: nn.Module, values: Readable, device: torch.device) -> None:
        super().__init__()
        self.values, self.device, self.has_read = values, device, False
        self._names = {id(parameter): name for name, parameter in module.named_parameters() if parameter.is_meta}
        sizes = [parameter.nbytes for parameter in module.parameters()]
        self._limit = max(LEAST_KEPT, *sizes) if sizes else LEAST_KEPT
        self._kept: dict[str, Tensor] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch with values in the place of parameters."""
        first = args[0] if args else None
        if function in _DEVICE_GETTERS and id(first) in self._names:
            return _DEVICE_GETTERS[function](self.device)
        if function not in _FORM:
            args, kwargs = tree_map(self._find, args), tree_map(self._find, kwargs)
        return function(*args, **(kwargs or {}))

    def _find(self, item: Any) -> Any:
        name = self._names.get(id(item)) if isinstance(item, nn.Parameter) else None
        return item if name is None else self._read(name, item)

    def _read(self, name: str, parameter: nn.Parameter) -> Tensor:
        self.has_read = True
        values = self._kept.pop(name, None)
        if values is None:
            while self._kept and sum(item.nbytes for item in self._kept.values()) + parameter.nbytes > self._limit:
                del self._kept[next(iter(self._kept))]
            with torch.autocast(self.device.type, enabled=False):
                values = self.values.read(name).to(self.device, parameter.dtype)
        self._kept[name] = values  # the last one read is the last one dropped
        return values


class WholeNeededError(Exception):
    """A module that runs only with all its values in memory; the message says why."""


def try_forward(
    module: nn.Module,
    values: Readable,
    device: torch.device,
    run: Callable[[], Result],
    is_clear: Callable[[Result], bool] = lambda _: True,
) -> Result:
    """Return what a function finds out by forwards of a module whose parameters have no values, on all ranks.

    Parameters
    ----------
    values
        The first values of parameters; they are read where trial values make an error or no clear answer.
    is_clear
        Whether an answer of trial values holds.

    Raises
    ------
    WholeNeededError
        On all ranks, where some rank cannot run the module so.
    UserError
        What the function raises on first values.
    """
    answers: list[Result] = []
    mode = PassingValues(module, TrialValues(module, device), device)
    try:
        with torch.compiler.set_stance("force_eager"), mode:
            answers.append(run())
    except Exception:  # first values decide what it is
        answers.clear()
    if _agree(bool(answers) and (is_clear(answers[0]) or not mode.has_read), device):
        return answers[0]
    reason, error = "", None
    try:
        with torch.compiler.set_stance("force_eager"), PassingValues(module, values, device):
            answers = [run()]
    except UserError as own_error:
        error = own_error
    except Exception as own_error:
        reason = f"{type(own_error).__name__}: {' '.join(str(own_error).split())}"[:200]
    if not _agree(not reason, device):
        raise WholeNeededError(f"its forward on the first batch needs all values ({reason or 'on another rank'})")
    if error is not None:
        raise error
    return answers[0]


def _agree(holds: bool, device: torch.device) -> bool:
    """Return whether something holds on all ranks."""
    if not dist.is_initialized():
        return holds
    flag = torch.tensor(float(holds), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)
