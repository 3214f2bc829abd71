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

from meshwise.executor.recording.private_torch import detach_saved, storage_number
from meshwise.executor.supported import UNFUSED_CORE

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def run_recomputed_once(contexts: Contexts, function: Callable[..., Any], *inputs: Any) -> Any:
    """Return ``function(*inputs)``; backward keeps only the inputs, and runs the function again once.

    ``contexts`` makes the contexts under which the function runs, and runs again.
    """
    forward_context, recompute_context = contexts()
    recomputation = _Recomputation(function, inputs, recompute_context)
    with forward_context, saved_tensors_hooks(recomputation.save_tensor, _SavedTensor.restore):
        return function(*inputs)


class _StopRecomputation(Exception):
    """Ends a recomputation early: every saved tensor has been made again, so the rest of the function is not needed."""


class _SavedTensor:
    """Stands for a tensor that autograd would save; the tensor itself is dropped until backward needs it."""

    def __init__(self, recomputation: "_Recomputation") -> None:
        self.recomputation = recomputation
        self.tensor: Tensor | None = None

    def restore(self) -> Tensor:
        """Return the tensor; the first call for a function runs the function again."""
        if self.tensor is None:
            self.recomputation.recompute()
        assert self.tensor is not None
        return self.tensor


class _Recomputation:
    """One call of a function, with what is needed to run it again."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...], context: Any) -> None:
        self.function, self.context = function, context
        # inputs are saved through autograd, so that hooks around this call, as those of offload, see them too; the seed
        # makes autograd record a node, which holds them as long as its result lives
        seed = torch.empty((0,), requires_grad=True)
        self.inputs: Any = _Inputs.apply(seed, *inputs)  # type: ignore[no-untyped-call]
        self.references: list[weakref.ref[_SavedTensor]] = []

    def save_tensor(self, tensor: Tensor) -> _SavedTensor:
        """Return the stand-in that autograd keeps for a tensor."""
        saved_tensor = _SavedTensor(self)
        self.references.append(weakref.ref(saved_tensor))
        return saved_tensor

    def recompute(self) -> None:
        """Run the function again until it has made the last saved tensor, and fill the stand-ins that still live."""
        inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self.inputs.grad_fn.saved_tensors]
        remaining_references = iter(self.references)
        num_remaining = len(self.references)

        def fill(tensor: Tensor) -> None:
            nonlocal num_remaining
            saved_tensor, num_remaining = next(remaining_references)(), num_remaining - 1
            if saved_tensor is not None:
                saved_tensor.tensor = tensor.detach()
            if not num_remaining:
                raise _StopRecomputation

        with self.context, torch.enable_grad(), suppress(_StopRecomputation), saved_tensors_hooks(fill, _refuse_unpack):
            self.function(*inputs)
        self.inputs = None


def _refuse_unpack(_: object) -> Tensor:
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

CheckpointFunction = Callable[..., Any]


class _Recipe:
    """How to make a dropped result again; operators that need it at the same time share one."""

    def __init__(self, function: Callable[..., Tensor], inputs: list[Any], contexts: Contexts | None) -> None:
        self.function, self.inputs, self.contexts = function, inputs, contexts
        self._find_result: Callable[[], Tensor | None] = lambda: None

    def make(self) -> Tensor:
        """Return the result, computed again unless it is still alive."""
        result = self._find_result()
        if result is None:
            inputs = [_unpack(value) for value in self.inputs]
            with torch.no_grad():
                if self.contexts is None:
                    result = self.function(*inputs)
                else:
                    with self.contexts()[1]:
                        result = self.function(*inputs)
            self._find_result = weakref.ref(result)
        return result


class _RecipePart(NamedTuple):
    """A saved tensor as a view of a result that its recipe makes again."""

    recipe: _Recipe
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _unpack(entry: Any) -> Tensor:
    if not isinstance(entry, _RecipePart):
        tensor: Tensor = entry
        return tensor
    return torch.as_strided(entry.recipe.make(), entry.size, entry.stride, entry.offset)


class _Operators:
    """Runs the operators of one layer, some of which backward computes again."""

    def __init__(
        self, names: Collection[str], checkpoint_function: CheckpointFunction, contexts: Contexts | None
    ) -> None:
        self.names, self.checkpoint_function, self.contexts = names, checkpoint_function, contexts
        self.recipes: dict[int, tuple[Any, _Recipe]] = {}

    def run_layer(self, forward: Callable[..., Tensor], x: Tensor) -> Tensor:
        """Return the layer's result; recipes stand in for the dropped results that its operators save."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            result = forward(x)
        self.recipes.clear()
        return result

    def run_operator(self, name: str, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return the result of an operator that backward computes again; note a recipe where the result is dropped."""
        result: Tensor = self.checkpoint_function(function, *inputs)
        reader = READERS.get(name)
        if name in NORMS or name == "activation" or reader in self.names:
            recipe = _Recipe(function, [self._pack(value.detach()) for value in inputs], self.contexts)
            reference: Any = StorageWeakRef
            self.recipes[storage_number(result)] = reference(result.untyped_storage()), recipe
        return result

    def _pack(self, tensor: Tensor) -> Tensor | _RecipePart:
        entry = self.recipes.get(storage_number(tensor))
        # a storage's number is used again once it is freed: an expired reference means another tensor is there now
        if entry is None or entry[0].expired():
            return detach_saved(tensor)
        return _RecipePart(entry[1], tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def recompute_operators(
    layer: nn.Module, names: Collection[str], checkpoint_function: CheckpointFunction, contexts: Contexts | None
) -> None:
    """Make backward compute the operators ``names`` of a layer again; its parameters keep their names.

    ``checkpoint_function`` runs a function under a checkpoint; ``contexts`` makes the contexts of a forward pass and of
    its recomputation.
    """
    if set(names) & set(UNFUSED_CORE):
        names = [*(name for name in names if name not in UNFUSED_CORE), "attention"]
    operators = _Operators(names, checkpoint_function, contexts)
    for name in names:
        if name in ("attention", "activation"):
            attribute = "core" if name == "attention" else name
            setattr(layer, attribute, partial(operators.run_operator, name, getattr(layer, attribute)))
        else:
            module: Any = getattr(layer, name)
            module.forward = partial(operators.run_operator, name, module.forward)
    forward: Any = layer
    forward.forward = partial(operators.run_layer, layer.forward)
