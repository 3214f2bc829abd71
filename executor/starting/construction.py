"""A module that is built without the memory of its parameters, whose first values are found one by one.

Which values they are depends on the program and the seed alone: random draws are seeded by the name of the parameter
that they fill, so that it does not matter which rank makes which of them. A program that cannot be recorded, as one
that draws from a generator of its own, is run once more as it is.
"""

import gc
import re
import weakref
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from meshwise.executor.recording.rank_files import UserError
from meshwise.executor.starting.draws import keep_all_draws, seed_draws
from meshwise.executor.starting.first_values import FirstValues, RecordedValues
from meshwise.executor.starting.recorder import Recorder, UnrecordableError
from meshwise.executor.starting.tape import Tape


class StartError(UserError):
    """A function that does not build a module with values."""


@dataclass(frozen=True)
class DeferredModule:
    """A module whose parameters are on the meta device; its buffers and other tensors have their values.

    Parameters
    ----------
    values
        The first values of its parameters, by the names of ``module.named_parameters()``.
    """

    module: nn.Module
    values: FirstValues

    def build(self) -> nn.Module:
        """Return the module with all its parameters in host memory."""
        fill_parameters(self.module, self.values)
        return self.module


@dataclass(frozen=True)
class WholeModule:
    """A module with all its parameters in memory.

    Parameters
    ----------
    reason
        Why it could not be built without them; empty where it was there already.
    """

    module: nn.Module
    reason: str = ""

    def build(self) -> nn.Module:
        """Return the module."""
        return self.module


Start = DeferredModule | WholeModule


def start_module(build: Callable[[], nn.Module], seed: int) -> Start:
    """Return the module that a function returns, without the memory of its parameters where that can be.

    What the function itself raises is raised. Draws of the caller stay as they were.

    Parameters
    ----------
    build
        It is called once more where what it does cannot be recorded.
    seed
        That of draws, unless the function seeds them itself.

    Raises
    ------
    StartError
        Where it returns no module, or one without values.
    """
    recorder = Recorder(Tape(seed))
    with keep_all_draws():
        try:
            return _record(build, seed, recorder)
        except Exception as error:
            reason = recorder.reason or _find_reason(error)
            if not reason:
                raise
        for tensor in _list_live(recorder):  # in caches of the program
            with suppress(RuntimeError):
                give_values(tensor, recorder.read(tensor))
        seed_draws(seed)
        module = _require_module(build())
    for name, tensor in module.named_parameters():
        if tensor.is_meta:
            rule = "the parameters of a module that is built have values"
            raise StartError(f"{rule}, met {name} on the meta device; nearest: a method init_weights()")
    return WholeModule(module, reason)


def make_start(module: nn.Module | Callable[[], nn.Module], seed: int) -> Start:
    """Return the start of a module, or of the function that builds it (`start_module`)."""
    return WholeModule(module) if isinstance(module, nn.Module) else start_module(module, seed)


def _record(build: Callable[[], nn.Module], seed: int, recorder: Recorder) -> DeferredModule:
    seed_draws(seed)
    with recorder:
        module = _require_module(build())
    if recorder.reason:
        raise UnrecordableError(recorder.reason)
    recorder.tape.seed = torch.initial_seed()
    try:
        if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
            recorder.refuse("parameters whose shapes the first batch says")
        fill_promised(module, recorder)
        return _take_values(module, recorder)
    except Exception as error:  # none of the program's own
        recorder.reason = recorder.reason or _describe(error)
        raise


def _require_module(module: object) -> nn.Module:
    if not isinstance(module, nn.Module):
        rule = "a function that builds a module returns a torch.nn.Module"
        raise StartError(f"{rule}, met {type(module).__name__}")
    return module


def _find_reason(error: BaseException) -> str:
    """Return what a program did with a tensor that has no values, if that made an error or its causes."""
    errors = [item for item in _list_causes(error) if isinstance(item, RuntimeError | TypeError)]
    return next((_describe(item) for item in errors if re.search(r"\bmeta\b", str(item))), "")


def _list_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _describe(error: BaseException) -> str:
    if isinstance(error, UnrecordableError):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _list_live(recorder: Recorder) -> list[Tensor]:
    """Return the tensors of a recording that something has."""
    gc.collect()
    return [item for item in gc.get_objects() if issubclass(type(item), Tensor) and recorder.knows(item)]


