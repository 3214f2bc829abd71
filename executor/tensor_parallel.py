"""Tensor parallelism: the Megatron cut of a network, applied with DTensor."""

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

from executor.model import Network


def apply(network: Network, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Cut ``network`` over the one-dimensional ``mesh`` in place.

    Activations between blocks are plain tensors: whole on every rank, or each rank's part of
    the sequence with ``sequence_parallel``.
    """
    between = Shard(1) if sequence_parallel else Replicate()
    layer = layer_plan(between)
    logits = ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)
    head: dict[str, ParallelStyle] = {"logits": logits}
    if sequence_parallel:
        layer |= {"input_norm": SequenceParallel(), "feed_forward_norm": SequenceParallel()}
        head |= {"final_norm": SequenceParallel()}
    for block in network.decoder_layers():
        routed = {f"mixture.{name}": how for name, how in mixture_plan(between).items()}
        names = dict(block.named_modules())
        parallelize_module(block, mesh, {name: how for name, how in (layer | routed).items() if name in names})
    if network.embedding is not None:
        _cut_embedding(network.embedding, mesh, sequence_parallel)
    if network.head is not None:
        parallelize_module(network.head, mesh, head)
    network.tie()


def layer_plan(between: Placement) -> dict[str, ParallelStyle]:
    """Return how a layer's products are cut; ``between`` is the layout of what enters and leaves it."""
    return {
        "qkv": ColwiseParallel(input_layouts=between),
        "projection": RowwiseParallel(output_layouts=between),
        "up": ColwiseParallel(input_layouts=between),
        "down": RowwiseParallel(output_layouts=between),
    }


def mixture_plan(between: Placement) -> dict[str, ParallelStyle]:
    """Return how the products of a mixture are cut that all tokens go through; every rank routes the tokens it has."""
    shared: dict[str, ParallelStyle] = {
        "shared_up": ColwiseParallel(input_layouts=between),
        "shared_down": RowwiseParallel(output_layouts=between),
    }
    return shared | ({"router": SequenceParallel(use_local_output=True)} if between == Shard(1) else {})


def _cut_embedding(embedding: nn.Module, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    table = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    parallelize_module(embedding, mesh, {"token": table})
    if sequence_parallel:
        scatter = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
        parallelize_module(embedding, mesh, scatter)


def complete_gradients(network: nn.Module) -> None:
    """Sum gradients that are partial over the tensor axis, as those of sequence-parallel norms are."""
    for parameter in network.parameters():
        gradient = parameter.grad
        if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
            parameter.grad = gradient.redistribute(placements=parameter.placements)
