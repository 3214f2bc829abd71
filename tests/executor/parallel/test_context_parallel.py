"""Context parallelism computes what one process does, by functions that a hand can check."""

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from meshwise.executor.model.network import flash_attention  # noqa: E402
from meshwise.executor.parallel.context_parallel import (  # noqa: E402
    find_visibility,
    list_positions,
    merge_softmax,
    to_natural_order,
    to_rank_order,
)
from meshwise.executor.recording.private_torch import attention_gradients  # noqa: E402

SEQUENCE, RANKS = 12, 3


def heads(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_ranks_have_every_token_once_and_equal_causal_work(ranks: int) -> None:
    owned = [torch.from_numpy(list_positions(rank, ranks, SEQUENCE)) for rank in range(ranks)]
    assert sorted(torch.cat(owned).tolist()) == list(range(SEQUENCE))
    # a token at position p attends to p + 1 tokens: 1 + 2 + ... + 12 = 78 in all
    assert [int((own + 1).sum()) for own in owned] == [78 // ranks] * ranks


def test_what_a_part_shows_is_what_causal_attention_sees() -> None:
    own = [torch.from_numpy(list_positions(rank, RANKS, SEQUENCE)) for rank in range(RANKS)]
    for rank in range(RANKS):
        for source in range(RANKS):
            visible = own[source] <= own[rank][:, None]
            query, end, causal = find_visibility(rank, source, SEQUENCE // RANKS)
            told = torch.zeros_like(visible)
            told[query:, :end] = True
            assert torch.equal(told.tril() if causal else told, visible), (rank, source)


def test_orders_are_inverse_and_natural() -> None:
    whole = torch.arange(SEQUENCE, dtype=torch.float64).view(1, 1, SEQUENCE, 1)
    parts = to_rank_order(whole, RANKS)
    assert [part.flatten().tolist() for part in parts] == [
        list_positions(rank, RANKS, SEQUENCE).tolist() for rank in range(RANKS)
    ]
    assert torch.equal(to_natural_order(parts), whole)


def test_parts_merge_into_the_attention_over_all_keys() -> None:
    query, key, value = (heads(2, 3, tokens, 8, seed=seed) for seed, tokens in enumerate((4, 6, 6)))
    out, logsumexp = torch.zeros_like(query), torch.full((2, 3, 4), float("-inf"), dtype=torch.float64)
    for part in (slice(0, 1), slice(1, 4), slice(4, 6)):
        merge_softmax(out, logsumexp, query, key[:, :, part], value[:, :, part], causal=False)
    scores = query @ key.transpose(-1, -2) / 8**0.5
    torch.testing.assert_close(out, scores.softmax(-1) @ value, rtol=0, atol=1e-14)
    torch.testing.assert_close(logsumexp, scores.logsumexp(-1), rtol=0, atol=1e-14)


def test_gradients_of_parts_add_up() -> None:
    query, key, value = (heads(1, 2, 6, 4, seed=seed).requires_grad_() for seed in range(3))
    context, gradient = flash_attention(query, key, value), heads(1, 2, 6, 4, seed=3)
    expected = torch.autograd.grad(context, (query, key, value), gradient)
    query, key, value, context = (tensor.detach() for tensor in (query, key, value, context))
    scores = (query @ key.transpose(-1, -2) / 2).masked_fill(torch.ones(6, 6).triu(1).bool(), float("-inf"))
    own = scores.logsumexp(-1)
    late = (gradient[:, :, 3:], query[:, :, 3:], context[:, :, 3:], own[:, :, 3:])
    early = (gradient[:, :, :3], query[:, :, :3], context[:, :, :3], own[:, :, :3])
    first = attention_gradients(*early, key[:, :, :3], value[:, :, :3], causal=True)
    past = attention_gradients(*late, key[:, :, :3], value[:, :, :3], causal=False)
    last = attention_gradients(*late, key[:, :, 3:], value[:, :, 3:], causal=True)
    of_query = torch.cat([first[0], past[0] + last[0]], 2)
    of_key, of_value = (torch.cat([first[i] + past[i], last[i]], 2) for i in (1, 2))
    for found, wanted in zip((of_query, of_key, of_value), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)