def fill_promised(module: nn.Module, recorder: Recorder) -> None:
    """Have a module fill the parameters that its program itself has put on the meta device, if there is a method."""
    owners = [
        owner
        for owner in module.modules()
        if any(recorder.knows(item) and recorder.is_promised(item) for item in owner.parameters(recurse=False))
    ]
    if not owners:
        return
    with recorder:
        if callable(init := getattr(module, "init_weights", None)):
            init()
            return
        for owner in owners:
            if callable(reset := getattr(owner, "reset_parameters", None)):
                reset()


def _take_values(module: nn.Module, recorder: Recorder) -> DeferredModule:
    """Return a recorded module, of which all but the parameters have their values."""
    tape = recorder.tape
    for parameter in list(module.parameters()):
        if not recorder.knows(parameter):  # with values: it is a constant
            replace_parameter(module, parameter, recorder.lift(parameter.detach()))
    parameters = dict(module.named_parameters())
    slots = {name: recorder.find_slot(parameter) for name, parameter in parameters.items()}
    named_slots = [(name, slot.storage) for name, slot in slots.items()]
    named_slots += [(n, recorder.find_slot(b).storage) for n, b in module.named_buffers() if recorder.knows(b)]
    for name, storage in named_slots:
        tape.name_draws(name, storage)
    _fill_others(recorder, frozenset(map(id, parameters.values())), [slot.storage for slot in slots.values()])
    return DeferredModule(module, RecordedValues(tape, slots))


def _fill_others(recorder: Recorder, parameter_ids: frozenset[int], parameter_storages: list[int]) -> None:
    """Give values to all tensors of a recording that are still there and are no parameters: buffers, and any others."""
    if len(set(parameter_storages)) < len(parameter_storages):
        raise UnrecordableError("two parameters share memory")
    others = [tensor for tensor in _list_live(recorder) if id(tensor) not in parameter_ids]
    others.sort(key=Tensor._is_view, reverse=True)  # a view holds what it is a view of, which torch then does not swap
    storages: dict[int, Tensor] = {}
    for tensor in others:
        slot = recorder.find_slot(tensor)
        if slot.storage in parameter_storages or tensor.grad_fn is not None:
            raise UnrecordableError("a tensor beside a parameter has its memory or is computed of it")
        if slot.storage not in storages:
            storages[slot.storage] = recorder.tape.compute(slot)
        storage = storages[slot.storage].untyped_storage()
        give_values(tensor, torch.empty(0, dtype=slot.dtype).set_(storage, slot.offset, slot.shape, slot.stride))


def fill_parameters(
    module: nn.Module,
    values: FirstValues,
    names: Container[str] | None = None,
    device: torch.device | None = None,
) -> None:
    """Give parameters of a module, all or those of some names, their first values, one after the other."""
    for name, parameter in list(module.named_parameters()):
        if names is None or name in names:
            replace_parameter(module, parameter, values.read(name).to(device, parameter.dtype))


def replace_parameter(module: nn.Module, parameter: nn.Parameter, values: Tensor) -> None:
    """Give a parameter of a module other values; in place, so that all that has it keeps it, where torch can."""
    if not weakref.getweakrefs(parameter):
        give_values(parameter, values)
        return
    replaced = nn.Parameter(values, requires_grad=parameter.requires_grad)
    vars(replaced).update(vars(parameter))
    for owner in module.modules():
        for name, own_parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if own_parameter is parameter:
                setattr(owner, name, replaced)  # recurrent layers of torch keep lists of them besides


def give_values(tensor: Tensor, values: Tensor) -> None:
    """Have a tensor, in every place that has it, be one with other values; its attributes stay."""
    needs_gradient = tensor.requires_grad
    if isinstance(tensor, nn.Parameter):
        values = nn.Parameter(values, requires_grad=needs_gradient)
    elif isinstance(tensor, nn.Buffer):
        values = nn.Buffer(values, persistent=tensor.persistent)
    elif needs_gradient:
        values.requires_grad_()
    vars(values).update(vars(tensor))
    torch.utils.swap_tensors(tensor, values)  # type: ignore[no-untyped-call]
