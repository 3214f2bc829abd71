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
from meshwise.executor.parallel.exchange import exchange_parts, gather_parts, mark_collective
from meshwise.executor.recording.private_torch import attention_gradients, attention_with_logsumexp
from meshwise.executor.recording.trace import SHIFT
from meshwise.strategies.plan.mesh import CONTEXT
from meshwise.strategies.plan.parallelism import Attention


class Visibility(NamedTuple):
    """The part of the score matrix that causal attention needs: queries from ``query`` on, keys before ``end``."""

    query: int
    end: int
    causal: bool


def find_visibility(rank: int, source: int, sequence: int) -> Visibility:
    """Return which queries of ``rank`` see which keys of the rank ``source``.

    Each rank has ``sequence`` tokens: an early half, in the order of the ranks, and a late half, in the opposite order
    (`meshwise.executor.parallel.context_parallel.list_positions`). All queries see the early half of an earlier rank's
    keys; the late half of queries sees all keys of a later rank. Both are half of the square, as is the triangle of the
    rank's own keys.

    >>> find_visibility(1, 1, 8)
    Visibility(query=0, end=8, causal=True)
    >>> find_visibility(1, 0, 8), find_visibility(1, 2, 8)
    (Visibility(query=0, end=4, causal=False), Visibility(query=4, end=8, causal=False))
    """
    if source == rank:
        return Visibility(0, sequence, causal=True)
    query, end = (0, sequence // 2) if source < rank else (sequence // 2, sequence)
    return Visibility(query, end, causal=False)


class _Shift:
    """A tensor on its way to the next rank of a ring, and the one that comes from the rank before."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup, tag: int) -> None:
        rank, ranks = group.rank(), group.size()
        self.message, self.buffer = tensor, torch.empty_like(tensor)
        with mark_collective(CONTEXT, SHIFT):
            self.works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, self.message, group=group, tag=tag, group_peer=(rank + 1) % ranks),
                    dist.P2POp(dist.irecv, self.buffer, group=group, tag=tag, group_peer=(rank - 1) % ranks),
                ]
            )

    def wait(self) -> Tensor:
        """Return the tensor from the rank before, once it is here."""
        for work in self.works:
            work.wait()
        return self.buffer


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
        dtype = torch.promote_types(query.dtype, torch.float)  # parts are added in fp32 at least
        out = torch.zeros_like(query, dtype=dtype)
        logsumexp = query.new_full(query.shape[:3], float("-inf"), dtype=dtype)
        part = torch.stack([key, value])
        for turn in range(ranks):
            # sent before the attention to the same part: the message runs beneath it
            shift = _Shift(part, group, _KEYS) if turn < ranks - 1 else None
            start, end, causal = find_visibility(rank, (rank - turn) % ranks, sequence)
            keys, values = (heads[:, :, :end] for heads in _repeat_heads(part, query))
            merge_softmax(out[:, :, start:], logsumexp[:, :, start:], query[:, :, start:], keys, values, causal=causal)
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
        query_gradient, part = torch.zeros_like(query, dtype=logsumexp.dtype), torch.stack([key, value])
        gradient_shift: _Shift | None = None
        for turn in range(ranks):
            shift = _Shift(part, group, _KEYS) if turn < ranks - 1 else None
            start, end, causal = find_visibility(rank, (rank - turn) % ranks, sequence)
            keys, values = (heads[:, :, :end] for heads in _repeat_heads(part, query))
            output_gradient, queries, context, sums = (
                tensor[:, :, start:] for tensor in (gradient, query, out, logsumexp)
            )
            query_part, *key_value_parts = attention_gradients(
                output_gradient, queries, context, sums, keys, values, causal=causal
            )
            query_gradient[:, :, start:] += query_part
            part_gradient = gradient_shift.wait() if gradient_shift is not None else torch.zeros_like(part)
            part_gradient[:, :, :, :end] += torch.stack(
                [_sum_heads(head_gradient, key) for head_gradient in key_value_parts]
            )
            gradient_shift = _Shift(part_gradient, group, _GRADIENTS)
            part = shift.wait() if shift is not None else part
        key_value_gradient = gradient_shift.wait() if gradient_shift is not None else torch.zeros_like(part)
        return query_gradient.to(query.dtype), key_value_gradient[0], key_value_gradient[1], None


def ring_attention(query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the context of this rank's queries over the keys of all ranks of ``group``."""
    result: Tensor = RingAttention.apply(query, key, value, group)  # type: ignore[no-untyped-call]
    return result


def merge_softmax(out: Tensor, logsumexp: Tensor, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> None:
    """Add the keys of one part to a softmax, in place: to its context ``out`` and the ``logsumexp`` of its scores."""
    part_context, denominator = attention_with_logsumexp(query, key, value, causal=causal)
    total = torch.logaddexp(logsumexp, denominator)
    old_weight, new_weight = ((logarithm - total).exp().unsqueeze(-1) for logarithm in (logsumexp, denominator))
    out.mul_(old_weight).add_(new_weight * part_context)
    logsumexp.copy_(total)


def _repeat_heads(part: Tensor, query: Tensor) -> Tensor:
    """Return keys and values repeated to as many heads as the queries have."""
    return part.repeat_interleave(query.shape[1] // part.shape[2], dim=2)


def _sum_heads(gradient: Tensor, key: Tensor) -> Tensor:
    """Return the gradient of the heads of keys or values: the sum over the heads of queries that share each."""
    batch, _, tokens, width = gradient.shape
    return gradient.reshape(batch, key.shape[1], -1, tokens, width).sum(2)


def list_positions(rank: int, ranks: int, sequence: int) -> NDArray[np.int64]:
    """Return the positions in a sequence of the tokens that a rank of a context group has.

    >>> list_positions(1, 2, 8).tolist()
    [2, 3, 4, 5]
    >>> list_positions(0, 2, 8).tolist()
    [0, 1, 6, 7]
    """
    parts = np.arange(sequence).reshape(2 * ranks, -1)
    return np.concatenate([parts[rank], parts[-1 - rank]])


def apply(network: Network, group: dist.ProcessGroup, attention: Attention, sequence: int) -> None:
    """Make ``network``, in place, compute this rank's part of sequences of ``sequence`` tokens."""
    device = next(network.parameters()).device
    token_positions = torch.from_numpy(list_positions(group.rank(), group.size(), sequence)).to(device)
    if network.embedding is not None:
        network.embedding.token_positions = token_positions
    for layer in network.decoder_layers():
        layer.token_positions = token_positions
        if attention is Attention.RING:
            layer.core = partial(ring_attention, group=group)
        else:
            attention_core = gathered_attention if attention is Attention.ALL_GATHER else ulysses_attention
            layer.core = partial(attention_core, partial(layer.run_core, layer.core), group=group)
            layer.run_core = layer.call_core


def gathered_attention(core: Core, query: Tensor, key: Tensor, value: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Return the context of this rank's queries: ``core`` runs over keys and values gathered from all ranks.

    Each half of the queries reads the keys up to its own end, together half of the square of scores.
    """
    half = query.shape[2] // 2
    keys, values = (to_natural_order(gather_parts(part, group, CONTEXT)) for part in (key, value))
    ends = (group.rank() + 1) * half, (2 * group.size() - group.rank()) * half
    result = []
    # backward keeps the whole storage of a view, and this one has keys and values too
    contiguous_query = query.contiguous()
    for queries, end in zip(contiguous_query.chunk(2, 2), ends, strict=True):
        key_positions = torch.arange(end, device=query.device)
        mask = key_positions <= key_positions[end - half :, None]
        result.append(core(queries, keys[:, :, :end], values[:, :, :end], mask))
    return torch.cat(result, 2)


def ulysses_attention(core: Core, query: Tensor, key: Tensor, value: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Return the context of this rank's queries: ``core`` computes whole sequences of some heads of all ranks.

    All-to-alls exchange heads for tokens before it, and tokens for heads after it.
    """

    def gather_sequence(heads: Tensor) -> Tensor:
        return to_natural_order(exchange_parts(torch.stack(heads.chunk(group.size(), 1)), group, CONTEXT))

    context = core(gather_sequence(query), gather_sequence(key), gather_sequence(value))
    return torch.cat(exchange_parts(to_rank_order(context, group.size()), group, CONTEXT).unbind(), 1)


def to_natural_order(parts: Tensor) -> Tensor:
    """Return the sequence in order, ``(batch, heads, sequence, width)``, from the parts of all ranks.

    The parts are ``(ranks, batch, heads, tokens of a rank, width)``.
    """
    early_parts, late_parts = parts.chunk(2, 3)
    return torch.cat([early_parts, late_parts.flip(0)]).movedim(0, 2).flatten(2, 3)


def to_rank_order(sequence: Tensor, ranks: int) -> Tensor:
    """Return the parts of all ranks of ``(batch, heads, sequence, width)``: the inverse of `to_natural_order`."""
    early_parts, late_parts = torch.stack(sequence.chunk(2 * ranks, 2)).chunk(2)
    return torch.cat([early_parts, late_parts.flip(0)], 3)
