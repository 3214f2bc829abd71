"""First values that lie in safetensors files, of which a rank reads its own parts alone."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from meshwise.executor.recording.weight_files import INDEX, STEM


class StoredTensor(NamedTuple):
    """Where a tensor lies, and the dtype that a module has it in."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class StoredValues:
    """Values of parameters, by name, in files; each is read anew, and no file stays open."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self._tensors = dict(tensors)

    def read(self, name: str) -> Tensor:
        """Return the values of a parameter."""
        tensor = self._tensors[name]
        with safe_open(tensor.file, "pt") as file:
            values: Tensor = file.get_tensor(tensor.key)
            return values.to(tensor.dtype, copy=True)

    def read_part(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a box of the values of a parameter; no more of it is read."""
        tensor = self._tensors[name]
        if not tensor.shape:
            return self.read(name)
        ranges = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
        with safe_open(tensor.file, "pt") as file:
            values: Tensor = file.get_slice(tensor.key)[ranges]
            return values.to(tensor.dtype, copy=True)

    def compute_digest(self) -> str:
        """Return words that change with names, shapes and files, by their size."""
        rows = [
            (name, tensor.file.name, tensor.file.stat().st_size, *tensor[1:])
            for name, tensor in sorted(self._tensors.items())
        ]
        return repr(rows)


def find_stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a folder as `save_pretrained` of transformers writes it, by name."""
    single, index = folder / f"{STEM}.safetensors", folder / INDEX
    if single.is_file():
        files = [single]
    elif index.is_file():
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    else:
        files = []
    found: dict[str, StoredTensor] = {}
    for path in files:
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118, it is no dict
                found[key] = StoredTensor(path, key, tuple(file.get_slice(key).get_shape()), torch.float32)
    return found


def match_parameters(module: nn.Module, stored: Mapping[str, StoredTensor]) -> StoredValues | None:
    """Return the values of a module's parameters; ``None`` where some have none of their name and shape.

    Buffers that are stored too get their values.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    tensors: dict[str, StoredTensor] = {}
    for name, parameter in module.named_parameters():
        tensor = next((stored[item] for item in names[id(parameter)] if item in stored), None)
        if tensor is None or tensor.shape != tuple(parameter.shape):
            return None
        tensors[name] = tensor._replace(dtype=parameter.dtype)
    states: dict[str, Any] = module.state_dict(keep_vars=True)
    all_names = {name for row in names.values() for name in row}
    buffers = {
        name: stored[name]._replace(dtype=state.dtype)
        for name, state in states.items()
        if name in stored and name not in all_names
    }
    if any(tensor.shape != tuple(states[name].shape) for name, tensor in buffers.items()):
        return None
    with torch.no_grad():
        for name in buffers:
            states[name].copy_(StoredValues(buffers).read(name))
    return StoredValues(tensors)
