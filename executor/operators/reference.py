"""The same training run of a module by one process: the module itself, on the whole batch at once."""

from typing import Any

import torch

from executor.operators.job import OperatorJob
from executor.operators.trainer import make
from executor.optimizer import kind_of


def train(job: OperatorJob) -> tuple[tuple[float, ...], dict[str, Any]]:
    """Return the losses, and the last gradients, the parameters and the buffers that changed by name as arrays.

    Nothing of the plan is used: no microbatch, no captured program.
    """
    made = make(job)
    kind, options = kind_of(job.optimizer)
    module = made.module.train()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    optimizer = kind(module.parameters(), **options)
    losses = []
    for _ in range(job.steps):
        optimizer.zero_grad(set_to_none=True)
        loss = module(*(tensor.clone() for tensor in made.inputs)).reshape(())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    arrays: dict[str, Any] = {}
    for name, parameter in module.named_parameters():
        arrays[f"parameter {name}"] = parameter.detach().numpy()
        arrays[f"gradient {name}"] = (parameter.grad if parameter.grad is not None else parameter * 0).detach().numpy()
    changed = {name: each for name, each in module.named_buffers() if not torch.equal(each, before[name])}
    arrays |= {f"buffer {name}": each.numpy() for name, each in changed.items()}
    return tuple(losses), arrays
