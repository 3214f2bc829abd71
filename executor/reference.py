"""One process that trains the whole model on the whole batch with plain autograd."""

from typing import Any

import torch
from torch import nn

from executor import data
from executor.clipping import MAX_NORM
from executor.job import Job
from executor.model import Network, cross_entropy, initialize
from executor.optimizer import kind_of, set_learning_rate
from executor.text import text_of
from executor.trainer import DTYPES
from executor.unflushed_reference import train_unflushed


def train(job: Job) -> tuple[tuple[float, ...], dict[str, Any]]:
    """Return the losses, and the last gradients and the parameters by name as arrays.

    Nothing of the plan is used but the names of its blocks: no microbatches, no groups, no recompute. Steps without a
    flush are another computation, which `train_unflushed` does.
    """
    if job.plan.asynchronous:
        return train_unflushed(job)
    blocks = [name for stage in job.plan.stages for name in stage.blocks]
    network = Network(job.spec, job.training.sequence, blocks).to(DTYPES[job.training.precision])
    initialize(network, job.seed)
    kind, options = kind_of(job.training.optimizer)
    optimizer = kind(network.parameters(), **options)
    text = text_of(job.data, job.seed)
    losses = []
    for step in range(job.steps):
        tokens, targets = data.batch(step, job.training.global_batch, job.training.sequence, text)
        optimizer.zero_grad()
        loss = cross_entropy(network(torch.from_numpy(tokens.copy())), torch.from_numpy(targets.copy()))
        loss.backward()  # type: ignore[no-untyped-call]
        if job.training.gradient_clipping:
            nn.utils.clip_grad_norm_(network.parameters(), MAX_NORM)
        set_learning_rate(optimizer, job.learning_rate.at(step, job.training.optimizer))
        optimizer.step()
        losses.append(loss.item())
    arrays: dict[str, Any] = {}
    for name, parameter in network.named_parameters():
        arrays[f"parameter {name}"] = parameter.detach().numpy()
        arrays[f"gradient {name}"] = parameter.grad.numpy() if parameter.grad is not None else None
    return tuple(losses), arrays
