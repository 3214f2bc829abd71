"""A module without random draws of dropout and without batch statistics, for trials whose results are compared."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def list_dropouts(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the parts of a module, with their attributes, that keep a probability of dropping."""
    return [
        (part, name)
        for part in module.modules()
        for name, value in vars(part).items()
        if isinstance(value, float) and ("drop" in name or (name == "p" and "Dropout" in type(part).__name__))
    ]


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
    draws = torch.get_rng_state()
    drop_nothing(module)
    for part in module.modules():
        if isinstance(part, _BatchNorm):
            part.training = False
    try:
        yield
    finally:
        torch.set_rng_state(draws)
        for part, is_training in modes.items():
            part.training = is_training
        for part, name, value in dropouts:
            setattr(part, name, value)
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])
