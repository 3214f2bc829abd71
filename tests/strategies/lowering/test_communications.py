"""The collectives of one rank and one step against the formulas of the papers, plan by plan, in one table.

What a program issues is read off its clock: on the machine here every byte of a collective takes one
nanosecond, and each kind of collective its own number of tens of picoseconds besides. So the duration of a
task says kind and bytes, and its streams say which ranks meet. Nothing that the lowering computes with is
asked, and no name of a task is read but to check that it tells the same kind.

References
----------
.. [1] Li et al., "PyTorch distributed: experiences on accelerating data parallel training", VLDB 2020.
.. [2] Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020.
.. [3] Zhao et al., "PyTorch FSDP: experiences on scaling fully sharded data parallel", VLDB 2023.
.. [4] Zhang et al., "MiCS: near-linear scaling for training gigantic model on public cloud", VLDB 2022.
.. [5] Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014.
.. [6] Shoeybi et al., "Megatron-LM: training multi-billion parameter language models using model parallelism", 2019.
.. [7] Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", SC 2021.
.. [8] Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022.
.. [9] Liu, Zaharia and Abbeel, "Ring attention with blockwise transformers for near-infinite context", 2023.
.. [10] Grattafiori et al., "The Llama 3 herd of models", 2024.
.. [11] Jacobs et al., "DeepSpeed Ulysses", 2023.
.. [12] Lepikhin et al., "GShard", 2020.
.. [13] NVIDIA/Megatron-LM, ``megatron/core``: ``distributed/finalize_model_grads.py``, ``optimizer/clip_grads.py``,
   ``models/common/embeddings/language_model_embedding.py`` and ``transformer/moe/token_dispatcher.py``.
.. [14] Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, section 1 (the two parts of a backward).
"""

from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from meshwise.simulator.collective import Collective, CollectiveCurve
from meshwise.simulator.models.experts import Experts
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.lowering.cuts import Granularity
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.plan.recomputation import FirstLayers, Recompute

from ..problems import problem

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER
ALL_TO_ALL, SEND, SHIFT, PUSH_PULL = Collective.ALL_TO_ALL, Collective.SEND, Collective.SHIFT, Collective.PUSH_PULL

L, H, S, V, F = 6, 64, 32, 128, 256  # layers, hidden, tokens of a sequence, vocabulary, feed-forward width
K = 32  # width of all keys of a token where 8 heads share 4 of them
E, TOP_K, W = 8, 2, 32  # experts, how many of them a token goes to, and their width
M = 4  # microbatches a step; of one sequence where nothing else is said
A, P, G, FP32 = 2, 2, 4, 4  # bytes of bf16 activations and parameters, of fp32 gradients and of losses

GPT = Transformer(L, H, 8, 8, F, V, tied_embeddings=False)
TIED = replace(GPT, tied_embeddings=True)
WIDE = replace(GPT, layers=3, hidden=1024, ffn=4096)
LLAMA = Transformer(L, H, 8, 4, F, V, ffn_kind="swiglu", positions="rotary", tied_embeddings=False)
MIXTURE = replace(LLAMA, kv_heads=8, experts=Experts(E, TOP_K, W))

Group = tuple[int, ...]
Issued = Counter[tuple[Collective, Group, int]]
"""How often a rank issues a collective of so many bytes on a group; the size of an all-gather or reduce-scatter is
that of all shards together, of a send or shift what one rank gives away, of any other the buffer of one rank."""


class Row(NamedTuple):
    """A plan of the table, and what one of its ranks issues in a step."""

    name: str
    spec: Transformer
    layout: Layout
    expected: Issued
    rank: int = 0
    training: tuple[tuple[str, Any], ...] = ()


def issue(count: int, kind: Collective, group: Group, size: float) -> Issued:
    assert size == int(size)
    return Counter({(kind, group, int(size)): count})


# elements of parameters on a rank of a tensor group of t ranks


def gpt_layer(t: int = 1, h: int = H, f: int = F) -> int:
    # four matrices h x h and two h x f; biases of 3 h and f are cut with theirs, those of 2 h and two norms are not
    return (4 * h * h + 2 * h * f + 3 * h + f) // t + 2 * h + 4 * h


def gpt_embedding(t: int = 1, h: int = H) -> int:
    return V * h // t + S * h  # tokens and learned positions


def gpt_head(t: int = 1, h: int = H) -> int:
    return V * h // t + 2 * h


