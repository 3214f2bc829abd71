"""Matrix products that a device is timed with: those of a linear layer and its gradients, batches, and fp8."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from executor.device_timer import Run
from executor.private_torch import has_kernel

DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "tf32": torch.float32,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}
"""What torch calls the dtypes of rows; ``tf32`` and ``fp32`` differ in how products round."""
FIRST_WITH_FP8 = (8, 9)
"""CUDA compute capability of the first devices that multiply in fp8 (Ada and Hopper)."""
_LAYOUTS = {"fwd": "TN", "dgrad": "NN", "wgrad": "NT"}


@dataclass(frozen=True, slots=True)
class LinearProduct:
    """A product of a linear layer from ``k`` to ``n`` over ``m`` tokens.

    Parameters
    ----------
    direction
        ``fwd``: [m, k] x [k, n]. ``dgrad``: the gradient of the input, [m, n] x [n, k]. ``wgrad``: that of the
        weight, [n, m] x [m, k].
    """

    dtype: str
    m: int
    n: int
    k: int
    direction: str = "fwd"

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.m * self.n * self.k

    def fields(self) -> dict[str, Any]:
        """Return the row's fields: the sizes are those of the product that is made."""
        m, n, k = self.m, self.n, self.k
        sizes = {"fwd": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}[self.direction]
        named = dict(zip(("m", "n", "k"), sizes, strict=True))
        return {
            "kernel": "gemm",
            "dtype": self.dtype,
            "pass": self.direction,
            **named,
            "layout": _LAYOUTS[self.direction],
            "accumulate": False,
        }

    def prepare(self, device: str) -> Run:
        """Return the product on random operands."""
        torch.set_float32_matmul_precision("high" if self.dtype == "tf32" else "highest")
        if self.dtype == "fp8":
            return self._scaled(device)
        random = partial(torch.randn, device=device, dtype=DTYPES[self.dtype])
        if self.direction == "fwd":
            return partial(functional.linear, random(self.m, self.k), random(self.n, self.k))
        gradient = random(self.m, self.n)
        if self.direction == "dgrad":
            return partial(torch.mm, gradient, random(self.n, self.k))
        return partial(torch.mm, gradient.t(), random(self.m, self.k))

    def _scaled(self, device: str) -> Run:
        """Return the product with one scale a tensor, and its result in bf16."""
        scale = torch.ones((), device=device)
        source, weight = (torch.randn(rows, self.k, device=device).to(DTYPES["fp8"]) for rows in (self.m, self.n))
        recipe = functional.ScalingType.TensorWise
        return partial(functional.scaled_mm, source, weight.t(), scale, recipe, scale, recipe, use_fast_accum=True)


def has_fp8(device: str) -> bool:
    """Return whether torch multiplies in fp8 on a device."""
    if device == "cuda" and torch.cuda.get_device_capability() < FIRST_WITH_FP8:
        return False
    return has_kernel("aten::_scaled_mm_v2", device)


@dataclass(frozen=True, slots=True)
class BatchedProduct:
    """``batch`` products [m, k] x [k, n] in one kernel."""

    dtype: str
    batch: int
    m: int
    n: int
    k: int

    def fields(self) -> dict[str, Any]:
        """Return the row's fields."""
        sizes = {name: getattr(self, name) for name in ("batch", "m", "n", "k")}
        return {"kernel": "bmm", "dtype": self.dtype, "pass": "fwd", **sizes}

    def prepare(self, device: str) -> Run:
        """Return the products on random operands."""

        def random(*shape: int) -> Tensor:
            return torch.randn(self.batch, *shape, device=device, dtype=DTYPES[self.dtype])

        return partial(torch.bmm, random(self.m, self.k), random(self.k, self.n))
