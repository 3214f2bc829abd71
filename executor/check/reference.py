"""Training by one process: the whole model on the whole batch, with plain autograd.

For PipeDream and 2BW the process computes what their authors define: each stage on the version of the weights that is
due. It runs microbatch after microbatch and keeps all versions of all weights, so it needs no pipeline, no order of
passes and no stashing.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from meshwise.executor.job import Job
from meshwise.executor.model.network import Network, cross_entropy, initialize
from meshwise.executor.training import data
from meshwise.executor.training.data import open_text
from meshwise.executor.training.optimizer import MAX_NORM, find_optimizer, set_learning_rate
from meshwise.executor.training.trainer import DTYPES
from meshwise.strategies.plan.plan import Plan


def train_unflushed(job: Job) -> tuple[tuple[float, ...], dict[str, Any]]:
    """Return the losses and, as arrays by name, the gradients of the last update and the parameters."""
    plan, training = job.plan, job.training
    blocks = [name for stage in plan.stages for name in stage.blocks]
    network = Network(job.spec, training.sequence, blocks).to(DTYPES[training.precision])
    initialize(network, job.seed)
    kind, options = find_optimizer(training.optimizer)
    optimizer = kind(network.parameters(), **options)
    stage_of = {name: stage for stage, stage_plan in enumerate(plan.stages) for name in stage_plan.blocks}
    history = [_copy_parameters(network)]
    losses = []
    update_interval = plan.num_microbatches // plan.updates
    for step in range(job.steps):
        losses.append(0.0)
        for number in range(plan.num_microbatches):
            microbatch = step * plan.num_microbatches + number
            weights = {
                name: history[version_of(plan, stage_of[_find_block(name)], microbatch)][name].requires_grad_()
                for name in history[0]
            }
            tokens, targets = _load_microbatch(job, step, number)
            loss = cross_entropy(functional_call(network, weights, (tokens,)), targets)
            if number % update_interval == 0:
                optimizer.zero_grad()
            _accumulate(network, torch.autograd.grad(loss / update_interval, list(weights.values())))
            losses[-1] += loss.item() / plan.num_microbatches
            if (number + 1) % update_interval == 0:
                set_learning_rate(optimizer, job.learning_rate.rate_at(step, training.optimizer))
                optimizer.step()
                history.append(_copy_parameters(network))
    return tuple(losses), _list_arrays(network)


def _list_arrays(network: Network) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for name, parameter in network.named_parameters():
        arrays[f"parameter {name}"] = parameter.detach().numpy()
        arrays[f"gradient {name}"] = parameter.grad.numpy() if parameter.grad is not None else None
    return arrays


def version_of(plan: Plan, stage: int, microbatch: int) -> int:
    """Return the number of updates in the weights on which a stage runs a microbatch, counted over all steps.

    PipeDream: ``w(t+1) = w(t) - v f'(w_1(t-n+1), w_2(t-n+2), ..., w_n(t))`` for ``n`` stages, counted from 1 (SOSP
    2019, section 3.3). 2BW: ``W(t+1) = W(t) - v f'(W(t-1))`` for all of them (ICML 2021, section 3.1).
    """
    if plan.rule.updates_every_microbatch:
        return max(microbatch - plan.pipeline + stage + 1, 0)
    return max(microbatch // plan.num_microbatches - 1, 0)


def _copy_parameters(network: Network) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in network.named_parameters()}


def _accumulate(network: Network, gradients: tuple[Tensor, ...]) -> None:
    for parameter, gradient in zip(network.parameters(), gradients, strict=True):
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _find_block(name: str) -> str:
    """Return the block that a parameter is in, as plans name it."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


def _load_microbatch(job: Job, step: int, number: int) -> tuple[Tensor, Tensor]:
    """Return the tokens and targets of a microbatch, of all data ranks together."""
    plan, training = job.plan, job.training
    sizes = plan.microbatch if isinstance(plan.microbatch, tuple) else (plan.microbatch,) * plan.data
    rank_parts: list[list[Tensor]] = [[], []]
    text = open_text(job.data, job.seed)
    for rank, size in enumerate(sizes):
        arrays = data.load_share(step, training.global_batch, training.sequence, rank, sizes, text)
        for parts, array in zip(rank_parts, arrays, strict=True):
            parts.append(torch.from_numpy(array.copy())[number * size : (number + 1) * size])
    return torch.cat(rank_parts[0]), torch.cat(rank_parts[1])


def train(job: Job) -> tuple[tuple[float, ...], dict[str, Any]]:
    """Return the losses and, as arrays by name, the last gradients and the parameters.

    Of the plan only the names of blocks are used: there are no microbatches, no groups and no recomputation. Steps
    without a flush are another computation, which `train_unflushed` runs.
    """
    if job.plan.asynchronous:
        return train_unflushed(job)
    blocks = [name for stage in job.plan.stages for name in stage.blocks]
    network = Network(job.spec, job.training.sequence, blocks).to(DTYPES[job.training.precision])
    initialize(network, job.seed)
    kind, options = find_optimizer(job.training.optimizer)
    optimizer = kind(network.parameters(), **options)
    text = open_text(job.data, job.seed)
    losses = []
    for step in range(job.steps):
        tokens, targets = data.load_batch(step, job.training.global_batch, job.training.sequence, text)
        optimizer.zero_grad()
        loss = cross_entropy(network(torch.from_numpy(tokens.copy())), torch.from_numpy(targets.copy()))
        loss.backward()  # type: ignore[no-untyped-call]
        if job.training.gradient_clipping:
            nn.utils.clip_grad_norm_(network.parameters(), MAX_NORM)
        set_learning_rate(optimizer, job.learning_rate.rate_at(step, job.training.optimizer))
        optimizer.step()
        losses.append(loss.item())
    return tuple(losses), _list_arrays(network)