def gpt(t: int = 1) -> int:
    return gpt_embedding(t) + L * gpt_layer(t) + gpt_head(t)


def llama_layer(t: int = 1) -> int:
    return (2 * H * H + 2 * H * K + 3 * H * F) // t + 2 * H


def llama(t: int = 1) -> int:
    return 2 * V * H // t + L * llama_layer(t) + H


def mixture_layer(t: int = 1) -> int:
    return 4 * H * H // t + 2 * H + H * E  # without the experts, but with their router


def mixture(t: int = 1) -> int:
    return 2 * V * H // t + L * mixture_layer(t) + H


def experts(e: int, t: int = 1) -> int:
    return E // e * 3 * H * W // t  # of one layer


# data parallel


def summed(group: Group, elements: int, times: int = 1) -> Issued:
    # [1] section 3.2, [7] section 3.3: gradients are summed once a step
    return issue(times, ALL_REDUCE, group, elements * G)


def zero_1(group: Group, elements: int) -> Issued:
    # [2] section 7: a reduce-scatter of gradients and an all-gather of parameters, 2 psi in all
    return issue(1, REDUCE_SCATTER, group, elements * G) + issue(1, ALL_GATHER, group, elements * P)


def zero_2(group: Group, elements: int) -> Issued:
    # the same, but only shards of gradients are kept, so every microbatch reduces its own
    return issue(M, REDUCE_SCATTER, group, elements * G) + issue(1, ALL_GATHER, group, elements * P)


def zero_3(group: Group, *units: int) -> Issued:
    # [2] section 7: gathered for forward, gathered for backward, reduce-scattered: 3 psi a microbatch
    return sum((_unit(group, unit, 2 * M) for unit in units), Issued())


def zero_3_kept(group: Group, *units: int, gathers: int = M) -> Issued:
    # [3] section 3.2, torch's fully_shard: what is used again at once, or by all later passes, is not given up
    return sum((_unit(group, unit, gathers) for unit in units), Issued())


def _unit(group: Group, elements: int, gathers: int) -> Issued:
    return issue(gathers, ALL_GATHER, group, elements * P) + issue(M, REDUCE_SCATTER, group, elements * G)


