"""Context parallelism: every rank of a group has a part of each sequence, and attention spans them all.

A sequence is cut into two parts a rank: rank ``i`` of ``n`` has part ``i`` and part ``2n - 1 - i``, so that causal
attention is equal work for all [1]_. Keys and values go round (ring), are gathered [1]_, or heads are exchanged for
tokens (Ulysses [2]_).

References
----------
.. [1] Grattafiori et al. 2024, "The Llama 3 herd of models", section 3.3.2 (context parallelism).
.. [2] Jacobs et al. 2023, "DeepSpeed Ulysses", section 3.1.
"""

from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from executor.exchange import exchange_parts, gather_parts
from executor.model import Core, Network
from executor.ring_attention import ring_attention
from strategies.mesh import CONTEXT
from strategies.parallelism import Attention


def positions(rank: int, ranks: int, sequence: int) -> NDArray[np.int64]:
    """Return the positions of the tokens that a rank of a context group has.

    >>> positions(1, 2, 8).tolist()
    [2, 3, 4, 5]
    >>> positions(0, 2, 8).tolist()
    [0, 1, 6, 7]
    """
    parts = np.arange(sequence).reshape(2 * ranks, -1)
    return np.concatenate([parts[rank], parts[-1 - rank]])


def apply(network: Network, group: dist.ProcessGroup, attention: Attention, sequence: int) -> None:
    """Make ``network`` read this rank's part of sequences of ``sequence`` tokens, in place."""
    device = next(network.parameters()).device
    own = torch.from_numpy(positions(group.rank(), group.size(), sequence)).to(device)
    if network.embedding is not None:
        network.embedding.own = own
    for layer in network.decoder_layers():
        layer.own = own
        if attention is Attention.RING:
            layer.core = partial(ring_attention, group=group)
        else:
            how = gathered_attention if attention is Attention.ALL_GATHER else ulysses_attention
            layer.core, layer.run = partial(how, partial(layer.run, layer.core), group=group), layer.run_once


def gathered_attention(core: Core, query: Tensor, key: Tensor, value: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Return the context of a rank's queries, with ``core`` over the keys gathered from all ranks.

    Each half of the queries meets the keys up to its own end: together half of the square.
    """
    half = query.shape[2] // 2
    keys, values = (natural_order(gather_parts(part, group, CONTEXT)) for part in (key, value))
    ends = (group.rank() + 1) * half, (2 * group.size() - group.rank()) * half
    result = []
    own = query.contiguous()  # what backward keeps of a view is all of the storage, where keys and values are too
    for queries, end in zip(own.chunk(2, 2), ends, strict=True):
        places = torch.arange(end, device=query.device)
        result.append(core(queries, keys[:, :, :end], values[:, :, :end], places <= places[end - half :, None]))
    return torch.cat(result, 2)


def ulysses_attention(core: Core, query: Tensor, key: Tensor, value: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Return the context of a rank's queries: whole sequences of its heads by ``core``, exchanged before and after."""

    def whole(heads: Tensor) -> Tensor:
        return natural_order(exchange_parts(torch.stack(heads.chunk(group.size(), 1)), group, CONTEXT))

    context = core(whole(query), whole(key), whole(value))
    return torch.cat(exchange_parts(rank_order(context, group.size()), group, CONTEXT).unbind(), 1)


def natural_order(parts: Tensor) -> Tensor:
    """Return ``(batch, heads, sequence, width)`` from what each rank has of it, ``(ranks, batch, heads, ...)``."""
    early, late = parts.chunk(2, 3)
    return torch.cat([early, late.flip(0)]).movedim(0, 2).flatten(2, 3)


def rank_order(whole: Tensor, ranks: int) -> Tensor:
    """Return what each rank has of ``(batch, heads, sequence, width)``: the inverse of `natural_order`."""
    early, late = torch.stack(whole.chunk(2 * ranks, 2)).chunk(2)
    return torch.cat([early, late.flip(0)], 3)
