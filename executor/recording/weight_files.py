"""Weights as a folder of safetensors files: ``model.safetensors``, or numbered shards with an index.

A tensor that has several names, such as a table at both ends of a language model, is written once, under its first
name; the metadata of its file has the others, as ``safetensors.torch.load_model`` expects. Names and index are those of
transformers [1]_.

References
----------
.. [1] Hugging Face, "Safetensors", the format and its treatment of shared tensors.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from meshwise.executor.recording.rank_files import UserError

STEM = "model"
INDEX = f"{STEM}.safetensors.index.json"
SHARD_SIZE = 5 * 10**9
"""Bytes of a file, at most; a larger tensor has a file of its own."""
_FORMAT = {"format": "pt"}


class WeightsError(UserError):
    """Weights that cannot be written as safetensors, or a folder that has none."""


def find_aliases(module: nn.Module) -> dict[str, str]:
    """Return, for every further name of a parameter or buffer, its first name.

    >>> module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> module[1].weight = module[0].weight
    >>> find_aliases(module)
    {'1.weight': '0.weight'}
    """
    first_names: dict[int, str] = {}
    aliases = {}
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        first_name = first_names.setdefault(id(tensor), name)
        if first_name != name:
            aliases[name] = first_name
    return aliases


def write_weights(
    folder: Path, weights: Mapping[str, Tensor], aliases: Mapping[str, str], shard_size: int = SHARD_SIZE
) -> Path:
    """Write weights into a folder, in place of those that are there; return the file that names them all.

    Parameters
    ----------
    aliases
        The names that are not written, each with the name of its tensor.

    Raises
    ------
    WeightsError
        Where the weights have something other than tensors of a dtype that safetensors has.
    """
    tensors = {name: _copy_plain(name, tensor) for name, tensor in weights.items() if name not in aliases}
    shards = list(_divide(tensors, shard_size)) or [[]]
    files = [f"{STEM}{_number(place, len(shards))}.safetensors" for place in range(1, len(shards) + 1)]
    folder.mkdir(parents=True, exist_ok=True)
    for stale_file in list_weight_files(folder):
        stale_file.unlink()
    for file, names in zip(files, shards, strict=True):
        metadata = _FORMAT | {alias: name for alias, name in aliases.items() if name in names}
        try:
            save_file({name: tensors[name] for name in names}, folder / file, metadata=metadata)
        except (SafetensorError, ValueError, KeyError) as error:
            raise WeightsError(f"{folder / file}: weights that safetensors can write, met {error}") from error
    if len(shards) == 1:
        return folder / files[0]
    weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return folder / INDEX


def _copy_plain(name: str, tensor: object) -> Tensor:
    """Return a tensor in memory of its own, which safetensors demands; `WeightsError` for anything else."""
    if not isinstance(tensor, Tensor):
        raise WeightsError(f"weights are tensors, met {name} of {type(tensor).__name__}")
    whole = tensor.detach().cpu().contiguous()
    is_part = whole.untyped_storage().nbytes() != whole.nbytes
    return whole.clone() if is_part else whole


def _divide(tensors: Mapping[str, Tensor], shard_size: int) -> Iterator[list[str]]:
    """Yield the names of every shard, in order."""
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + tensor.nbytes > shard_size:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    if names:
        yield names


def _number(place: int, num_shards: int) -> str:
    return f"-{place:05d}-of-{num_shards:05d}" if num_shards > 1 else ""


def list_weight_files(folder: Path) -> Sequence[Path]:
    """Return the files of weights in a folder, and their index where there is one."""
    return sorted((*folder.glob(f"{STEM}.safetensors"), *folder.glob(f"{STEM}-*.safetensors"), *folder.glob(INDEX)))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights in a folder under all their names; `WeightsError` where there are none."""
    files = [path for path in list_weight_files(folder) if path.suffix == ".safetensors"]
    if not files:
        raise WeightsError(f"{folder}: a folder with {STEM}.safetensors, met none")
    weights: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            weights.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
            aliases.update({name: value for name, value in (file.metadata() or {}).items() if value in file.keys()})  # noqa: SIM118
    return weights | {alias: weights[name] for alias, name in aliases.items()}
