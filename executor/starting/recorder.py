"""Records how a function fills the tensors that it makes, which have no memory while it runs.

Every new tensor is on torch's meta device; the program sees the device that it asked for. What reads values, such as
``tensor.item()``, is given those that running the recorded operations again makes. Tensors with values, as files are
read into, stay what they are, and are constants for operations on others.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from meshwise.executor.recording.private_torch import storage_number
from meshwise.executor.starting.tape import Operation, Slot, Tape

META = torch.device("meta")
_EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
"""Operators whose results have no values yet; they are zeros where nothing fills them."""
_OVERWRITING = {
    "normal_",
    "uniform_",
    "fill_",
    "zero_",
    "copy_",
    "exponential_",
    "log_normal_",
    "cauchy_",
    "bernoulli_",
}
"""Operators that replace all values of their first argument without reading them."""
_READERS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
_DEVICE_GETTERS: dict[Any, Callable[[torch.device], Any]] = {
    Tensor.device.__get__: lambda device: device,
    Tensor.is_meta.__get__: lambda device: device.type == "meta",  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda device: device.type == "cpu",  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda device: device.type == "cuda",  # type: ignore[attr-defined]
}
"""Properties that tell where a tensor is."""
_RESIZED = {"resize_", "resize_as_", "set_.source_Storage", "set_.source_Storage_storage_offset"}
_ADDRESSES = {Tensor.data_ptr, Tensor.__dlpack__, Tensor.__dlpack_device__}
_UNTOLD = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}
"""Operators that change arguments without telling so."""


class UnrecordableError(Exception):
    """A program whose tensors cannot be filled again by running its operators."""


class Recorder(TorchDispatchMode):
    """Records on a tape what its body does with tensors.

    Attributes
    ----------
    reason
        Why it cannot be recorded, even if the program has caught the error; empty otherwise. Errors that operators
        raise with values too are none.
    is_running
        Whether an operator is being recorded.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape
        self.reason = ""
        self.is_running = False
        self._storages: dict[int, tuple[int, Any]] = {}
        self._devices: dict[int, torch.device] = {}
        self._own_error = 0
        self._readers = _Readers(self)

    def __enter__(self) -> "Recorder":
        self._readers.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._readers.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator without values, and record it."""
        self.is_running = True
        try:
            return self._run(function, args, dict(kwargs or {}))
        except Exception as error:  # the program may catch it, and go on as it would not with values
            if id(error) != self._own_error:
                self.reason = self.reason or f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
            raise
        finally:
            self.is_running = False

    def _run(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        flat, _ = tree_flatten((args, kwargs))
        tensors = [item for item in flat if isinstance(item, Tensor)]
        if any(type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided for tensor in tensors):
            self.refuse(f"{function} of tensors of another kind")
        if tensors and not any(map(self.knows, tensors)):
            if function is torch.ops.aten.lift_fresh.default:
                return self.lift(tensors[0])
            return self._call(function, args, kwargs)  # of values that are there
        if any(isinstance(item, torch.Generator) for item in flat):
            self.refuse("draws from a generator of its own")
        if self._reads_values(function, tensors):
            return self._evaluate(function, args, kwargs)
        return self._record(function, args, kwargs, tensors)

    def knows(self, tensor: Tensor) -> bool:
        """Return whether a tensor's storage is filled by the tape."""
        return tensor.is_meta and tensor.layout is torch.strided and storage_number(tensor) in self._storages

    def find_device(self, tensor: Tensor) -> torch.device:
        """Return the device that the program takes a known tensor to be on."""
        return self._devices[self._storages[storage_number(tensor)][0]]

    def is_promised(self, tensor: Tensor) -> bool:
        """Return whether the program itself has put a known tensor on the meta device, to be filled later."""
        return self.find_device(tensor).type == "meta"

    def find_slot(self, tensor: Tensor) -> Slot:
        """Return the slot of a known tensor."""
        if tensor.is_conj() or tensor.is_neg():
            self.refuse("a conjugated or negated view")
        number = self._storages[storage_number(tensor)][0]
        return Slot(number, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype)

    def read(self, tensor: Tensor) -> Tensor:
        """Return a tensor with the values that a known one has now."""
        return self.tape.compute(self.find_slot(tensor))

    def refuse(self, reason: str) -> NoReturn:
        """Raise that a program cannot be recorded."""
        self.reason = self.reason or reason
        raise UnrecordableError(reason)

    @staticmethod
    def _reads_values(function: Any, tensors: list[Tensor]) -> bool:
        if torch.Tag.data_dependent_output in function.tags:
            return True
        if torch.Tag.dynamic_output_shape not in function.tags:
            return False
        is_index = function is torch.ops.aten.index.Tensor
        return not is_index or any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors[1:])

    def _evaluate(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator on the values that tensors have now."""

        def find_values(item: Any) -> Any:
            return self.read(item) if isinstance(item, Tensor) and self.knows(item) else item

        result = self._call(function, tree_map(find_values, args), tree_map(find_values, kwargs))
        return tree_map(lambda item: self.lift(item) if isinstance(item, Tensor) else item, result)

    def _call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator on values; what it raises is the program's own error."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            self._own_error = id(error)
            raise

    def _find_shapes(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Return results without memory of an operator that needs values to know their shapes, or runs on no others."""

        def find_values(item: Any) -> Any:
            if isinstance(item, Tensor):
                return self.read(item)
            return torch.device("cpu") if isinstance(item, torch.device) else item

        with torch.random.fork_rng(devices=[]):
            results = self._call(function, tree_map(find_values, args), tree_map(find_values, kwargs))

        def forget(item: Any) -> Any:
            is_tensor = isinstance(item, Tensor)
            return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=META) if is_tensor else item

        return tree_map(forget, results)

    def lift(self, values: Tensor) -> Tensor:
        """Return a tensor without memory that a constant fills."""
        if values.is_meta:
            self.refuse("a tensor on the meta device that was there before")
        constant = values.detach().cpu().clone()  # the program may change its own
        result = torch.empty_strided(constant.shape, constant.stride(), dtype=constant.dtype, device=META)
        slot = self._add_slot(result, values.device)
        self.tape.add(Operation(None, (), frozenset(), frozenset(), {0: slot}, constant=constant))
        return result

    def _record(self, function: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        name = function._schema.name.partition("::")[2]
        overload = f"{name}.{function._overloadname}"
        if name in _RESIZED or overload in _RESIZED:
            self.refuse(f"{overload}, which changes the memory of a tensor")
        if name in _UNTOLD:
            self.refuse(f"{overload}, which may change buffers")
        if not tensors and name in _EMPTY and 0 in args[0]:
            return self._call(function, args, kwargs)  # torch.load has it point to values
        mutated = self._list_mutated(function, args, kwargs)
        if any(not self.knows(tensor) for tensor in mutated):
            self.refuse(f"{overload} on a tensor with values")
        device = self._find_new_device(kwargs, tensors)
        if self._takes_device(function, kwargs, tensors):
            kwargs["device"] = META
        kwargs.pop("pin_memory", None)
        lifted = {id(item): self.lift(item) for item in tensors if not self.knows(item)}
        args, kwargs = (tree_map(lambda item: lifted.get(id(item), item), part) for part in (args, kwargs))
        sources = [lifted.get(id(tensor), tensor) for tensor in tensors]
        arguments = self._replace(args, kwargs)
        read_slots = [self.find_slot(tensor) for tensor in sources]
        result, has_shapes = None, False
        with suppress(Exception):
            result, has_shapes = function(*args, **kwargs), True
        if not has_shapes:  # what it raises with values has no other error before it
            result = self._find_shapes(function, args, kwargs)
            if mutated:
                self.refuse(f"{overload}, which runs on values only")
        if torch.Tag.inplace_view in function.tags:
            return result
        writes = frozenset(self.find_slot(tensor).storage for tensor in mutated)
        results, _ = tree_flatten(result)
        if any(isinstance(item, Tensor) and item.layout is not torch.strided for item in results):
            self.refuse(f"{overload}, which makes a tensor of another kind")
        new_slots = {
            place: self._add_slot(item, device)
            for place, item in enumerate(results)
            if isinstance(item, Tensor) and not self.knows(item)
        }
        if name in _EMPTY or not (writes or new_slots):
            return result  # a view, or no values yet
        overwrites = name in _OVERWRITING and self._is_whole(mutated[0])
        reads = frozenset(slot.storage for slot in read_slots[overwrites:])
        is_draw = torch.Tag.nondeterministic_seeded in function.tags
        self.tape.add(Operation(function, arguments, reads, writes, new_slots, is_draw))
        return result

    def _find_new_device(self, kwargs: Any, tensors: list[Tensor]) -> torch.device:
        """Return the device on which the program takes new tensors of an operator to be."""
        if kwargs.get("device") is not None:
            return torch.device(kwargs["device"])
        known = [tensor for tensor in tensors if self.knows(tensor)]
        return self.find_device(known[0]) if known else torch.device("cpu")

    @staticmethod
    def _takes_device(function: Any, kwargs: Any, tensors: list[Tensor]) -> bool:
        has_argument = any(argument.name == "device" for argument in function._schema.arguments)
        return has_argument and (not tensors or kwargs.get("device") is not None)

    @staticmethod
    def _list_mutated(function: Any, args: Any, kwargs: Any) -> list[Tensor]:
        """Return the tensors that an operator changes."""
        found = []
        for place, argument in enumerate(function._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                found += [item for item in tree_flatten(value)[0] if isinstance(item, Tensor)]
        return found

    def _replace(self, args: Any, kwargs: Any) -> Any:
        """Return arguments with slots in the place of tensors, for a run on the host."""

        def replace(item: Any) -> Any:
            if isinstance(item, Tensor):
                return self.find_slot(item)
            return torch.device("cpu") if isinstance(item, torch.device) else item

        return tree_map(replace, args), tree_map(replace, kwargs)

    def _add_slot(self, tensor: Tensor, device: torch.device) -> Slot:
        storage = tensor.untyped_storage()
        number = len(self._storages)
        self._devices[number] = device
        self._storages[storage_number(tensor)] = (number, storage)  # kept, so that its address stays its own
        self.tape.sizes[number] = storage.nbytes()
        return self.find_slot(tensor)

    @staticmethod
    def _is_whole(tensor: Tensor) -> bool:
        """Return whether a tensor has all values of its storage."""
        return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


class _Readers(TorchFunctionMode):
    """Has methods that read values without an operator of torch read those that the tape makes.

    Properties tell the device that the program asked for, so that it does not skip what fills a tensor.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        is_known = function in _READERS or function in _DEVICE_GETTERS or function in _ADDRESSES
        if is_known and not self._recorder.is_running and args and self._recorder.knows(args[0]):
            if function in _DEVICE_GETTERS:
                return _DEVICE_GETTERS[function](self._recorder.find_device(args[0]))
            if function in _ADDRESSES:
                self._recorder.refuse(f"asks for the memory of a tensor ({function.__name__})")
            with _disable_current_modes():
                values = self._recorder.read(args[0]).requires_grad_(args[0].requires_grad)
            args = (values, *args[1:])
        return function(*args, **(kwargs or {}))
