"""Functions that the generated program of a stage calls: collectives with their gradients, and operators on parts.

What they do is worked out once, when a stage is compiled; at run time they hold what they need.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import GraphModule
from torch.nn import functional

from meshwise.executor.capture.grouped_products import multiply_groups
from meshwise.executor.operators.collectives import Change
from meshwise.executor.parallel.exchange import Share
from meshwise.executor.recording.private_torch import detach_saved

Changes = tuple[Change, ...]

aten = torch.ops.aten
QUICK_CALLS: Mapping[Any, Callable[..., Any]] = {
    aten.add.Tensor: torch.add,
    aten.cat.default: torch.cat,
    aten.div.Tensor: torch.div,
    aten.embedding.default: torch.embedding,
    aten.exp.default: torch.exp,
    aten.gather.default: torch.gather,
    torch.ops.meshwise.grouped_product.default: multiply_groups,
    aten.gelu.default: functional.gelu,
    aten.layer_norm.default: torch.layer_norm,
    aten.linear.default: functional.linear,
    aten.log_softmax.int: torch.log_softmax,
    aten.matmul.default: torch.matmul,
    aten.mul.Tensor: torch.mul,
    aten.ne.Scalar: torch.ne,
    aten.neg.default: torch.neg,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.relu.default: torch.relu,
    aten.rsqrt.default: torch.rsqrt,
    aten.scaled_dot_product_attention.default: functional.scaled_dot_product_attention,
    aten.softmax.int: torch.softmax,
    aten.sub.Tensor: torch.sub,
    aten.sum.default: torch.sum,
    aten.sum.dim_IntList: torch.sum,
    aten.tanh.default: torch.tanh,
    aten.view.default: torch.reshape,  # strides of a kernel's results may be others than those that were captured
    aten._unsafe_view.default: torch.reshape,
    aten.where.ScalarOther: torch.where,
    aten.where.self: torch.where,
}
"""torch's own functions of the same arguments, which are called one to four microseconds faster than operators."""

RESHAPES = frozenset((aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.view_copy.default))
"""Operators whose second argument is the shape of their result."""


def apply_changes(part: Tensor, changes: Changes) -> Tensor:
    """Return a part after changes of its layout."""
    for change in changes:
        part = change(part)
    return part.contiguous() if changes else part


class Move(torch.autograd.Function):
    """Changes the layout of a value, and that of its gradient back."""

    @staticmethod
    def forward(context: Any, part: Tensor, changes: Changes, gradient_changes: Changes) -> Tensor:
        """Return this rank's part in the layout in which it is read."""
        context.changes = gradient_changes
        return apply_changes(part, changes) if changes else part.view_as(part)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Return the gradient in the layout of the value."""
        return apply_changes(gradients[0], context.changes), None, None


def make_move(changes: Changes, gradient_changes: Changes) -> Callable[[Tensor], Tensor]:
    """Return the function that moves a value, and its gradient back."""

    def move(part: Tensor) -> Tensor:
        return Move.apply(part, changes, gradient_changes)  # type: ignore[no-any-return,no-untyped-call]

    return move


def make_change(changes: Changes) -> Callable[[Tensor], Tensor]:
    """Return the function that moves a value without a gradient."""

    def change(part: Tensor) -> Tensor:
        return apply_changes(part.detach(), changes)

    return change


def make_share(num_ranks: int) -> Callable[[Tensor], Tensor]:
    """Return the function after which a gradient counts once in a sum over so many ranks."""

    def share(part: Tensor) -> Tensor:
        return Share.apply(part, num_ranks)  # type: ignore[no-any-return,no-untyped-call]

    return share


class Draws:
    """The seed from which operators of a stage draw random numbers; each has draws of its own.

    Without a seed every draw takes one from the random numbers of torch, which are then the same on all ranks with
    parts of one batch: so a pass that is computed again draws the same.
    """

    def __init__(self, seed: int | None = 0) -> None:
        self.seed = seed

    def make_seeded(self, target: Callable[..., Any], number: int) -> Callable[..., Any]:
        """Return an operator whose draws depend on the seed and a number alone: that of operator and part."""

        def draw(*arguments: Any, **options: Any) -> Any:
            if self.seed is not None:
                torch.manual_seed((self.seed * SEED_STRIDE + number) % 2**63)
                return target(*arguments, **options)
            seed = int(torch.randint(2**31, ()))
            draws = torch.get_rng_state()
            torch.manual_seed((seed * SEED_STRIDE + number) % 2**63)
            result = target(*arguments, **options)
            torch.set_rng_state(draws)
            return result

        draw.__wrapped__ = target  # type: ignore[attr-defined]
        return draw


SEED_STRIDE = 6_700_417
"""A prime that keeps the seeds of a step's operators apart."""


class Regathered(NamedTuple):
    """A parameter that backward gathers again: this rank's part of it, and how it becomes what an operator read."""

    parameter: nn.Parameter
    shape: tuple[int, ...]
    changes: Changes

    def gather(self) -> Tensor:
        """Return the parameter in the layout that the operator read."""
        return apply_changes(self.parameter.detach().reshape(self.shape), self.changes)


def make_regathering(target: Callable[..., Any], sources: Sequence[Regathered]) -> Callable[..., Any]:
    """Return an operator that keeps of gathered weights only this rank's part, and gathers them again for backward.

    It takes the gathered weights of ``sources`` before its arguments.
    """

    def compute(gathered: Sequence[Tensor], *arguments: Any, **options: Any) -> Any:
        places = {tensor.untyped_storage().data_ptr(): place for place, tensor in enumerate(gathered)}
        again: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Any:
            place = places.get(tensor.untyped_storage().data_ptr())
            if place is None:
                return detach_saved(tensor)
            return place, tensor.size(), tensor.stride(), tensor.storage_offset()

        def unpack(entry: Any) -> Tensor:
            if isinstance(entry, Tensor):
                return entry
            place, size, stride, offset = entry
            if place not in again:
                again[place] = sources[place].gather()
            return again.pop(place).as_strided(size, stride, offset)

        with saved_tensors_hooks(pack, unpack):
            return target(*arguments, **options)

    return compute


def make_renewal(buffer: Tensor, program: GraphModule) -> Callable[..., None]:
    """Return the function that renews this rank's part of a buffer from the value that its update reads, if any."""

    @torch.no_grad()
    def renew(*values: Tensor) -> None:
        buffer.copy_(program.forward(buffer, *values))

    return renew
