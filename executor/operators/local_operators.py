"""ATen operators on the parts that a rank has, where that is not the same call.

Most operators do on parts what they do on wholes. Here are those that must know which part they have: a table of
which a rank has some rows, a bias that must be added once, a mean over more than a rank has.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from executor.operators.collectives import Ranks
from executor.operators.movement import Once

aten = torch.ops.aten


class Part(NamedTuple):
    """What a rank has of an operator.

    Parameters
    ----------
    summed
        Axes over which its result is partial.
    rows
        Axes that cut the first dim of its first argument.
    """

    ranks: Ranks
    summed: tuple[str, ...]
    rows: tuple[str, ...]


def run_on_part(node: Node, part: Part, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Return what the operator of a node makes of a rank's part."""
    special = _SPECIAL.get(node.target) if part.summed else None
    if special is not None:
        return special(part, *arguments, **options)
    return node.target(*arguments, **options)  # type: ignore[operator]


def on_device(options: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the options of an operator that was captured on another device."""
    return {name: device if name == "device" else value for name, value in options.items()}


def _embedding(
    part: Part, table: Tensor, indices: Tensor, padding: int = -1, by_frequency: bool = False, sparse: bool = False
) -> Tensor:
    """Return the rows that a rank has, and zeros for those that others have."""
    start = part.ranks.part(part.rows) * table.shape[0]
    own = indices - start
    held = (own >= 0) & (own < table.shape[0])
    padding = padding - start if start <= padding < start + table.shape[0] else -1
    found = aten.embedding.default(table, own.where(held, 0), padding, by_frequency, sparse)
    rows: Tensor = found.where(held[..., None], 0)
    return rows


def _once(part: Part, bias: Tensor | None) -> Tensor | None:
    """Return a bias that counts on the first of the ranks whose results are summed."""
    if bias is None:
        return None
    once: Tensor = Once.apply(bias, part.ranks.part(part.summed) == 0)  # type: ignore[no-untyped-call]
    return once


def _linear(part: Part, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return aten.linear.default(inputs, weight, _once(part, bias))  # type: ignore[no-any-return]


def _addmm(part: Part, bias: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return aten.addmm.default(_once(part, bias), first, second)  # type: ignore[no-any-return]


def _convolution(kind: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a convolution whose bias, its third argument, counts once."""

    def run(part: Part, inputs: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any) -> Tensor:
        return kind(inputs, weight, _once(part, bias), *rest)

    return run


_CONVOLUTIONS = (
    *(aten.convolution.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default),
    *(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input),
)


def _mean(part: Part, *arguments: Any, **options: Any) -> Tensor:
    kind = aten.mean.default if len(arguments) == 1 else aten.mean.dim
    return kind(*arguments, **options) / part.ranks.ways(part.summed)  # type: ignore[no-any-return]


_SPECIAL: Mapping[Any, Callable[..., Tensor]] = {
    aten.embedding.default: _embedding,
    aten.linear.default: _linear,
    aten.addmm.default: _addmm,
    **{kind: _convolution(kind) for kind in _CONVOLUTIONS},
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
}
