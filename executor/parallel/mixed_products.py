"""Products of values in fp32 with weights in 16 bits, of modules whose shards are gathered in 16 bits: `TurnToNarrow`.

``fully_shard`` turns parameters and the arguments of units to 16 bits. What a forward makes itself in between, such as
sines of a time step or buffers of positions, stays in fp32, and torch multiplies no two dtypes. Here products and norms
turn their arguments to 16 bits where they meet both, as torch's autocast does for products. All else is as it was.
"""

from contextvars import ContextVar, Token
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

MATCHED = frozenset(
    {
        torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm,
        torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm, torch.einsum, functional.linear, functional.bilinear,
        functional.conv1d, functional.conv2d, functional.conv3d, functional.conv_transpose1d,
        functional.conv_transpose2d, functional.conv_transpose3d, functional.scaled_dot_product_attention,
        functional.multi_head_attention_forward, functional.layer_norm, functional.rms_norm, functional.group_norm,
    }
)  # fmt: skip
"""Functions whose arguments have one dtype."""

_ACTIVE: ContextVar[torch.dtype | None] = ContextVar("narrow_dtype", default=None)


class TurnToNarrow(TorchFunctionMode):
    """Turns arguments in fp32 of products and norms to a dtype of 16 bits where others have it.

    Parameters
    ----------
    dtype
        That of 16 bits.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self._token: Token[torch.dtype | None] | None = None

    def __enter__(self) -> "TurnToNarrow":
        """Begin, and have blocks that are computed again do so likewise."""
        self._token = _ACTIVE.set(self.dtype)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """End."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        assert self._token is not None
        _ACTIVE.reset(self._token)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        kwargs = kwargs or {}
        if function in MATCHED:
            dtypes = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            if self.dtype in dtypes and torch.float32 in dtypes:
                args, kwargs = tree_map(self._turn, (args, kwargs))
        return function(*args, **kwargs)

    def _turn(self, value: Any) -> Any:
        is_wide = isinstance(value, Tensor) and value.dtype is torch.float32
        return value.to(self.dtype) if is_wide else value


def find_narrow_dtype() -> torch.dtype | None:
    """Return the dtype of the `TurnToNarrow` in whose body this is called; ``None`` outside."""
    return _ACTIVE.get()
