"""ZeRO 1 cuts the parameters of a unit into equal parts, wherever they end: every element is in one part."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from meshwise.executor.parallel.sharded_states import list_own_ranges, list_ranges, main_dtype, shard_size  # noqa: E402


def unit(sizes: list[int], ranks: int, rank: int) -> Any:
    """Return a unit of parameters of some sizes as one of its ranks has it."""
    shards = SimpleNamespace(size=lambda: ranks, get_local_rank=lambda: rank)
    parameters = tuple(torch.nn.Parameter(torch.arange(float(size))) for size in sizes)
    return SimpleNamespace(parameters=parameters, sharing=SimpleNamespace(shards=shards))


def test_parts_by_hand() -> None:
    # 5 + 4 + 1 = 10 elements over 4 ranks: parts of 3, 3, 3 and 1
    cut = [[(piece.start, piece.stop) for piece in list_own_ranges(unit([5, 4, 1], 4, rank))] for rank in range(4)]
    assert shard_size(unit([5, 4, 1], 4, 0)) == 3
    assert cut == [
        [(0, 3), (0, 0), (0, 0)],
        [(3, 5), (0, 1), (0, 0)],
        [(5, 5), (1, 4), (0, 0)],
        [(5, 5), (4, 4), (0, 1)],
    ]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 6))
def test_every_element_is_in_one_part(sizes: list[int], ranks: int) -> None:
    owned: list[list[float]] = [[] for _ in sizes]
    for rank in range(ranks):
        for values, piece in zip(owned, list_own_ranges(unit(sizes, ranks, rank)), strict=True):
            values += piece.values.tolist()
    assert owned == [list(map(float, range(size))) for size in sizes]
    assert [(piece.start, piece.stop) for piece in list_ranges(unit(sizes, 1, 0).parameters)] == [
        (0, size) for size in sizes
    ]


def test_weights_of_16_bits_are_updated_in_fp32_and_others_as_they_are() -> None:
    kinds = torch.bfloat16, torch.float16, torch.float32, torch.float64
    assert [main_dtype(kind) for kind in kinds] == [torch.float32] * 3 + [torch.float64]
