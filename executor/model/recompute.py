"""Recomputation in backward: of single operators of a layer [1]_, and of whole functions for a backward in two parts.

Both use hooks on the tensors that autograd saves [2]_.

A recomputed operator is checkpointed, so what it saves for its own backward is dropped. Its result is dropped too
where only recomputed operators save it, or where it is not the result of a product or of attention; an operator that
saved the result then saves a recipe to make it again (`meshwise.strategies.lowering.costs.recompute` says which results
stay). An operator whose result was dropped therefore runs twice in backward: for the operator that reads its result,
and for itself.

A backward in two parts, of inputs and of weights, runs a function again only once, in whichever part first needs its
results. torch's own checkpoint would run it in every call of autograd, and passes nothing from one call to the next.
The gradients of weights are a call for each group of weights (torch/distributed/pipelining/_backward.py,
stage_backward_weight), so a layer would run six more times, and the results of each run would stay to the end. Here
recomputed tensors live as long as those that the function itself would have saved: as long as autograd's graph.

References
----------
.. [1] Megatron-LM, ``--recompute-modules`` and ``CheckpointWithoutOutput``.
.. [2] torch, ``torch.utils.checkpoint`` and ``torch.autograd.graph.saved_tensors_hooks``.
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
    """Return ``function(*inputs)``; backward keeps only the inputs, and runs the function again once.

    ``contexts`` makes the contexts under which the function runs, and runs again.
    """
    first, again = contexts()
    run = _Run(function, inputs, again)
    with first, saved_tensors_hooks(run.keep, _Kept.remade):
        return function(*inputs)


class _Done(Exception):
    """Ends a recomputation early: every saved tensor has been made again, so the rest of the function is not needed."""


class _Kept:
    """Stands for a tensor that autograd would save; the tensor itself is dropped until backward needs it."""

    def __init__(self, run: "_Run") -> None:
        self.run = run
        self.tensor: Tensor | None = None

    def remade(self) -> Tensor:
        """Return the tensor; the first call for a function runs the function again."""
        if self.tensor is None:
            self.run.again()
        assert self.tensor is not None
        return self.tensor


class _Run:
    """One call of a function, with what is needed to run it again."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...], context: Any) -> None:
        self.function, self.context = function, context
        # inputs are saved through autograd, so that hooks around this call, as those of offload, see them too; the seed
        # makes autograd record a node, which holds them as long as its result lives
        seed = torch.empty((0,), requires_grad=True)
        self.inputs: Any = _Inputs.apply(seed, *inputs)  # type: ignore[no-untyped-call]
        self.places: list[weakref.ref[_Kept]] = []

    def keep(self, tensor: Tensor) -> _Kept:
        """Return the stand-in that autograd keeps for a tensor."""
        kept = _Kept(self)
        self.places.append(weakref.ref(kept))
        return kept

    def again(self) -> None:
        """Run the function again until it has made the last saved tensor, and fill the stand-ins that still live."""
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
    """Saves tensors by autograd, so that hooks on saved tensors see them."""

    @staticmethod
    def forward(ctx: Any, seed: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return seed.detach()


NORMS = ("input_norm", "feed_forward_norm")
READERS = {"qkv": "attention", "attention": "projection", "up": "activation"}
"""For products and attention, the operator that saves their result for its backward; other results have no such one."""

Again = Callable[..., Any]


class _Recipe:
    """How to make a dropped result again; operators that need it at the same time share one."""

    def __init__(self, function: Callable[..., Tensor], inputs: list[Any], contexts: Contexts | None) -> None:
        self.function, self.inputs, self.contexts = function, inputs, contexts
        self._made: Callable[[], Tensor | None] = lambda: None

    def make(self) -> Tensor:
        """Return the result, computed again unless it is still alive."""
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
    """A saved tensor as a view of a result that its recipe makes again."""

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
    """Runs the operators of one layer, some of which backward computes again."""

    def __init__(self, names: Collection[str], again: Again, contexts: Contexts | None) -> None:
        self.names, self.again, self.contexts = names, again, contexts
        self.dropped: dict[int, tuple[Any, _Recipe]] = {}

    def layer(self, forward: Callable[..., Tensor], x: Tensor) -> Tensor:
        """Return the layer's result; recipes stand in for the dropped results that its operators save."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            result = forward(x)
        self.dropped.clear()
        return result

    def run(self, name: str, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return the result of an operator that backward computes again; note a recipe where the result is dropped."""
        result: Tensor = self.again(function, *inputs)
        reader = READERS.get(name)
        if name in NORMS or name == "activation" or reader in self.names:
            recipe = _Recipe(function, [self._pack(each.detach()) for each in inputs], self.contexts)
            reference: Any = StorageWeakRef
            self.dropped[storage(result)] = reference(result.untyped_storage()), recipe
        return result

    def _pack(self, tensor: Tensor) -> Tensor | _Remade:
        found = self.dropped.get(storage(tensor))
        # a storage's number is used again once it is freed: an expired reference means another tensor is there now
        if found is None or found[0].expired():
            return to_keep(tensor)
        return _Remade(found[1], tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def recompute_operators(layer: nn.Module, names: Collection[str], again: Again, contexts: Contexts | None) -> None:
    """Make backward compute the operators ``names`` of a layer again; its parameters keep their names.

    Parameters
    ----------
    checkpoint_function
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
