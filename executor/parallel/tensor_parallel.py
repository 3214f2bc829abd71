"""Tensor parallelism: Megatron's cut of a network into columns and rows, applied with DTensor."""

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from meshwise.executor.model.network import Network
from meshwise.executor.recording.tensors import fill, flatten


def apply(network: Network, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Cut ``network`` over the one-dimensional ``mesh``, in place.

    Activations between blocks are plain tensors: whole on every rank or, with ``sequence_parallel``, each rank's part
    of the sequence.
    """
    boundary = Shard(1) if sequence_parallel else Replicate()
    layer = layer_plan(boundary) | {
        "mixture.shared_up": ColwiseParallel(input_layouts=boundary),
        "mixture.shared_down": RowwiseParallel(output_layouts=boundary),
    }  # the router is not cut: every rank routes its own tokens
    logits = ColwiseParallel(input_layouts=boundary, output_layouts=Shard(-1), use_local_output=False)
    head: dict[str, ParallelStyle] = {"logits": logits}
    if sequence_parallel:
        layer |= {"input_norm": SequenceParallel(), "feed_forward_norm": SequenceParallel()}
        head |= {"final_norm": SequenceParallel()}
    for block in network.decoder_layers():
        names = dict(block.named_modules())
        parallelize_module(block, mesh, {name: style for name, style in layer.items() if name in names})
        if sequence_parallel and block.mixture is not None:
            _replicate_router(block.mixture.router, mesh)
    if network.embedding is not None:
        _cut_embedding(network.embedding, mesh, sequence_parallel)
    if network.head is not None:
        parallelize_module(network.head, mesh, head)
    network.tie_embeddings()


def layer_plan(boundary: Placement) -> dict[str, ParallelStyle]:
    """Return how the products of a layer are cut; ``boundary`` is the layout of what enters and leaves the layer."""
    return {
        "qkv": ColwiseParallel(input_layouts=boundary),
        "projection": RowwiseParallel(output_layouts=boundary),
        "up": ColwiseParallel(input_layouts=boundary),
        "down": RowwiseParallel(output_layouts=boundary),
    }


def _replicate_router(router: nn.Linear, mesh: DeviceMesh) -> None:
    """Make the router's weight a replicated DTensor, so that its gradient on a rank counts as partial."""
    router.weight = nn.Parameter(DTensor.from_local(router.weight.detach(), mesh, [Replicate()], run_check=False))


def _cut_embedding(embedding: nn.Module, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    scatters = sequence_parallel and embedding.position is None  # one reduce-scatter sums the ranks' rows and cuts them
    table = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1) if scatters else Replicate())
    parallelize_module(embedding, mesh, {"token": table})
    weight: Any = embedding.get_parameter("token.weight")
    weight.register_post_accumulate_grad_hook(_keep_own_rows)
    if sequence_parallel and not scatters:
        scatter = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
        parallelize_module(embedding, mesh, scatter)


def _keep_own_rows(table: nn.Parameter) -> None:
    """Keep only this rank's rows of the table's gradient: torch leaves the gradient of all rows on every rank."""
    gradient = table.grad
    if isinstance(table, DTensor) and isinstance(gradient, DTensor) and gradient.placements != table.placements:
        rows = gradient.redistribute(placements=table.placements).to_local()
        rows = rows.clone() if rows.untyped_storage().nbytes() > rows.nbytes else rows  # a view would keep all rows
        table.grad = DTensor.from_local(rows, table.device_mesh, table.placements, run_check=False)


def complete_gradients(network: nn.Module) -> None:
    """Sum the gradients that are partial over the tensor axis, as of sequence-parallel norms, in one all-reduce."""
    distributed = [(p, p.grad) for p in network.parameters() if isinstance(p.grad, DTensor)]
    partial_gradients = [(p, g) for p, g in distributed if any(placement.is_partial() for placement in g.placements)]
    if not partial_gradients:
        return
    parts, mesh = [gradient.to_local() for _, gradient in partial_gradients], partial_gradients[0][1].device_mesh
    flat = flatten(parts)
    dist.all_reduce(flat, group=mesh.get_group())
    fill(parts, flat)
    for (parameter, _), part in zip(partial_gradients, parts, strict=True):
        parameter.grad = DTensor.from_local(part, mesh, [Replicate()], run_check=False)
