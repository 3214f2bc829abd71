"""Operations that fill tensors, recorded without their values, and run again for one tensor at a time.

A tensor is a *slot*: a view of a storage. What fills a storage are the recorded operations that write to it, and those
that write to what they read. Each operation that draws random numbers has a seed of its own, so that its values do not
depend on what else is run again.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

CPU = torch.device("cpu")


class Slot(NamedTuple):
    """A tensor as a view of a storage; ``offset`` is in elements."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Operation:
    """An operation that writes to storages.

    Parameters
    ----------
    function
        An operator of torch, or ``None`` where a constant is copied.
    arguments
        Positional and named arguments, with slots in the place of tensors.
    reads, writes
        Storages that it reads or changes; new ones are not among them. One that it changes in part it reads too.
    results
        Its new tensors, by their place among all that it returns.
    is_draw
        Whether it draws random numbers.
    """

    function: Callable[..., Any] | None
    arguments: Any
    reads: frozenset[int]
    writes: frozenset[int]
    results: Mapping[int, Slot]
    is_draw: bool = False
    constant: Tensor | None = None

    @property
    def all_writes(self) -> frozenset[int]:
        """Storages that it changes or makes."""
        return self.writes | {slot.storage for slot in self.results.values()}


@dataclass
class Tape:
    """Recorded operations, and the bytes of every storage.

    Parameters
    ----------
    seed
        That of all draws; each has one of its own, of this and of the name that `name_draws` gives it.
    """

    seed: int
    operations: list[Operation] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    draw_names: dict[int, str] = field(default_factory=dict)
    _writers: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def add(self, operation: Operation) -> None:
        """Record an operation after the others."""
        for storage in operation.all_writes:
            self._writers[storage].append(len(self.operations))
        self.operations.append(operation)

    def is_written(self, storage: int) -> bool:
        """Return whether an operation has written to a storage."""
        return bool(self._writers.get(storage))

    def find_operations(self, storage: int) -> list[int]:
        """Return the numbers of the operations on which the values of a storage depend, in order."""
        found: set[int] = set()
        pending = [(storage, len(self.operations))]
        while pending:
            current, end = pending.pop()
            number = next((number for number in reversed(self._writers.get(current, ())) if number < end), None)
            if number is not None and number not in found:
                found.add(number)
                pending += [(source, number) for source in self.operations[number].reads]
        return sorted(found)

    def name_draws(self, name: str, storage: int) -> None:
        """Name the draws on which a storage depends after a tensor, unless an earlier one has named them."""
        draws = [number for number in self.find_operations(storage) if self.operations[number].is_draw]
        for place, number in enumerate(draws):
            self.draw_names.setdefault(number, f"{self.seed} {name} {place}")

    def compute_digest(self) -> str:
        """Return words that change with the operations, their constants and the names of draws."""
        digest = blake2b(repr(sorted(self.draw_names.items())).encode(), digest_size=16)
        for operation in self.operations:
            words = (operation.function, operation.arguments, sorted(operation.results.items()))
            digest.update(repr(words).encode())
            if operation.constant is not None:
                digest.update(operation.constant.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def compute(self, slot: Slot) -> Tensor:
        """Return the values of a slot in host memory, which nothing else has.

        The most memory at a time is that of the slot's storage and of what its operations read.
        """
        numbers = self.find_operations(slot.storage)
        last_uses: dict[int, int] = {}
        for number in numbers:
            operation = self.operations[number]
            last_uses.update(dict.fromkeys(operation.reads | operation.all_writes, number))
        ends = defaultdict(list)
        for storage, number in last_uses.items():
            if storage != slot.storage:
                ends[number].append(storage)
        storages = _Storages(self.sizes)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for number in numbers:
                self._run(number, storages)
                for storage in ends[number]:
                    storages.drop(storage)
            return storages.view(slot)

    def _run(self, number: int, storages: "_Storages") -> None:
        operation = self.operations[number]
        if operation.function is None:
            assert operation.constant is not None
            storages.keep(operation.results[0], operation.constant.clone())
            return
        args, named = tree_map(
            lambda item: storages.view(item) if isinstance(item, Slot) else item,
            operation.arguments,
            is_leaf=lambda item: isinstance(item, Slot),
        )
        if operation.is_draw:
            torch.manual_seed(self.find_seed(number))
        results, _ = tree_flatten(operation.function(*args, **named))
        for place, slot in operation.results.items():
            storages.keep(slot, results[place])

    def find_seed(self, number: int) -> int:
        """Return the seed of a draw; one that was read while the module was built has its number for a name."""
        name = self.draw_names.setdefault(number, f"{self.seed} draw {number}")
        return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


class _Storages:
    """The storages that operations use at a time, in host memory; what was never written is zeros."""

    def __init__(self, sizes: Mapping[int, int]) -> None:
        self._sizes, self._bytes = sizes, dict[int, Tensor]()

    def view(self, slot: Slot) -> Tensor:
        """Return a slot as a tensor on its storage."""
        if slot.storage not in self._bytes:
            self._bytes[slot.storage] = torch.zeros(self._sizes[slot.storage], dtype=torch.uint8, device=CPU)
        storage = self._bytes[slot.storage].untyped_storage()
        return torch.empty(0, dtype=slot.dtype, device=CPU).set_(storage, slot.offset, slot.shape, slot.stride)

    def keep(self, slot: Slot, values: Tensor) -> None:
        """Have a slot's storage be that of a tensor, or a copy where it lies otherwise in its own."""
        place = tuple(values.shape), tuple(values.stride()), values.storage_offset(), values.dtype
        storage = values.untyped_storage()
        if place == slot[1:] and storage.nbytes() == self._sizes[slot.storage]:
            self._bytes[slot.storage] = torch.empty(0, dtype=torch.uint8, device=CPU).set_(
                storage, 0, (storage.nbytes(),), (1,)
            )
        else:
            self.view(slot).copy_(values)

    def drop(self, storage: int) -> None:
        """Free a storage."""
        self._bytes.pop(storage, None)
