"""Digests of what several ranks have of one parameter, which are equal wherever a plan makes copies."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.executor.recording.tensors import to_local


def digest_copies(module: nn.Module, states: Mapping[Tensor, Mapping[str, Any]]) -> dict[str, str]:
    """Return a digest of every parameter of this rank, with its optimizer states, and of every buffer, by name."""
    digests = {}
    for name, parameter in module.named_parameters():
        values = [parameter, *(v for _, v in sorted(states.get(parameter, {}).items()) if isinstance(v, Tensor))]
        digests[name] = _digest(values)
    return digests | {name: _digest([buffer]) for name, buffer in module.named_buffers()}


def _digest(tensors: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        local = to_local(tensor.detach()).cpu().contiguous()
        digest.update(local.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def find_unequal_copies(rank_digests: Sequence[Mapping[str, Any]], num_shards: int) -> list[str]:
    """Return the names of which ranks with the same shard have different values.

    Parameters
    ----------
    rank_digests
        Those of every rank; consecutive ranks have the shards of one copy.

    >>> find_unequal_copies([{"a": "1", "b": "3"}, {"a": "2"}, {"a": "1", "b": "4"}, {"a": "2"}], 2)
    ['b']
    """
    digests: dict[tuple[str, int], set[str]] = {}
    for rank, names in enumerate(rank_digests):
        for name, digest in names.items():
            digests.setdefault((name, rank % num_shards), set()).add(digest)
    return sorted({name for (name, _), values in digests.items() if len(values) > 1})
