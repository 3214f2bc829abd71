"""The first values of parameters by name, whole or the part that a rank has."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from meshwise.executor.starting.tape import Slot, Tape


class FirstValues(Protocol):
    """The first values of a module's parameters, in host memory, each time anew."""

    def read(self, name: str) -> Tensor:
        """Return the values of a parameter."""

    def read_part(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a box of the values of a parameter: along each dim ``sizes`` indices from ``offsets`` on."""

    def compute_digest(self) -> str:
        """Return words that are equal on ranks whose values are equal."""


class RecordedValues:
    """Values that running recorded operations makes.

    Parameters
    ----------
    slots
        Those of all parameters by name.
    """

    def __init__(self, tape: Tape, slots: Mapping[str, Slot]) -> None:
        self.tape, self._slots = tape, dict(slots)

    def read(self, name: str) -> Tensor:
        """Return the values of a parameter."""
        slot = self._slots[name]
        values = self.tape.compute(slot)
        is_part = values.nbytes != values.untyped_storage().nbytes()
        return values.clone() if is_part else values

    def read_part(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a box of the values of a parameter, all of which are made for it."""
        return select_box(self.read(name), offsets, sizes).clone()

    def compute_digest(self) -> str:
        """Return words that are equal on ranks whose values are equal."""
        return f"{self.tape.compute_digest()} {sorted(self._slots.items())}"


def select_box(values: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return a view of a box of a tensor.

    >>> import torch
    >>> select_box(torch.arange(6).view(2, 3), (1, 0), (1, 2))
    tensor([[3, 4]])
    """
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        values = values.narrow(dim, offset, size)
    return values
