"""Whole parameters in place of a rank's parts, while a module is evaluated or its weights are exported."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from meshwise.executor.operators.local_stage import LocalStage


def put_parts(module: nn.Module, named_parts: Mapping[str, nn.Parameter]) -> None:
    """Have a module's parameters be this rank's parts, by name; those without parts stay."""
    parts = {id(parameter): named_parts.get(name) for name, parameter in module.named_parameters()}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            part = None if parameter is None else parts.get(id(parameter))
            if part is not None:
                owner._parameters[name] = part


@contextmanager
def make_whole(module: nn.Module, stage: LocalStage) -> Iterator[None]:
    """Run the body on whole parameters and buffers, with all ranks together; each has its parts again afterwards."""
    parts = {name: parameter.data for name, parameter in stage.parts.items()}
    with torch.no_grad():
        for name, parameter in stage.parts.items():
            parameter.data = stage.gather_parameter(name)
    gather_buffers(module, stage)
    try:
        yield
    finally:
        for name, parameter in stage.parts.items():
            parameter.data = parts[name]


@torch.no_grad()
def gather_buffers(module: nn.Module, stage: LocalStage) -> None:
    """Give a module the buffers that forward renews, of which ranks have parts; all ranks call it."""
    buffers = dict(module.named_buffers())
    for name in stage.buffer_parts:
        buffers[name].copy_(stage.gather_buffer(name))


@torch.no_grad()
def cut_buffers(module: nn.Module, stage: LocalStage) -> None:
    """Give ranks their parts of the buffers of a module."""
    buffers = dict(module.named_buffers())
    for name in stage.buffer_parts:
        stage.write_buffer(name, buffers[name])
