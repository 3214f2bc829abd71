"""ATen operators that only look at a tensor in another shape."""

import torch

aten = torch.ops.aten

ALIASES = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten.expand.default,
        aten.flatten.using_ints,
        aten.unflatten.int,
        aten.clone.default,
        aten.contiguous.default,
        aten.alias.default,
        aten.numpy_T.default,
        aten.movedim.int,
    }
)
"""What has every element of its input, in the same order of named dims or another one, and perhaps repeated."""
