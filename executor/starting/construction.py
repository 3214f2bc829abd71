"""A module that is built without the memory of its parameters, whose first values are found one by one.

Which values they are depends on the program and the seed alone: random draws are seeded by the name of the parameter
that they fill, so that it does not matter which rank makes which of them. A program that cannot be recorded, as one
that reads a file or draws from a generator of its own, is run as it is.
"""

import gc
import random
import weakref
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from meshwise.executor.starting.first_values import FirstValues, RecordedValues
from meshwise.executor.starting.recorder import Recorder, UnrecordableError
from meshwise.executor.starting.tape import Tape


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


def start_module(build: Callable[[], nn.Module], seed: int) -> nn.Module | DeferredModule:
    """Return the module that a function returns, without the memory of its parameters where that can be.

    Which of them it is depends on the function alone, and so do first parameters, beside the seed.

    Parameters
    ----------
    build
        It is called once more where what it does cannot be recorded.
    seed
        That of draws, unless the function seeds them itself.
    """
    recorder = Recorder(Tape(seed))
    with suppress(Exception):  # the program, run as it is, tells what is wrong with it
        return _record(build, seed, recorder)
    for tensor in _list_live(recorder):  # in caches of the program
        with suppress(RuntimeError):
            give_values(tensor, recorder.read(tensor))
    seed_draws(seed)
    return build()


def seed_draws(seed: int) -> None:
    """Seed the random numbers of torch, numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _record(build: Callable[[], nn.Module], seed: int, recorder: Recorder) -> DeferredModule:
    seed_draws(seed)
    with recorder:
        module = build()
        fill_rest(module, recorder)
    if recorder.reason:
        raise UnrecordableError(recorder.reason)
    recorder.tape.seed = torch.initial_seed()
    return _take_values(module, recorder)


def _list_live(recorder: Recorder) -> list[Tensor]:
    """Return the tensors of a recording that something has."""
    gc.collect()
    return [item for item in gc.get_objects() if issubclass(type(item), Tensor) and recorder.knows(item)]


def fill_rest(module: nn.Module, recorder: Recorder) -> None:
    """Have modules fill the parameters that nothing has filled yet, if they have a method for it."""
    unfilled = [
        (owner, parameter)
        for owner in module.modules()
        for parameter in owner.parameters(recurse=False)
        if recorder.knows(parameter) and not recorder.tape.is_written(recorder.find_slot(parameter).storage)
    ]
    if not unfilled:
        return
    if callable(init := getattr(module, "init_weights", None)):
        init()
        return
    for owner in dict.fromkeys(owner for owner, _ in unfilled):
        if callable(reset := getattr(owner, "reset_parameters", None)):
            reset()


def _take_values(module: nn.Module, recorder: Recorder) -> DeferredModule:
    """Return a recorded module, of which all but the parameters have their values."""
    tape = recorder.tape
    parameters = dict(module.named_parameters())
    if any(
        isinstance(tensor, UninitializedParameter | UninitializedBuffer)
        for tensor in (*parameters.values(), *module.buffers())
    ):
        raise UnrecordableError("parameters whose shape the first batch says")
    for name, parameter in parameters.items():
        if not recorder.knows(parameter):  # with values: it is a constant
            values = parameter.detach()
            with recorder:
                lifted = torch.ops.aten.lift_fresh(values if not values.is_meta else torch.empty(0))
            if values.is_meta:
                raise UnrecordableError(f"{name} is on the meta device, and nothing fills it")
            replace_parameter(module, parameter, lifted)
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
    storages: dict[int, Tensor] = {}
    for tensor in others:
        slot = recorder.find_slot(tensor)
        if slot.storage in parameter_storages or tensor.grad_fn is not None:
            raise UnrecordableError("a tensor beside a parameter has its memory or is computed of it")
        if slot.storage not in storages:
            storages[slot.storage] = recorder.tape.compute(slot)
        storage = storages[slot.storage].untyped_storage()
        give_values(tensor, torch.empty(0, dtype=slot.dtype).set_(storage, slot.offset, slot.shape, slot.stride))


def fill_parameters(module: nn.Module, values: FirstValues, names: Container[str] | None = None) -> None:
    """Give parameters of a module, all or those of some names, their first values, one after the other."""
    for name, parameter in list(module.named_parameters()):
        if names is None or name in names:
            replace_parameter(module, parameter, values.read(name).to(parameter.dtype))


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
