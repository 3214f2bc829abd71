"""Context parallelism: every rank of a group has a part of each sequence, and attention spans the whole sequence.

A sequence is cut into two parts for each rank: rank ``i`` of ``n`` has part ``i`` and part ``2n - 1 - i``, so that
causal attention is equal work for all ranks [1]_. Attention sends keys and values round a ring, gathers them [1]_, or
exchanges heads for tokens (Ulysses [2]_).

In ring attention each rank computes attention to the keys and values of one rank at a time. Each part has a softmax
over its own keys; two parts are merged by the logarithms of their denominators [3]_. Backward of a part reads the
logarithm of the whole softmax [4]_, so nothing of the size of the scores is kept.

References
----------
.. [1] Grattafiori et al. 2024, "The Llama 3 herd of models", section 3.3.2 (context parallelism).
.. [2] Jacobs et al. 2023, "DeepSpeed Ulysses", section 3.1.
.. [3] Liu, Zaharia and Abbeel 2023, "Ring attention with blockwise transformers for near-infinite context",
   section 3.
.. [4] Dao 2023, "FlashAttention-2", algorithm 2 (backward from the output and the logsumexp).
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from meshwise.executor.model.network import Core, Network
from meshwise.executor.parallel.exchange import exchange_parts, gather_parts, moving
from meshwise.executor.recording.private_torch import attention_gradients, attention_with_logsumexp
from meshwise.executor.recording.trace import SHIFT
from meshwise.strategies.plan.mesh import CONTEXT
from meshwise.strategies.plan.parallelism import Attention


class Seen(NamedTuple):
    """The part of the score matrix that causal attention needs: queries from ``query`` on, keys before ``end``."""

    query: int
    end: int
    causal: bool


def seen(rank: int, source: int, sequence: int) -> Seen:
    """Return which queries of ``rank`` see which keys of the rank ``source``.

    Each rank has ``sequence`` tokens: an early half, in the order of the ranks, and a late half, in the opposite order
    (`meshwise.executor.parallel.context_parallel.list_positions`). All queries see the early half of an earlier rank's
    keys; the late half of queries sees all keys of a later rank. Both are half of the square, as is the triangle of the
    rank's own keys.

    >>> seen(1, 1, 8), seen(1, 0, 8), seen(1, 2, 8)
    (Seen(query=0, end=8, causal=True), Seen(query=0, end=4, causal=False), Seen(query=4, end=8, causal=False))
    """
    if source == rank:
        return Seen(0, sequence, causal=True)
    return Seen(0, sequence // 2, causal=False) if source < rank else Seen(sequence // 2, sequence, causal=False)


class _Shift:
    """A tensor on its way to the next rank of a ring, and the one that comes from the rank before."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup, tag: int) -> None:
        rank, ranks = group.rank(), group.size()
        self.sent, self.received = tensor, torch.empty_like(tensor)
        with moving(CONTEXT, SHIFT):
            self.works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, self.sent, group=group, tag=tag, group_peer=(rank + 1) % ranks),
                    dist.P2POp(dist.irecv, self.received, group=group, tag=tag, group_peer=(rank - 1) % ranks),
                ]
            )

    def wait(self) -> Tensor:
        """Return the tensor from the rank before, once it is here."""
        for work in self.works:
            work.wait()
        return self.received


_KEYS, _GRADIENTS = 0, 1
"""Message tags: keys and values, and their gradients, go round the ring at the same time."""


class RingAttention(torch.autograd.Function):
    """Causal attention of one rank's queries to the keys of all ranks of a group."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the context of the rank's queries; shapes ``(batch, heads, tokens of the rank, head_dim)``.

        Several heads of queries may share one of keys and values.
        """
        rank, ranks, sequence = group.rank(), group.size(), query.shape[2]
        wide = torch.promote_types(query.dtype, torch.float)  # parts are added in fp32 at least
        out = torch.zeros_like(query, dtype=wide)
        logsumexp = query.new_full(query.shape[:3], float("-inf"), dtype=wide)
        part = torch.stack([key, value])
        for turn in range(ranks):
            # sent before the attention to the same part: the message runs beneath it
            shift = _Shift(part, group, _KEYS) if turn < ranks - 1 else None
            first, end, causal = seen(rank, (rank - turn) % ranks, sequence)
            keys, values = (heads[:, :, :end] for heads in _grouped(part, query))
            merge(out[:, :, first:], logsumexp[:, :, first:], query[:, :, first:], keys, values, causal=causal)
            part = shift.wait() if shift is not None else part
        context = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, context, logsumexp)
        ctx.group = group
        return context

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Return the gradients of queries, keys and values.

        The gradient of a part of keys and values follows it round the ring, one turn behind, and each rank adds its
        share. After the last turn it is back at the rank that has the part.
        """
        query, key, value, out, logsumexp = ctx.saved_tensors
        group, gradient = ctx.group, gradients[0].contiguous()
        rank, ranks, sequence = group.rank(), group.size(), query.shape[2]
        of_query, part = torch.zeros_like(query, dtype=logsumexp.dtype), torch.stack([key, value])
        behind: _Shift | None = None
        for turn in range(ranks):
            shift = _Shift(part, group, _KEYS) if turn < ranks - 1 else None
            first, end, causal = seen(rank, (rank - turn) % ranks, sequence)
            keys, values = (heads[:, :, :end] for heads in _grouped(part, query))
            late, queries, context, sums = (tensor[:, :, first:] for tensor in (gradient, query, out, logsumexp))
            mine, *others = attention_gradients(late, queries, context, sums, keys, values, causal=causal)
            of_query[:, :, first:] += mine
            of_part = behind.wait() if behind is not None else torch.zeros_like(part)
            of_part[:, :, :, :end] += torch.stack([_ungrouped(other, key) for other in others])
            behind = _Shift(of_part, group, _GRADIENTS)
            part = shift.wait() if shift is not None else part
        home = behind.wait() if behind is not None else torch.zeros_like(part)
        return of_query.to(query.dtype), home[0], home[1], None


def ring_attention(query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the context of this rank's queries over the keys of all ranks of ``group``."""
    result: Tensor = RingAttention.apply(query, key, value, group)  # type: ignore[no-untyped-call]
    return result


