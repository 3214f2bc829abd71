"""Single operators of a layer computed again in backward, by torch's checkpoints and hooks on what autograd keeps.

What a recomputed operator keeps for its own backward goes: it is checkpointed. What it puts out goes too, if only
recomputed operators keep it or it is no result of a product or of attention: where another operator keeps it, that one
keeps instead how to make it again (`meshwise.strategies.lowering.costs.recompute` says which results stay). An operator
whose result was dropped so runs twice in backward: for the one that reads the result, and for itself.

A function that a backward in two parts runs again once, in whichever part first needs what it made.

torch's own checkpoint runs a function again in every call of autograd, and gives nothing of one call to another. The
gradients of weights that come apart are a call for each group of weights (torch/distributed/pipelining/_backward.py,
stage_backward_weight): a layer would run six times more, and all that each of them makes would lie there to the end.
Here what was made again is kept as the function itself would have kept it: as long as autograd's graph.

References
----------
Megatron-LM, ``--recompute-modules`` and ``CheckpointWithoutOutput``.
torch, ``torch.utils.checkpoint`` and ``torch.autograd.graph.saved_tensors_hooks``.
"""

import weakref
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from meshwise.executor.recording.private_torch import storage, to_keep
from meshwise.executor.supported import UNFUSED_CORE

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


NORMS = ("input_norm", "feed_forward_norm")
READERS = {"qkv": "attention", "attention": "projection", "up": "activation"}
"""The operators that keep the results of products and of attention for their backward; of others none does."""

Again = Callable[..., Any]


class _Recipe:
    """How to make a result again; made once for all that read it at a time."""

    def __init__(self, function: Callable[..., Tensor], inputs: list[Any], contexts: Contexts | None) -> None:
        self.function, self.inputs, self.contexts = function, inputs, contexts
        self._made: Callable[[], Tensor | None] = lambda: None

    def make(self) -> Tensor:
        """Return the result."""
        made = self._made()
        if made is None:
            inputs = [_unpack(each) for each in self.inputs]
            with torch.no_grad():
                if self.contexts is None:
                    made = self.function(*inputs)
                else:
                    with self.contexts()[1]:
                        made = self.function(*inputs)
            self._made = weakref.ref(made)
        return made


class _Remade(NamedTuple):
    """A tensor that autograd would keep, as a part of a result that is made again."""

    recipe: _Recipe
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _unpack(kept: Any) -> Tensor:
    if not isinstance(kept, _Remade):
        tensor: Tensor = kept
        return tensor
    return torch.as_strided(kept.recipe.make(), kept.size, kept.stride, kept.offset)


class _Operators:
    """Runs the operators of one layer, some of which are computed again."""

    def __init__(self, names: Collection[str], again: Again, contexts: Contexts | None) -> None:
        self.names, self.again, self.contexts = names, again, contexts
        self.dropped: dict[int, tuple[Any, _Recipe]] = {}

    def layer(self, forward: Callable[..., Tensor], x: Tensor) -> Tensor:
        """Run the layer."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            result = forward(x)
        self.dropped.clear()
        return result

    def run(self, name: str, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Run an operator that is computed again."""
        result: Tensor = self.again(function, *inputs)
        reader = READERS.get(name)
        if name in NORMS or name == "activation" or reader in self.names:
            recipe = _Recipe(function, [self._pack(each.detach()) for each in inputs], self.contexts)
            reference: Any = StorageWeakRef
            self.dropped[storage(result)] = reference(result.untyped_storage()), recipe
        return result

    def _pack(self, tensor: Tensor) -> Tensor | _Remade:
        found = self.dropped.get(storage(tensor))
        if found is None or found[0].expired():  # another tensor lies there now
            return to_keep(tensor)
        return _Remade(found[1], tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def recompute_operators(layer: nn.Module, names: Collection[str], again: Again, contexts: Contexts | None) -> None:
    """Let the operators ``names`` of a layer be computed again; its parameters keep their names.

    Parameters
    ----------
    again
        Runs a function under a checkpoint.
    contexts
        Makes the contexts of a forward pass and of its recomputation.
    """
    if set(names) & set(UNFUSED_CORE):
        names = [*(name for name in names if name not in UNFUSED_CORE), "attention"]
    operators = _Operators(names, again, contexts)
    for name in names:
        if name in ("attention", "activation"):
            place = "core" if name == "attention" else name
            setattr(layer, place, partial(operators.run, name, getattr(layer, place)))
        else:
            module: Any = getattr(layer, name)
            module.forward = partial(operators.run, name, module.forward)
    forward: Any = layer
    forward.forward = partial(operators.layer, layer.forward)
