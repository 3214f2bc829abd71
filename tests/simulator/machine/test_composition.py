"""The kernels of eager code are those that torch dispatches, and take the time of their traffic."""

from collections.abc import Callable
from typing import Any

import pytest

from meshwise.simulator.machine.accelerator import GATED_ACTIVATION, RMS_NORM, ROTARY, Accelerator
from meshwise.simulator.machine.composition import list_kernel_bytes
from meshwise.simulator.machine.compute import Pass, composed_time
from meshwise.simulator.models.layers import norm
from meshwise.simulator.models.model import BlockBuilder
from meshwise.simulator.operator_graph import OperatorKind

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

ROWS, WIDTH, TOKENS = 64, 256, 32
ABOVE_DIAGONAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
LEAST_SHARE = 0.1
"""Share of the elements below which a kernel handles one number a row, or a weight."""
VIEWS = {"alias", "chunk", "detach", "expand", "slice", "split", "unsqueeze", "view"}


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes that each operator reads and writes, for one of so many elements; views and small tensors are left out."""

    def __init__(self, elements: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements, self.sizes = elements, list[float]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.masked_fill.Scalar:  # by torch a copy that is filled in place
            with self:
                return args[0].clone().masked_fill_(*args[1:])
        result = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        if function.__name__.partition(".")[0] not in VIEWS:
            # an expanded tensor is read as often as it is stored
            stored = [min(tensor.numel(), tensor.untyped_storage().nbytes() // tensor.itemsize) for tensor in tensors]
            pairs = zip(tensors, stored, strict=True)
            size = sum(count * tensor.itemsize for tensor, count in pairs if count > LEAST_SHARE * self.elements)
            self.sizes += [size / self.elements] if size else []
        return result


def rms_norm(x: Any, weight: Any) -> Any:
    wide = x.to(torch.float32)
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * scaled.to(x.dtype)


def rotary(x: Any, cosines: Any, sines: Any) -> Any:
    first, second = x[..., : WIDTH // 2], x[..., WIDTH // 2 :]
    return x * cosines + torch.cat((-second, first), -1) * sines


def gate(x: Any, up: Any) -> Any:
    return torch.nn.functional.silu(x) * up


def softmax(x: Any, mask: Any) -> Any:
    return torch.softmax(x.to(torch.float32).masked_fill_(mask, -10000.0), -1).to(x.dtype)


def draw(*shape: int, dtype: Any) -> Any:
    return torch.randn(*shape).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", [RMS_NORM, ROTARY, GATED_ACTIVATION, OperatorKind.SOFTMAX])
def test_kernels_are_those_that_torch_dispatches(kind: str, dtype: Any) -> None:
    cases: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        RMS_NORM: (rms_norm, (draw(ROWS, WIDTH, dtype=dtype), draw(WIDTH, dtype=dtype).requires_grad_())),
        ROTARY: (rotary, (draw(ROWS, TOKENS, WIDTH, dtype=dtype), *draw(2, TOKENS, WIDTH, dtype=dtype))),
        GATED_ACTIVATION: (gate, (draw(ROWS, WIDTH, dtype=dtype), draw(ROWS, WIDTH, dtype=dtype).requires_grad_())),
        OperatorKind.SOFTMAX: (softmax, (draw(ROWS, TOKENS, TOKENS, dtype=dtype).requires_grad_() + 0, ABOVE_DIAGONAL)),
    }
    function, arguments = cases[kind]
    x = arguments[0].requires_grad_()
    with Traffic(x.numel()) as forward:
        result = function(*arguments)
    gradient = torch.ones_like(result)
    with Traffic(x.numel()) as backward:
        result.backward(gradient)
    for direction, traffic in (("forward", forward), ("backward", backward)):
        kernels = list_kernel_bytes(kind, dtype.itemsize, backward=direction == "backward")
        assert sorted(traffic.sizes) == sorted(kernels), direction


def test_each_kernel_takes_its_launch_and_its_traffic() -> None:
    builder = BlockBuilder("bf16", {"sequence": 1000, "hidden": 1000})
    x = builder.add_tensor("x", "batch sequence hidden")
    block = builder.build_block("normed", (x,), (norm(builder, "norm", x, bias=False),), layer=True)
    (operator,) = block.operators
    accelerator = Accelerator(
        "one", (("bf16", 1e12),), 1e9, 1e12, launch=1e-6, kernel_bandwidth=(("elementwise", 0.5), ("rms_norm", 0.9))
    )
    sizes = {**dict(operator.dims), "batch": 2}
    # 2e6 elements; 36 bytes forward in 6 kernels and 92 backward in 13, at half of 1e12 byte/s
    times = [composed_time(accelerator, block, operator, sizes, direction) for direction in Pass]
    assert times == pytest.approx([6e-6 + 2e6 * 36 / 5e11, 13e-6 + 2e6 * 92 / 5e11])
