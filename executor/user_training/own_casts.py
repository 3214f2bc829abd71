"""Whether a module in fp64 casts to fewer digits by itself, as norms and losses of transformers cast to fp32."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

SINGLE_TOLERANCE = 1e-4
"""Fraction by which losses and weights of a module that casts to fp32 may differ from those of one process."""


class CastWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes in ``has_cast`` whether the body has cast a tensor of fp64 to another floating dtype.

    >>> with CastWatch() as watch:
    ...     _ = torch.ones(2, dtype=torch.float64).float()
    >>> watch.has_cast
    True
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_cast = False

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        """Run an operator, and note a cast."""
        result = function(*arguments, **(options or {}))
        if function is torch.ops.aten._to_copy.default and arguments[0].dtype is torch.float64:
            self.has_cast |= result.is_floating_point() and result.dtype is not torch.float64
        return result
