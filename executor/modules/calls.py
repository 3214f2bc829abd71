"""How a module is called with a batch: the items that its forward takes, and the number of labels that count.

A forward that names ``num_items_in_batch``, as the losses of transformers do, divides the sum of its loss by it. It
gets the number of the whole step, on all ranks and in all microbatches, so that its losses add up to the step's loss.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meshwise.executor.recording.rank_files import UserError

NUM_ITEMS = "num_items_in_batch"
"""The argument of a forward that gets the number of labels of a step."""
USE_CACHE = "use_cache"
LABELS, SHIFTED_LABELS = "labels", "shift_labels"
IGNORED = -100
"""The label that does not count, as in torch's losses."""


class CallError(UserError):
    """A batch that a forward does not take."""


class _Parameters(NamedTuple):
    """The parameters of a forward: names by position, all names, and whether it takes more of either."""

    positions: tuple[str, ...]
    names: frozenset[str]
    takes_positions: bool
    takes_names: bool


@lru_cache(maxsize=64)
def _read_parameters(function: Callable[..., Any]) -> _Parameters:
    parameters = tuple(inspect.signature(function).parameters.values())
    kinds = {parameter.kind for parameter in parameters}
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return _Parameters(
        tuple(parameter.name for parameter in parameters if parameter.kind in by_position),
        frozenset(parameter.name for parameter in parameters if parameter.kind in by_name),
        inspect.Parameter.VAR_POSITIONAL in kinds,
        inspect.Parameter.VAR_KEYWORD in kinds,
    )


def _find_own(module: nn.Module) -> nn.Module:
    """Return the user's own module, whose forward says what a batch is."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def _list_parameters(module: nn.Module) -> _Parameters:
    """Return the parameters of a module's forward; of one that cannot be read, that it takes everything."""
    forward: Any = _find_own(module).forward
    function = getattr(forward, "__func__", None)
    try:
        if function is None:
            return _read_parameters(forward)
        parameters = _read_parameters(function)
    except (TypeError, ValueError):
        return _Parameters((), frozenset(), True, True)
    return parameters._replace(positions=parameters.positions[1:], names=parameters.names - {parameters.positions[0]})


def call_module(module: nn.Module, batch: Any, *, has_loss: bool = False, num_items: Tensor | None = None) -> Any:
    """Return the outputs of a module: a dict gives arguments by name, a tuple or list by position.

    Parameters
    ----------
    has_loss
        Whether a function of outputs and batch computes the loss: forward then takes the first items of a tuple, as
        many as it has positions for, and the items of a dict that it names.
    num_items
        The labels that count in the whole step, for a forward that takes their number.

    Raises
    ------
    CallError
        Where forward does not take the batch.
    """
    positions, names = _select_arguments(module, batch, has_loss=has_loss)
    if num_items is not None:
        names[NUM_ITEMS] = num_items
    if is_of_transformers(module) and USE_CACHE in _list_parameters(module).names:
        names.setdefault(USE_CACHE, False)  # blocks that are computed again would find what they had cached
    try:
        return module(*positions, **names)
    except TypeError as error:
        _require_taken(_find_own(module), positions, names, error, has_loss=has_loss)
        raise


def _select_arguments(module: nn.Module, batch: Any, *, has_loss: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    parameters = _list_parameters(module)
    if isinstance(batch, Mapping):
        takes_all = parameters.takes_names or not has_loss
        return (), {key: item for key, item in batch.items() if takes_all or key in parameters.names}
    items = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    return (items if parameters.takes_positions or not has_loss else items[: len(parameters.positions)]), {}


def _require_taken(
    module: nn.Module, positions: tuple[Any, ...], names: dict[str, Any], error: TypeError, *, has_loss: bool
) -> None:
    """Raise `CallError` where it is the call itself that failed, and not the body of the forward."""
    forward: Any = module.forward
    try:
        inspect.signature(forward).bind(*positions, **names)
    except TypeError:
        parameters = _list_parameters(module)
        code = getattr(forward, "__code__", None)
        line = f"{code.co_filename}:{code.co_firstlineno}: " if code is not None else ""
        taken = ", ".join(parameters.positions) or ", ".join(sorted(parameters.names))
        items = f"a dict with {', '.join(names)}" if names else f"{len(positions)} item{'s' * (len(positions) != 1)}"
        nearest = "a forward that has them"
        if not has_loss:
            nearest += " and returns the loss, or a function loss(outputs, batch) beside it"
        raise CallError(
            f"{line}forward({taken}) of {type(module).__name__} takes a batch, met {items}; nearest: {nearest}"
        ) from error


def takes_num_items(module: nn.Module) -> bool:
    """Return whether a forward names the argument that gets the number of labels of a step.

    Those of transformers take it among others, without naming it: `may_take_num_items`.
    """
    return NUM_ITEMS in _list_parameters(module).names


def may_take_num_items(module: nn.Module) -> bool:
    """Return whether a module is one of transformers whose forward may hand the number of labels to its loss."""
    return is_of_transformers(module) and _list_parameters(module).takes_names


def is_of_transformers(module: nn.Module) -> bool:
    """Return whether a module has the loss and the configuration of a model of transformers."""
    own_module = _find_own(module)
    return hasattr(own_module, "config") and hasattr(type(own_module), "loss_function")


def find_labels(module: nn.Module, batch: Any) -> Tensor | None:
    """Return the labels of a batch as the loss counts them; ``None`` where it has none of that name."""
    if isinstance(batch, Mapping):
        items = dict(batch)
    else:
        positions, _ = _select_arguments(module, batch, has_loss=False)
        items = dict(zip(_list_parameters(module).positions, positions, strict=False))
    shifted_labels, labels = items.get(SHIFTED_LABELS), items.get(LABELS)
    if isinstance(shifted_labels, Tensor):
        return shifted_labels
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return None
    return labels[..., 1:] if _predicts_next(module) and labels.dim() > 1 else labels


def count_labels(module: nn.Module, batch: Any) -> Tensor | None:
    """Return the number of labels of a batch that count; ``None`` where it has none."""
    labels = find_labels(module, batch)
    return None if labels is None else (labels != IGNORED).sum()


def _predicts_next(module: nn.Module) -> bool:
    """Return whether a model of transformers predicts the next token, so that the first label is of no position."""
    own_module: Any = _find_own(module)
    if not is_of_transformers(own_module) or getattr(own_module.config, "is_encoder_decoder", False):
        return False
    return getattr(own_module.loss_function, "__name__", "") == "ForCausalLMLoss"


def mask_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch in whose first half of samples half of the labels do not count."""
    labels: Tensor = batch[LABELS].clone()
    labels[: len(labels) // 2, labels.shape[1] // 2 :] = IGNORED
    return {**batch, LABELS: labels}


def count_items_of_step(module: nn.Module, batch: Any, num_ranks: int) -> Tensor:
    """Return the labels that count in the batches of all ranks; `CallError` where there are none."""
    count = count_labels(module, batch)
    if count is None:
        raise CallError(f"a forward that takes {NUM_ITEMS} has a batch with {LABELS}, met none of that name")
    if num_ranks > 1:
        torch.distributed.all_reduce(count)
    if not count:
        raise CallError(f"a step has {LABELS} other than {IGNORED}, met none")
    return count
