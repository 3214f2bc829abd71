"""A function that a backward in two parts runs again once, in whichever part first needs what it made.

torch's own checkpoint runs a function again in every call of autograd, and gives nothing of one call to another. The
gradients of weights that come apart are a call for each group of weights (torch/distributed/pipelining/_backward.py,
stage_backward_weight): a layer would run six times more, and all that each of them makes would lie there to the end.
Here what was made again is kept as the function itself would have kept it: as long as autograd's graph.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def remade_once(contexts: Contexts, function: Callable[..., Any], *inputs: Any) -> Any:
    """Return what ``function`` makes of ``inputs``, of which backward keeps nothing but the inputs.

    ``contexts`` makes the contexts under which it runs, and runs again.
    """
    first, again = contexts()
    run = _Run(function, inputs, again)
    with first, saved_tensors_hooks(run.keep, _Kept.remade):
        return function(*inputs)


class _Done(Exception):
    """All that was kept has been made again."""


class _Kept:
    """A tensor that autograd would keep."""

    def __init__(self, run: "_Run") -> None:
        self.run = run
        self.tensor: Tensor | None = None

    def remade(self) -> Tensor:
        """Return the tensor, made again if it is not there."""
        if self.tensor is None:
            self.run.again()
        assert self.tensor is not None
        return self.tensor


class _Run:
    """One run of a function, which can be run again."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...], context: Any) -> None:
        self.function, self.context = function, context
        seed = torch.empty((0,), requires_grad=True)
        self.inputs: Any = _Inputs.apply(seed, *inputs)  # type: ignore[no-untyped-call]  # its node lives as long as it
        self.places: list[weakref.ref[_Kept]] = []

    def keep(self, tensor: Tensor) -> _Kept:
        """Return what is kept for a tensor."""
        kept = _Kept(self)
        self.places.append(weakref.ref(kept))
        return kept

    def again(self) -> None:
        """Run the function again as far as it makes what was kept, and fill the places of what is still needed."""
        inputs = [each.detach().requires_grad_(each.requires_grad) for each in self.inputs.grad_fn.saved_tensors]
        places = iter(self.places)
        left = len(self.places)

        def fill(tensor: Tensor) -> None:
            nonlocal left
            kept, left = next(places)(), left - 1
            if kept is not None:
                kept.tensor = tensor.detach()
            if not left:
                raise _Done

        with self.context, torch.enable_grad(), suppress(_Done), saved_tensors_hooks(fill, _never):
            self.function(*inputs)
        self.inputs = None


def _never(_: object) -> Tensor:
    raise AssertionError("nothing goes back through what is made again")


class _Inputs(torch.autograd.Function):
    """Keeps tensors as autograd keeps them, so that hooks see them."""

    @staticmethod
    def forward(ctx: Any, seed: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return seed.detach()
