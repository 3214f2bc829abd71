"""Grouped products of torch as one operator of every precision.

torch exports its own in bf16 alone, and has none in fp64, in which runs are compared.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode


@torch.library.custom_op("meshwise::grouped_product", mutates_args=())
def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return the product of the rows of every group, up to its end, with its matrix; zeros after the last end."""
    result = rows.new_zeros((rows.shape[0], matrices.shape[2]))
    for matrix, start, end in _list_groups(matrices, ends):
        result[start:end] = rows[start:end] @ matrix
    return result


@grouped_product.register_fake
def _(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty((rows.shape[0], matrices.shape[2]))


def _keep_operands(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _compute_gradients(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, matrices, ends = context.saved_tensors
    of_matrices = torch.zeros_like(matrices)
    for matrix, start, end in _list_groups(of_matrices, ends):
        matrix.copy_(rows[start:end].T @ gradient[start:end])
    of_rows: Tensor = grouped_product(gradient, matrices.transpose(1, 2), ends)
    return of_rows, of_matrices, None


grouped_product.register_autograd(_compute_gradients, setup_context=_keep_operands)


def _list_groups(matrices: Tensor, ends: Tensor) -> Iterator[tuple[Tensor, int, int]]:
    start = 0
    for matrix, end in zip(matrices.unbind(), ends.tolist(), strict=True):
        yield matrix, start, end
        start = end


def multiply_groups(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return a grouped product by the kernel of a GPU where it has one."""
    if rows.is_cuda and rows.dtype is torch.bfloat16 and not isinstance(rows, FakeTensor):
        return torch.nn.functional.grouped_mm(rows, matrices, offs=ends.to(torch.int32))
    result: Tensor = grouped_product(rows, matrices, ends)
    return result


class GroupedProducts(TorchFunctionMode):
    """Takes torch's grouped products of rows with a matrix for each group as `grouped_product`."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, or the operator in the place of a grouped product."""
        return find_grouped_product(function, args, kwargs or {})(*args, **(kwargs or {}))


def find_grouped_product(
    function: Callable[..., Any], arguments: tuple[Any, ...], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return what computes a call: a function of torch itself, or the operator for a grouped product of rows."""
    if function is not torch._grouped_mm:
        return function
    ends = arguments[2] if len(arguments) > 2 else options.get("offs")
    is_plain = not any(value is not None for value in (*arguments[3:], options.get("bias"), options.get("out_dtype")))
    is_of_rows = len(arguments) > 1 and (arguments[0].dim(), arguments[1].dim()) == (2, 3)
    if ends is None or not (is_plain and is_of_rows):
        return function
    return lambda rows, matrices, *_, **__: grouped_product(rows, matrices, ends)