def merge(out: Tensor, logsumexp: Tensor, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> None:
    """Add the keys of one part to a softmax, in place: to its context ``out`` and the ``logsumexp`` of its scores."""
    more, denominator = attention_with_logsumexp(query, key, value, causal=causal)
    together = torch.logaddexp(logsumexp, denominator)
    before, after = ((each - together).exp().unsqueeze(-1) for each in (logsumexp, denominator))
    out.mul_(before).add_(after * more)
    logsumexp.copy_(together)


def _grouped(part: Tensor, query: Tensor) -> Tensor:
    """Return keys and values repeated to as many heads as the queries have."""
    return part.repeat_interleave(query.shape[1] // part.shape[2], dim=2)


def _ungrouped(gradient: Tensor, key: Tensor) -> Tensor:
    """Return the gradient of the heads of keys or values: the sum over the heads of queries that share each."""
    batch, _, tokens, width = gradient.shape
    return gradient.reshape(batch, key.shape[1], -1, tokens, width).sum(2)


def positions(rank: int, ranks: int, sequence: int) -> NDArray[np.int64]:
    """Return the positions in a sequence of the tokens that a rank of a context group has.

    >>> positions(1, 2, 8).tolist()
    [2, 3, 4, 5]
    >>> positions(0, 2, 8).tolist()
    [0, 1, 6, 7]
    """
    parts = np.arange(sequence).reshape(2 * ranks, -1)
    return np.concatenate([parts[rank], parts[-1 - rank]])


def apply(network: Network, group: dist.ProcessGroup, attention: Attention, sequence: int) -> None:
    """Make ``network``, in place, compute this rank's part of sequences of ``sequence`` tokens."""
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
    """Return the context of this rank's queries: ``core`` runs over keys and values gathered from all ranks.

    Each half of the queries reads the keys up to its own end, together half of the square of scores.
    """
    half = query.shape[2] // 2
    keys, values = (natural_order(gather_parts(part, group, CONTEXT)) for part in (key, value))
    ends = (group.rank() + 1) * half, (2 * group.size() - group.rank()) * half
    result = []
    own = query.contiguous()  # backward keeps the whole storage of a view, and this one has keys and values too
    for queries, end in zip(own.chunk(2, 2), ends, strict=True):
        places = torch.arange(end, device=query.device)
        result.append(core(queries, keys[:, :, :end], values[:, :, :end], places <= places[end - half :, None]))
    return torch.cat(result, 2)


def ulysses_attention(core: Core, query: Tensor, key: Tensor, value: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Return the context of this rank's queries: ``core`` computes whole sequences of some heads of all ranks.

    All-to-alls exchange heads for tokens before it, and tokens for heads after it.
    """

    def whole(heads: Tensor) -> Tensor:
        return natural_order(exchange_parts(torch.stack(heads.chunk(group.size(), 1)), group, CONTEXT))

    context = core(whole(query), whole(key), whole(value))
    return torch.cat(exchange_parts(rank_order(context, group.size()), group, CONTEXT).unbind(), 1)


def natural_order(parts: Tensor) -> Tensor:
    """Return the sequence in order, ``(batch, heads, sequence, width)``, from the parts of all ranks.

    The parts are ``(ranks, batch, heads, tokens of a rank, width)``.
    """
    early, late = parts.chunk(2, 3)
    return torch.cat([early, late.flip(0)]).movedim(0, 2).flatten(2, 3)


def rank_order(whole: Tensor, ranks: int) -> Tensor:
    """Return the parts of all ranks of ``(batch, heads, sequence, width)``: the inverse of `to_natural_order`."""
    early, late = torch.stack(whole.chunk(2 * ranks, 2)).chunk(2)
    return torch.cat([early, late.flip(0)], 3)