def replicas(group: Group, shards: int, *parts: int) -> Issued:
    # [3] section 3.2.2; [4], 2-hop gradient synchronization: a rank's shard is summed over replicas once a step
    return sum((issue(1, ALL_REDUCE, group, part // shards * G) for part in parts), Issued())


# tensor parallel, of so many tokens a microbatch


def tensor_layers(group: Group, layers: int, tokens: int, again: int = 0) -> Issued:
    # [6] section 3, [7] section 3.2: two all-reduces of b s h forward and two backward a layer and microbatch; of the
    # layers that are computed again the two of forward once more
    return issue((4 * layers + 2 * again) * M, ALL_REDUCE, group, tokens * H * A)


def tensor_embedding(group: Group, tokens: int) -> Issued:
    return issue(M, ALL_REDUCE, group, tokens * H * A)  # [6] section 3: the table's rows are cut


def tensor_loss(group: Group, tokens: int) -> Issued:
    # [6] section 3: backward of the cut logits, and of each token the largest logit, the sum and the target's
    return issue(M, ALL_REDUCE, group, tokens * H * A) + losses(group, tokens)


def losses(group: Group, tokens: int) -> Issued:
    return issue(3 * M, ALL_REDUCE, group, tokens * FP32)


def tensor(group: Group, tokens: int = S, again: int = 0) -> Issued:
    return tensor_layers(group, L, tokens, again) + tensor_embedding(group, tokens) + tensor_loss(group, tokens)


def pairs(count: int, group: Group, size: float) -> Issued:
    return issue(count, ALL_GATHER, group, size) + issue(count, REDUCE_SCATTER, group, size)


def sequence_layers(group: Group, layers: int, tokens: int, again: int = 0, unread: bool = True) -> Issued:
    # [8] section 4.2.2: each all-reduce becomes a reduce-scatter and, on the other side of norm and dropout, an
    # all-gather: four pairs a layer and microbatch. Of what is computed again torch leaves out the last scatter, whose
    # result backward does not read (torch/utils/checkpoint.py, _StopRecomputationError)
    scattered_again = issue((1 + unread) * again * M, REDUCE_SCATTER, group, tokens * H * A)
    gathered = issue(2 * again * M, ALL_GATHER, group, tokens * H * A)
    return pairs(4 * layers * M, group, tokens * H * A) + gathered + scattered_again


def sequence_parallel(group: Group, tokens: int = S, again: int = 0, unread: bool = True) -> Issued:
    # of the embedding a reduce-scatter forward and an all-gather backward, of the logits the other way round; two norms
    # a layer and the last one
    return (
        sequence_layers(group, L, tokens, again, unread)
        + pairs(2 * M, group, tokens * H * A)
        + losses(group, tokens)
        + in_parts(group, (2 * L + 1) * H)
    )


def in_parts(group: Group, elements: int) -> Issued:
    # [13], finalize_model_grads.py: gradients of what every tensor rank has, of its own tokens alone, in one piece
    return issue(1, ALL_REDUCE, group, elements * G)


def gathered_again(group: Group, products: int, tokens: int = S) -> Issued:
    # [8] section 4.2.2: of the input of a product only the shard is kept, and gathered again for the weight's gradient
    return issue(products * M, ALL_GATHER, group, tokens * H * A)


# context parallel


def ring(group: Group, layers: int, width: int, again: int = 0) -> Issued:
    # [9] section 3: keys and values go on c - 1 times; in backward they do so again, and their gradients, which begin
    # one turn later, c times: c - 2 shifts take both, the first one of keys and two more of gradients half of it.
    # ``width`` is that of a token's keys
    c, passed = len(group), 2 * S // len(group) * width * A
    single, both = (c - 1 + 3 + again * (c - 1)) * layers * M, (c - 2) * layers * M
    return issue(single, SHIFT, group, passed) + (issue(both, SHIFT, group, 2 * passed) if both else Issued())


def gathered_keys(group: Group, layers: int) -> Issued:
    # [10] section 3.3.2: keys and values are gathered before attention, and their gradients scattered after it
    return pairs(2 * layers * M, group, S * K * A)


def ulysses(group: Group, kv_width: int) -> Issued:
    # [11] section 3.2: four all-to-alls forward, of q, k, v and the output, of s h / c a rank; and four backward
    share = S // len(group) * A
    return issue(4 * L * M, ALL_TO_ALL, group, share * H) + issue(4 * L * M, ALL_TO_ALL, group, share * kv_width)


# experts


def exchanged(group: Group, layers: int = L, tokens: int = S, times: int = 4) -> Issued:
    # [12] section 3: every token top_k times to its experts and back, forward and backward
    return issue(times * layers * M, ALL_TO_ALL, group, tokens * TOP_K * H * A)


def expert_tensor(group: Group, layers: int = L, tokens: int = S) -> Issued:
    # [13], token_dispatcher.py: each tensor rank sends its part of the tokens; they are gathered where the expert is,
    # and its partial sums scattered again; the other way round in backward
    return pairs(2 * layers * M, group, tokens * TOP_K * H * A)


# pipeline


def boundary(first: int, second: int, size: int, times: int = M) -> Issued:
    # [7] sections 3.2 and 2.2.2: b s h forward and as much backward, at every boundary of every chunk
    return issue(times, SEND, (first, second), size) + issue(times, SEND, (second, first), size)


def tied(first: int, second: int, t: int = 1) -> Issued:
    # [6]: word embedding and output layer are one parameter, on the first and the last stage
    return issue(1, ALL_REDUCE, (first, second), V * H // t * G)


def norm(group: Group) -> Issued:
    return issue(1, ALL_REDUCE, group, 4)  # [13], clip_grads.py: one fp32 sum of squares


CLIPPED, TORCH = (("gradient_clipping", True),), (("framework", "torch"),)
ALL_4, FULL, SELECTIVE = (0, 1, 2, 3), Recompute.FULL, Recompute.SELECTIVE
TOKENS = S * H * A  # bytes of the activations of one microbatch

TABLE = (
    # data parallel and ZeRO
    Row("data", GPT, Layout(data=4), summed(ALL_4, gpt())),
    Row("data, summed after the last backward", GPT, Layout(data=4, overlap_gradients=False), summed(ALL_4, gpt())),
    Row(
        "data, in buckets of 25 MiB",  # a layer alone fills one: the head joins the last layer, the embedding is left
        WIDE,
        Layout(data=4),
        summed(ALL_4, gpt_head(h=1024) + gpt_layer(h=1024, f=4096))
        + summed(ALL_4, gpt_layer(h=1024, f=4096), times=2)
        + summed(ALL_4, gpt_embedding(h=1024)),
    ),
    Row(
        "data, tied embeddings summed once",
        TIED,
        Layout(data=4),
        summed(ALL_4, gpt() - V * H),
    ),
    Row(
        "data, tied embeddings summed once after the last backward",
        TIED,
        Layout(data=4, overlap_gradients=False),
        summed(ALL_4, gpt() - V * H),
    ),
    Row(
        "parameter server",
        GPT,
        Layout(data=4, gradient_reduction="parameter_server"),
        issue(1, PUSH_PULL, ALL_4, gpt() * (G + P) // 2),  # [5]: gradients there and parameters back, their mean
    ),
    Row("zero 1", GPT, Layout(data=4, zero=1), zero_1(ALL_4, gpt())),
    Row(
        "zero 1, tied embeddings",
        TIED,
        Layout(data=4, zero=1),
        zero_1(ALL_4, gpt() - V * H),
    ),
    Row("zero 2", GPT, Layout(data=4, zero=2), zero_2(ALL_4, gpt())),
    Row(
        "zero 3",
        GPT,
        Layout(data=4, zero=3),
        zero_3(ALL_4, gpt_embedding(), *[gpt_layer()] * L) + zero_3_kept(ALL_4, gpt_head()),
    ),
    Row(
        "zero 3, parameters kept after forward",
        GPT,
        Layout(data=4, zero=3, reshard_after_forward=False),
        zero_3_kept(ALL_4, gpt_embedding(), *[gpt_layer()] * L, gpt_head(), gathers=1),
    ),
    Row(
        "hybrid zero 1", GPT, Layout(data=4, zero=1, zero_shards=2), zero_1((0, 1), gpt()) + replicas((0, 2), 2, gpt())
    ),
    Row(
        "hybrid zero 2", GPT, Layout(data=4, zero=2, zero_shards=2), zero_2((0, 1), gpt()) + replicas((0, 2), 2, gpt())
    ),
    Row(
        "hybrid zero 3",
        GPT,
        Layout(data=4, zero=3, zero_shards=2),
        zero_3((0, 1), gpt_embedding(), *[gpt_layer()] * L)
        + zero_3_kept((0, 1), gpt_head())
        + replicas((0, 2), 2, gpt_embedding(), *[gpt_layer()] * L, gpt_head()),
    ),
    Row("data, clipped", GPT, Layout(data=4), summed(ALL_4, gpt()), training=CLIPPED),  # each has all gradients
    Row("zero 1, clipped", GPT, Layout(data=4, zero=1), zero_1(ALL_4, gpt()) + norm(ALL_4), training=CLIPPED),
    # tensor and sequence parallel
    Row("tensor", GPT, Layout(tensor=2), tensor((0, 1))),
    Row("tensor of 4, microbatches of 2", GPT, Layout(tensor=4, microbatch=2), tensor(ALL_4, 2 * S)),
    Row("tensor, full recompute", GPT, Layout(tensor=2, recompute=FULL), tensor((0, 1), again=L)),
    Row(
        "tensor, full recompute of 2 layers",
        GPT,
        Layout(tensor=2, recompute=FirstLayers(FULL, 2)),
        tensor((0, 1), again=2),
    ),
    Row("tensor, selective recompute", GPT, Layout(tensor=2, recompute=SELECTIVE), tensor((0, 1))),
    Row("tensor, clipped", GPT, Layout(tensor=2), tensor((0, 1)) + norm((0, 1)), training=CLIPPED),
    Row(
        "sequence parallel",
        LLAMA,
        Layout(tensor=2, sequence_parallel=True),
        sequence_parallel((0, 1)),
        training=TORCH,
    ),
    Row(
        "sequence parallel, selective recompute",
        LLAMA,
        Layout(tensor=2, sequence_parallel=True, recompute=SELECTIVE),
        sequence_parallel((0, 1)),
        training=TORCH,
    ),
    Row(
        "sequence parallel, full recompute",
        LLAMA,
        Layout(tensor=2, sequence_parallel=True, recompute=FULL),
        sequence_parallel((0, 1), again=L, unread=False),
        training=TORCH,
    ),
    Row(
        "sequence parallel, shards kept",  # of qkv and up of every layer, and of the logits
        LLAMA,
        Layout(tensor=2, sequence_parallel=True),
        sequence_parallel((0, 1)) + gathered_again((0, 1), 2 * L + 1),
    ),
    Row(
        "sequence parallel, shards kept, full recompute",
        LLAMA,
        Layout(tensor=2, sequence_parallel=True, recompute=FULL),
        sequence_parallel((0, 1), again=L) + gathered_again((0, 1), 2 * L + 1),
    ),
    Row(
        "sequence parallel, beside products",  # as without: only when is another question
        LLAMA,
        Layout(tensor=2, sequence_parallel=True, overlap_tensor=True),
        sequence_parallel((0, 1)) + gathered_again((0, 1), 2 * L + 1),
    ),
    Row(
        "sequence parallel, beside products, inputs kept whole, full recompute",
        LLAMA,
        Layout(tensor=2, sequence_parallel=True, overlap_tensor=True, recompute=FULL),
        sequence_parallel((0, 1), again=L, unread=False),
        training=TORCH,
    ),
    Row(
        "sequence parallel, learned positions",  # [13]: all-reduced, positions added, and only then scattered
        GPT,
        Layout(tensor=2, sequence_parallel=True),
        sequence_layers((0, 1), L, S)
        + tensor_embedding((0, 1), S)
        + issue(M, ALL_GATHER, (0, 1), TOKENS)
        + pairs(M, (0, 1), TOKENS)
        + losses((0, 1), S)
        + gathered_again((0, 1), 2 * L + 1)
        + in_parts((0, 1), 6 * H * L + 2 * H),  # norms, and biases of the two products that are scattered
    ),
    Row(
        "sequence parallel, learned positions, biases added before the scatter",  # whole on each rank
        GPT,
        Layout(tensor=2, sequence_parallel=True),
        sequence_layers((0, 1), L, S)
        + tensor_embedding((0, 1), S)
        + issue(M, ALL_GATHER, (0, 1), TOKENS)
        + pairs(M, (0, 1), TOKENS)
        + losses((0, 1), S)
        + in_parts((0, 1), 4 * H * L + 2 * H),
        training=TORCH,
    ),
    Row(
        "tensor, norms of queries and keys",  # [13]: of a rank's heads, without sequence parallelism too
        replace(LLAMA, qk_norm=True),
        Layout(tensor=2),
        tensor((0, 1)) + in_parts((0, 1), 2 * L * H // 8),
    ),
    Row(
        "data x sequence parallel, zero 1",
        LLAMA,
        Layout(data=2, tensor=2, sequence_parallel=True, zero=1),
        zero_1((0, 2), llama(2)) + sequence_parallel((0, 1)),
        training=TORCH,
    ),
    Row(
        "data x sequence parallel, zero 2",  # of the norms' gradients a rank has its share
        LLAMA,
        Layout(data=2, tensor=2, sequence_parallel=True, zero=2),
        zero_2((0, 2), llama(2))
        + sequence_layers((0, 1), L, S)
        + pairs(2 * M, (0, 1), TOKENS)
        + losses((0, 1), S)
        + in_parts((0, 1), (2 * L + 1) * H // 2),
        training=TORCH,
    ),
    # context parallel
    Row("ring", LLAMA, Layout(context=4), ring(ALL_4, L, K) + summed(ALL_4, llama())),
    Row("ring of 2", LLAMA, Layout(context=2), ring((0, 1), L, K) + summed((0, 1), llama())),
    Row(
        "ring, selective recompute",
        LLAMA,
        Layout(context=4, recompute=SELECTIVE),
        ring(ALL_4, L, K, again=1) + summed(ALL_4, llama()),
    ),
    Row(
        "gathered keys",
        LLAMA,
        Layout(context=4, attention=Attention.ALL_GATHER),
        gathered_keys(ALL_4, L) + summed(ALL_4, llama()),
    ),
    Row(
        "ulysses",
        GPT,
        Layout(context=4, attention=Attention.ULYSSES),
        ulysses(ALL_4, H) + summed(ALL_4, gpt()),
    ),
    Row(
        "ulysses, grouped queries",
        LLAMA,
        Layout(context=4, attention=Attention.ULYSSES),
        ulysses(ALL_4, K) + summed(ALL_4, llama()),
    ),
    Row(
        "ring and tensor",
        LLAMA,
        Layout(context=2, tensor=2),
        ring((0, 2), L, K // 2) + tensor((0, 1), S // 2) + summed((0, 2), llama(2)),
    ),
    # experts
    Row("experts", MIXTURE, Layout(data=4, expert=4), exchanged(ALL_4) + summed(ALL_4, mixture())),
    Row(
        "experts on 2 of 4 ranks",
        MIXTURE,
        Layout(data=4, expert=2),
        exchanged((0, 1)) + summed(ALL_4, mixture()) + summed((0, 2), L * experts(2)),
    ),
    Row(
        "experts, full recompute",
        MIXTURE,
        Layout(data=4, expert=4, recompute=FULL),
        exchanged(ALL_4, times=6) + summed(ALL_4, mixture()),
    ),
    Row(
        "experts, zero 1",
        MIXTURE,
        Layout(data=4, expert=2, zero=1),
        exchanged((0, 1)) + zero_1(ALL_4, mixture()) + zero_1((0, 2), L * experts(2)),
    ),
    Row(
        "experts, zero 3",
        MIXTURE,
        Layout(data=4, expert=2, zero=3),
        exchanged((0, 1))
        + zero_3(ALL_4, V * H, *[mixture_layer()] * L)
        + zero_3_kept(ALL_4, V * H + H)
        + zero_3((0, 2), *[experts(2)] * L),
    ),
    Row(
        "experts, hybrid zero 1",
        MIXTURE,
        Layout(data=8, expert=2, zero=1, zero_shards=4),
        exchanged((0, 1))
        + zero_1(ALL_4, mixture())
        + zero_1((0, 2), L * experts(2))
        + replicas((0, 4), 4, mixture())
        + replicas((0, 4), 2, L * experts(2)),
    ),
    Row(
        "experts and tensor",
        MIXTURE,
        Layout(data=4, expert=2, tensor=2, sequence_parallel=True),
        exchanged((0, 2), tokens=S // 2)
        + expert_tensor((0, 1))
        + pairs((2 * L + 2) * M, (0, 1), TOKENS)  # of attention alone, the embedding and the logits
        + losses((0, 1), S)
        + summed((0, 2, 4, 6), mixture(2))
        + summed((0, 4), L * experts(2, 2))
        + gathered_again((0, 1), L + 1)  # of qkv and the logits; the dispatcher's gather is kept
        + in_parts((0, 1), L * (2 * H + H * E) + H),  # norms and routers
    ),
    # pipeline parallel
    Row("pipeline, first stage", GPT, Layout(pipeline=3), boundary(0, 1, TOKENS)),
    Row("pipeline, middle stage", GPT, Layout(pipeline=3), boundary(0, 1, TOKENS) + boundary(1, 2, TOKENS), rank=1),
    Row("pipeline, last stage", GPT, Layout(pipeline=3), boundary(1, 2, TOKENS), rank=2),
    Row("gpipe", GPT, Layout(pipeline=3, schedule="gpipe"), boundary(0, 1, TOKENS)),
    Row("zero bubble", GPT, Layout(pipeline=3, schedule="zb1p"), boundary(0, 1, TOKENS)),
    Row("pipeline, tied embeddings, first stage", TIED, Layout(pipeline=3), boundary(0, 1, TOKENS) + tied(0, 2)),
    Row("pipeline, tied embeddings, middle stage", TIED, Layout(pipeline=2), boundary(0, 1, TOKENS) + tied(0, 1), 1),
    Row(
        "interleaved",  # two ranks with three chunks each: six stages, five boundaries, all between these ranks
        GPT,
        Layout(pipeline=2, schedule="interleaved", chunks=3),
        Counter({(SEND, (0, 1), TOKENS): 5 * M, (SEND, (1, 0), TOKENS): 5 * M}),
    ),
    Row(
        "interleaved on 4 ranks",  # rank 1 has stages 1 and 5: four boundaries, each crossed both ways
        replace(GPT, layers=8),
        Layout(pipeline=4, schedule="interleaved", chunks=2),
        boundary(0, 1, TOKENS, 2 * M) + boundary(1, 2, TOKENS, 2 * M),
        rank=1,
    ),
    Row(
        "v of 2 ranks, tied embeddings",  # stages 0 and 3 on rank 0: both ends of the table, and no send at the turn
        replace(TIED, layers=8),
        Layout(pipeline=2, schedule="dualpipev", chunks=2),
        boundary(0, 1, TOKENS, 2 * M),
    ),
    Row(
        "data x v of 2 ranks, tied embeddings",  # stages 0 and 3: what rank 0 has of the table is summed once
        replace(TIED, layers=8),
        Layout(data=2, pipeline=2, schedule="dualpipev", chunks=2),
        boundary(0, 2, TOKENS, 2 * M)
        + summed((0, 1), gpt_embedding() + 2 * gpt_layer())
        + summed((0, 1), gpt_head() - V * H + 2 * gpt_layer()),
    ),
    Row(
        "pipeline and tensor, slices scattered and gathered",  # [7] section 4.1
        GPT,
        Layout(pipeline=2, tensor=2, scatter_gather=True),
        boundary(0, 2, TOKENS // 2)
        + issue(M, ALL_GATHER, (0, 1), TOKENS)
        + tensor_layers((0, 1), L // 2, S)
        + tensor_embedding((0, 1), S),
    ),
    Row(
        "pipeline and sequence parallel",
        LLAMA,
        Layout(pipeline=2, tensor=2, sequence_parallel=True),
        boundary(0, 2, TOKENS // 2)
        + sequence_layers((0, 1), L // 2, S)
        + pairs(M, (0, 1), TOKENS)
        + in_parts((0, 1), L // 2 * 2 * H),
        training=TORCH,
    ),
    # together
    Row(
        "data x tensor x pipeline, first stage",
        TIED,
        Layout(data=2, tensor=2, pipeline=2),
        summed((0, 2), gpt_embedding(2) + L // 2 * gpt_layer(2))
        + tensor_layers((0, 1), L // 2, S)
        + tensor_embedding((0, 1), S)
        + boundary(0, 4, TOKENS)
        + tied(0, 4, 2),
    ),
    Row(
        "data x tensor x pipeline, last stage",
        TIED,
        Layout(data=2, tensor=2, pipeline=2),
        summed((5, 7), gpt_head(2) + L // 2 * gpt_layer(2))
        + tensor_layers((6, 7), L // 2, S)
        + tensor_loss((6, 7), S)
        + boundary(3, 7, TOKENS)
        + tied(3, 7, 2),
        rank=7,
    ),
    Row(
        "data x tensor x pipeline, zero 1, full recompute, clipped",
        GPT,
        Layout(data=2, tensor=2, pipeline=2, zero=1, recompute=FULL),
        zero_1((0, 2), gpt_embedding(2) + L // 2 * gpt_layer(2))
        + tensor_layers((0, 1), L // 2, S, again=L // 2)
        + tensor_embedding((0, 1), S)
        + boundary(0, 4, TOKENS)
        + norm(tuple(range(8))),
        training=CLIPPED,
    ),
    Row(
        "fully sharded x tensor",
        GPT,
        Layout(data=2, tensor=2, zero=3),
        zero_3((0, 2), gpt_embedding(2), *[gpt_layer(2)] * L) + zero_3_kept((0, 2), gpt_head(2)) + tensor((0, 1)),
    ),
    Row(
        # F0 F1 B0 F2 B1 F3 B2 B3: three times a backward follows at once and begins with the forward's last unit
        "fully sharded x pipeline, first stage",
        GPT,
        Layout(data=2, pipeline=2, zero=3),
        zero_3((0, 1), gpt_embedding(), *[gpt_layer()] * (L // 2 - 1))
        + zero_3_kept((0, 1), gpt_layer(), gathers=2 * M - 3)
        + boundary(0, 2, TOKENS),
    ),
    Row(
        "fully sharded x pipeline, last stage",
        GPT,
        Layout(data=2, pipeline=2, zero=3),
        zero_3((2, 3), *[gpt_layer()] * (L // 2)) + zero_3_kept((2, 3), gpt_head()) + boundary(0, 2, TOKENS),
        rank=2,
    ),
    Row(
        "zero 2 x zero bubble, first stage",  # [14] only shards are kept, so each W reduces what it makes
        GPT,
        Layout(data=2, pipeline=2, schedule="zb1p", zero=2),
        zero_2((0, 1), gpt_embedding() + L // 2 * gpt_layer()) + boundary(0, 2, TOKENS),
    ),
    Row(
        # F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3: three times I follows a forward at once; [14] W = x^T dy reads no weights
        "fully sharded x zero bubble, first stage",
        GPT,
        Layout(data=2, pipeline=2, schedule="zb1p", zero=3),
        zero_3((0, 1), gpt_embedding(), *[gpt_layer()] * (L // 2 - 1))
        + zero_3_kept((0, 1), gpt_layer(), gathers=2 * M - 3)
        + boundary(0, 2, TOKENS),
    ),
    Row(
        "fully sharded x zero bubble, last stage",  # F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3
        GPT,
        Layout(data=2, pipeline=2, schedule="zb1p", zero=3),
        zero_3((2, 3), *[gpt_layer()] * (L // 2)) + zero_3_kept((2, 3), gpt_head()) + boundary(0, 2, TOKENS),
        rank=2,
    ),
    Row(
        # stages 0 and 3: of all forwards only the first of stage 3 stands before a backward of its stage, and in
        # pairs forward and backward are of different stages
        "fully sharded x v of 2 ranks",
        replace(GPT, layers=8),
        Layout(data=2, pipeline=2, schedule="dualpipev", chunks=2, zero=3),
        zero_3((0, 1), gpt_embedding(), *[gpt_layer()] * 4)
        + zero_3_kept((0, 1), gpt_head(), gathers=2 * M - 1)
        + boundary(0, 2, TOKENS, 2 * M),
    ),
    Row(
        "data x context x tensor x pipeline, first stage",  # [10] section 3.3.2
        LLAMA,
        Layout(data=2, context=2, tensor=2, pipeline=2, attention=Attention.ALL_GATHER, zero=1),
        zero_1((0, 2, 4, 6), V * H // 2 + L // 2 * llama_layer(2))
        + pairs(2 * L // 2 * M, (0, 2), S * K // 2 * A)
        + tensor_layers((0, 1), L // 2, S // 2)
        + tensor_embedding((0, 1), S // 2)
        + boundary(0, 8, TOKENS // 2),
    ),
    Row(
        "data x context x tensor x pipeline, last stage",
        LLAMA,
        Layout(data=2, context=2, tensor=2, pipeline=2, zero=2),
        zero_2((8, 10, 12, 14), V * H // 2 + H + L // 2 * llama_layer(2))
        + ring((8, 10), L // 2, K // 2)
        + tensor_layers((8, 9), L // 2, S // 2)
        + tensor_loss((8, 9), S // 2)
        + boundary(0, 8, TOKENS // 2),
        rank=8,
    ),
    Row(
        "data x expert x context x tensor x pipeline",
        MIXTURE,
        Layout(data=2, expert=2, context=2, tensor=2, pipeline=2, sequence_parallel=True, zero=1),
        zero_1((0, 2, 4, 6), V * H // 2 + L // 2 * mixture_layer(2))
        + zero_1((0, 2), L // 2 * experts(2, 2))
        + exchanged((0, 4), L // 2, S // 4)
        + expert_tensor((0, 1), L // 2, S // 2)
        + ring((0, 2), L // 2, H // 2)
        + pairs((2 * L // 2 + 1) * M, (0, 1), TOKENS // 2)
        + boundary(0, 8, TOKENS // 4)
        + in_parts((0, 1), L // 2 * (2 * H + H * E)),
        training=TORCH,
    ),
)

KINDS = tuple(Collective)
MOST = 2.0**28  # bytes


def counting(small: Problem, ranks: int) -> Problem:
    """Return the problem on a machine whose collectives take 1 ns a byte, and 10 ps times the number of their kind."""

    def curve(number: int, size: int) -> CollectiveCurve:
        beside = (10 * number + 5) * 1e-12
        return CollectiveCurve(KINDS[number], size, ((1.0, 1e-9 + beside), (MOST, MOST * 1e-9 + beside)))

    curves = tuple(curve(number, size) for number in range(len(KINDS)) for size in range(2, ranks + 1))
    return replace(small, cluster=replace(small.cluster, collectives=curves))


def issued(row: Row) -> Issued:
    """Return what a rank of a row's plan issues in one step."""
    layout = row.layout
    ranks, batch = layout.data * layout.context * layout.tensor * layout.pipeline, M * layout.data * layout.microbatch
    training = Training(batch, S, "bf16", **dict(row.training))
    base = Problem(build(row.spec, S, training.dtype), problem(devices=ranks).cluster, training)
    small = counting(base, ranks)
    program = lower(small, complete(small, layout), Granularity.OPERATOR, folded=False)
    found = Issued()
    for task, index in enumerate(program.work_of.tolist()):
        work = program.work[index]
        group = tuple(
            program.rank_classes[program.streams[s].rank_class].representative for s in program.streams_of(task)
        )
        if work.kind.communicates and row.rank in group:
            size, beside = divmod(work.duration, 1000)
            kind = KINDS[beside // 10]
            assert work.pieces[0].operators.split(": ")[-1].startswith(kind)
            assert work.pieces[0].bytes == size
            found[kind, group, size] += 1
    return found


@pytest.mark.parametrize("row", TABLE, ids=[row.name for row in TABLE])
def test_a_rank_issues_the_collectives_of_the_reference_formulas(row: Row) -> None:
    assert issued(row) == row.expected
