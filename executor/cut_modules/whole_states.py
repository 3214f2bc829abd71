"""Whole parameters, states of the optimizer and buffers in place of a rank's parts, while a checkpoint is made or read.

So a checkpoint is the same under any plan. A rank then has the whole module in its memory.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwise.executor.modules.states import StatesError
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
def make_whole(
    module: nn.Module, stage: LocalStage, optimizer: Optimizer | None, *, keeps_changes: bool = False
) -> Iterator[None]:
    """Run the body on whole tensors, with all ranks together.

    Parameters
    ----------
    keeps_changes
        Whether ranks cut what the body leaves; else each has the parts that it had before.
    """
    buffers = dict(module.named_buffers())
    parts = {name: parameter.data for name, parameter in stage.parts.items()}
    states = {} if optimizer is None else {name: optimizer.state.get(stage.parts[name], {}) for name in parts}
    part_states = {name: dict(state) for name, state in states.items()}
    with torch.no_grad():
        for name, parameter in stage.parts.items():
            parameter.data = stage.gather_parameter(name)
            _map_states(stage, name, states.get(name, {}), parts[name].shape, is_whole=True)
        for name in stage.buffer_parts:
            buffers[name].copy_(stage.gather_buffer(name))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, parameter in stage.parts.items():
                state = {} if optimizer is None else optimizer.state.get(parameter, {})
                if keeps_changes:
                    whole_shape = parameter.shape
                    parameter.data = stage.cut_parameter(name, parameter.data)
                    _map_states(stage, name, state, whole_shape, is_whole=False)
                else:
                    parameter.data = parts[name]
                    state.update(part_states.get(name, {}))
            if keeps_changes:
                for name in stage.buffer_parts:
                    stage.write_buffer(name, buffers[name])


def _map_states(stage: LocalStage, name: str, state: dict[str, Any], shape: torch.Size, *, is_whole: bool) -> None:
    """Gather, or cut, the states of a parameter, whose shape is ``shape``; numbers of steps stay as they are."""
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.numel() == 1:
            continue
        if value.shape != shape:
            raise StatesError(
                f"states of the optimizer have the shape of their parameter, met {key} of {name} with "
                f"{list(value.shape)} for {list(shape)}; nearest: AdamW"
            )
        state[key] = stage.gather_parameter(name, value) if is_whole else stage.cut_parameter(name, value)
