"""A stage of a user's module on one rank: a generated program on this rank's parts of parameters and values.

It is an ordinary module of torch: autograd runs its backward, with the collectives that the layouts need in it.
"""

import traceback
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from meshwise.executor.capture.captured import NamedDims
from meshwise.executor.capture.source_lines import prefix_line
from meshwise.executor.operators.calls import Draws
from meshwise.executor.operators.collectives import RankMesh
from meshwise.strategies.plan.sharding import REPLICATED, ShardingSpec


class Placement(NamedTuple):
    """How ranks have a tensor of the module: the layout of its named dims.

    Parameters
    ----------
    dims
        For each torch dim of the tensor, and of its parts, the named dims that it has.
    sizes
        The size of each named dim of the whole tensor.
    """

    dims: NamedDims
    sizes: Mapping[str, int]
    layout: ShardingSpec
    shape: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All named dims in order."""
        return tuple(dim for group in self.dims for dim in group)

    def cut(self, ranks: RankMesh, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor, as a copy."""
        values = whole.reshape([self.sizes[dim] for dim in self.names])
        part = ranks.redistribute(values, self.names, REPLICATED, self.layout)
        return part.reshape(self.find_part_shape(ranks)).clone()

    def gather(self, ranks: RankMesh, part: Tensor) -> Tensor:
        """Return the whole tensor from the parts of all ranks, all of which call this."""
        values = part.reshape([self._count(ranks, dim) for dim in self.names])
        return ranks.redistribute(values, self.names, self.layout, REPLICATED).reshape(self.shape)

    def find_part_shape(self, ranks: RankMesh) -> tuple[int, ...]:
        """Return the shape of a rank's part."""
        if not self.names:
            return self.shape
        return tuple(prod(self._count(ranks, dim) for dim in group) for group in self.dims)

    def count_copies(self, ranks: RankMesh) -> int:
        """Return how many ranks have the same part."""
        return prod(size for axis, size in ranks.size.items() if axis not in self.layout.cut_axes)

    def _count(self, ranks: RankMesh, dim: str) -> int:
        return self.sizes[dim] // ranks.count_parts(self.layout.axes(dim))


def sum_gradients(
    ranks: RankMesh, named_gradients: Mapping[str, Tensor], summed_axes: Mapping[str, tuple[str, ...]]
) -> None:
    """Sum the gradients of parameters over the axes that are named for each, in one message an axis."""
    for axis in ranks.size:
        gradients = [gradient for name, gradient in named_gradients.items() if axis in summed_axes[name]]
        if gradients:
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            pieces = torch.split(ranks.all_reduce(flat, axis), [gradient.numel() for gradient in gradients])
            for gradient, piece in zip(gradients, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))


def list_gradients(parts: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the gradients of parameters that have one, by name."""
    return {name: part.grad for name, part in parts.items() if part.grad is not None}


class LocalStage(nn.Module):
    """A stage on one rank.

    ``received`` and ``sent`` are the names of the values that cross its boundaries, ``inputs`` of the module's inputs
    that it reads; ``names`` maps the names of its own parameters to those of the user's module, and ``parts`` has these
    parameters by the latter. ``input_places`` are the places of ``inputs`` among all inputs of the module.
    """

    def __init__(
        self,
        program: GraphModule,
        ranks: RankMesh,
        *,
        received: tuple[str, ...],
        sent: tuple[str, ...],
        inputs: tuple[str, ...],
        input_places: tuple[int, ...],
        examples: Mapping[str, Tensor],
        parts: Mapping[str, nn.Parameter],
        placements: Mapping[str, Placement],
        summed_axes: Mapping[str, tuple[str, ...]],
        buffers: Mapping[str, tuple[Tensor, Placement]],
        draws: Draws,
        lines: Mapping[str, str],
    ) -> None:
        super().__init__()
        self.program, self.ranks = program, ranks
        self.received, self.sent, self.inputs = received, sent, inputs
        self.input_places = input_places
        self.parts, self.placements = dict(parts), dict(placements)
        self.buffer_parts = dict(buffers)
        self.draws = draws
        known_names = {id(part): name for name, part in parts.items()}
        self.names = {own_name: known_names[id(part)] for own_name, part in self.named_parameters()}
        self.summed_axes = dict(summed_axes)
        self._examples, self._lines = dict(examples), dict(lines)

    def forward(self, received: Sequence[Tensor] = (), inputs: Sequence[Tensor] = ()) -> Any:
        """Return the values for the next stage, in the order of ``sent``; of the last stage the loss.

        ``received`` and ``inputs`` are in the order of these names; inputs have this rank's samples. A received value
        of floating point has a gradient where the caller says that it requires one.
        """
        try:
            return self.program.forward(*received, *inputs)
        except RuntimeError as error:
            line = self._find_line(error)
            if line:
                error.args = (prefix_line(line, str(error)),)
            raise

    def example(self, name: str) -> Tensor:
        """Return a meta tensor of the shape and dtype that a received, sent or input value has on this rank."""
        return self._examples[name]

    def sum_gradients(self) -> None:
        """Sum gradients over the axes along which ranks have the same parameter, but other parts of its operators."""
        sum_gradients(self.ranks, list_gradients(self.parts), self.summed_axes)

    def gather_parameter(self, name: str, part: Tensor | None = None) -> Tensor:
        """Return a whole parameter, by its name in the user's module, from the parts of all ranks.

        ``part`` is a tensor of the parameter's shape to gather instead: its gradient, or a state of the optimizer.
        """
        return self.placements[name].gather(self.ranks, self.parts[name].detach() if part is None else part)

    def cut_parameter(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole parameter, or of a tensor of its shape."""
        return self.placements[name].cut(self.ranks, whole)

    def gather_buffer(self, name: str) -> Tensor:
        """Return a whole buffer that forward renews, from the parts of all ranks."""
        part, placement = self.buffer_parts[name]
        return placement.gather(self.ranks, part)

    def write_buffer(self, name: str, whole: Tensor) -> None:
        """Set this rank's part of a buffer that forward renews."""
        part, placement = self.buffer_parts[name]
        part.copy_(placement.cut(self.ranks, whole))

    def _find_line(self, error: RuntimeError) -> str:
        """Return the user's line of the operator of the program that failed; empty where it is not known."""
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if frame.filename.startswith("<eval_with_key>"):
                name = (frame.line or "").partition("=")[0].strip()
                return self._lines.get(name, "")
        return ""
