"""A module for trials whose results are compared, without draws of dropout, batch statistics and lower precision."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from meshwise.executor.capture.grouped_products import find_grouped_product

Result = TypeVar("Result")


@contextmanager
def keep_draws() -> Iterator[None]:
    """Leave torch's random draws, on the host and on the current GPU, as they were before the body."""
    host_draws = torch.get_rng_state()
    has_gpu: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpu_draws = torch.cuda.get_rng_state() if has_gpu else None
    try:
        yield
    finally:
        torch.set_rng_state(host_draws)
        if gpu_draws is not None:
            torch.cuda.set_rng_state(gpu_draws)


def list_dropouts(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the parts of a module, with their attributes, that keep a probability of dropping."""
    return [
        (part, name)
        for part in module.modules()
        for name, value in vars(part).items()
        if isinstance(value, float) and ("drop" in name or (name == "p" and "Dropout" in type(part).__name__))
    ]


def reshard(module: nn.Module) -> None:
    """Free the whole parameters that a forward without a backward has left in a module of ``fully_shard``."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def drop_nothing(module: nn.Module) -> None:
    """Have the dropout of modules drop nothing, that of attention and recurrent layers included."""
    for part, name in list_dropouts(module):
        setattr(part, name, 0.0)


@contextmanager
def keep_quiet(module: nn.Module) -> Iterator[None]:
    """Run the body without dropout and batch statistics; modes, probabilities, buffers and draws stay as they were."""
    modes = {part: part.training for part in module.modules()}
    dropouts = [(part, name, getattr(part, name)) for part, name in list_dropouts(module)]
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    drop_nothing(module)
    for part in module.modules():
        if isinstance(part, _BatchNorm):
            part.training = False
    try:
        with keep_draws():
            yield
    finally:
        for part, is_training in modes.items():
            part.training = is_training
        for part, name, value in dropouts:
            setattr(part, name, value)
        reshard(module)
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])


def run_without_gradients(run: Callable[[], Result]) -> Result:
    """Return what a function of a module returns, without gradients unless it takes some itself.

    So do networks of physics, whose loss has derivatives of their outputs.
    """
    try:
        with torch.no_grad():
            return run()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        with torch.enable_grad():
            return run()


def turn_to_double(module: Any) -> None:
    """Turn a module to fp64; experts of transformers then take products that fp64 has."""
    module.double()
    if _chooses_experts(module):
        if module.config._experts_implementation != DOUBLE_EXPERTS:
            module.own_experts = module.config._experts_implementation
        module.set_experts_implementation(DOUBLE_EXPERTS)


DOUBLE_EXPERTS = "batched_mm"
"""The products of experts of transformers that fp64 has."""


@contextmanager
def keep_experts(module: Any) -> Iterator[None]:
    """Run a capture of the body with the products of experts that a module had before it was turned to fp64.

    What is captured has them in fp64, too.
    """
    own_experts = getattr(module, "own_experts", None)
    if own_experts is None:
        yield
        return
    module.set_experts_implementation(own_experts)
    try:
        yield
    finally:
        module.set_experts_implementation(DOUBLE_EXPERTS)


def _chooses_experts(module: Any) -> bool:
    return bool(getattr(module, "_can_set_experts_implementation", lambda: False)())


class KeepDouble(TorchFunctionMode):
    """Leaves tensors of fp64 as they are where a module turns them to fp32, as the norms and losses of many do.

    The comparison of two runs in fp64 would else be one of roundings to fp32.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, without its turn to fp32."""
        tensor = args[0] if args else None
        if isinstance(tensor, Tensor) and tensor.dtype is torch.float64:
            if function is Tensor.float:
                return tensor
            function = find_grouped_product(function, args, kwargs or {})
            if function is Tensor.type_as and args[1].dtype is torch.float32:
                return tensor
            args = tuple(torch.float64 if item is torch.float32 else item for item in args)
            if kwargs and kwargs.get("dtype") is torch.float32:
                kwargs = kwargs | {"dtype": torch.float64}
        return function(*args, **(kwargs or {}))
