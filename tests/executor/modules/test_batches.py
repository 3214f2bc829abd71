"""Parts of a batch are its samples in order, whatever its structure."""

from typing import NamedTuple

import pytest

pytest.importorskip("torch")
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshwise.executor.modules.batches import BatchError, count_samples, list_tensors, map_tensors, split_evenly


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


STRUCTURES = [
    lambda x: x,
    lambda x: (x, x * 2),
    lambda x: {"a": x, "b": [x, x + 1], "name": "text"},
    lambda x: Pair(x, x - 1),
]


@given(st.sampled_from(STRUCTURES), st.integers(1, 4), st.integers(1, 4))
def test_parts_together_are_the_batch(structure: object, num_parts: int, size: int) -> None:
    assert callable(structure)
    batch = structure(torch.arange(num_parts * size))
    parts = split_evenly(batch, num_parts, "ranks")
    assert [count_samples(part) for part in parts] == [size] * num_parts
    assert all(type(part) is type(batch) for part in parts)
    columns = zip(*map(list_tensors, parts), strict=True)
    assert all(map(torch.equal, map(torch.cat, columns), list_tensors(batch)))


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(BatchError, match=r"ranks\(3\) divide the batch, met 8 samples; nearest: 6"):
        split_evenly(torch.zeros(8), 3, "ranks")
    with pytest.raises(BatchError, match="same samples in dim 0, met 2, 3"):
        count_samples((torch.zeros(2), torch.zeros(3)))
    with pytest.raises(BatchError, match="met a scalar"):
        count_samples(torch.tensor(1.0))


def test_named_tuples_stay_what_they_are() -> None:
    result = map_tensors(Pair(torch.ones(1), torch.zeros(1)), lambda tensor: tensor + 1)
    assert isinstance(result, Pair) and result.first.item() == 2
