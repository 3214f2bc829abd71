"""Reads folders of torch's distributed checkpoint without running what is in them.

Torch unpickles the file that tells what is where, and small states, whatever they name. Here only the classes of which
such files consist are known, and states are read as torch reads weights.
"""

import pickle
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from meshwise.executor.saving.writing import METADATA

_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
"""Those whose classes describe what is where."""
_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    ("torch.distributed._shard.metadata", "ShardMetadata"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "Path"),
    ("pathlib._local", "PosixPath"),
    ("builtins", "set"),
    ("builtins", "getattr"),  # of the pickled members of an enumeration in Python 3.11; see `find_class`
}


class _Unpickler(pickle.Unpickler):
    """Knows the classes of a checkpoint's description alone."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class by its name; ``UnpicklingError`` where it is none of those."""
        if (module, name) == ("builtins", "getattr"):
            return _find_member
        value = super().find_class(module, name) if _is_known(module, name) else None
        if value is None or (module in _MODULES and not isinstance(value, type)):
            raise pickle.UnpicklingError(f"a description of states has none of {module}.{name}")
        return value


def _is_known(module: str, name: str) -> bool:
    is_number = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
    return (module, name) in _NAMES or (module in _MODULES and "." not in name) or is_number


def _find_member(owner: Any, name: str) -> Any:
    members = getattr(owner, "__members__", {})
    if name not in members:
        raise pickle.UnpicklingError(f"a description of states has none of {name}")
    return members[name]


class _Reader(FileSystemReader):
    """Reads the description of a folder by `_Unpickler`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what is where."""
        metadata = _Unpickler(BytesIO((Path(self.path) / METADATA).read_bytes())).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"a description of states, met {type(metadata).__name__}")
        if getattr(metadata, "storage_meta", None) is None:
            return metadata
        metadata.storage_meta.load_id = self.load_id  # type: ignore[union-attr]
        return metadata


class _Planner(DefaultLoadPlanner):
    """Reads small states as weights, of which torch makes numbers and containers alone."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """Take the bytes of a state."""
        checked = BytesIO()
        torch.save(torch.load(value, weights_only=True), checked)
        checked.seek(0)
        super().load_bytes(read_item, checked)


def list_shapes(checkpoint: Path) -> dict[str, tuple[int, ...] | None]:
    """Return the shapes of the states of a folder by their names; ``None`` for states that are no tensors."""
    rows = _Reader(checkpoint).read_metadata().state_dict_metadata
    return {key: tuple(row.size) if isinstance(row, TensorStorageMetadata) else None for key, row in rows.items()}


def load_keys(checkpoint: Path, wanted: dict[str, Any], *, is_alone: bool) -> None:
    """Read states of a folder into those of a dict, on all ranks together or on one ``is_alone``."""
    load(wanted, storage_reader=_Reader(checkpoint), planner=_Planner(), no_dist=is_alone)
