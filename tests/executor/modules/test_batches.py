"""The parts of a batch in order are the batch, lists of strings included; what has no samples of its own is in each."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
import torch

from meshwise.executor.modules.batches import BatchError, count_samples, select_part, split_evenly


def make_batch(num_samples: int) -> dict[str, Any]:
    numbers = torch.arange(num_samples)
    names = [f"sample {number}" for number in range(num_samples)]
    return {"x": numbers.view(-1, 1), "pair": (numbers * 2, names), "raw": [bytes(3)] * num_samples, "size": (224, 224)}


def join(parts: list[dict[str, Any]]) -> dict[str, Any]:
    names = [name for part in parts for name in part["pair"][1]]
    pair = torch.cat([part["pair"][0] for part in parts]).tolist(), names
    return {"x": torch.cat([part["x"] for part in parts]).flatten().tolist(), "pair": pair}


@given(st.integers(1, 12), st.integers(1, 5))
def test_parts_in_order_are_the_batch(num_samples: int, num_parts: int) -> None:
    batch = make_batch(num_samples)
    parts = [select_part(batch, part, num_parts) for part in range(num_parts)]
    assert join(parts) == join([batch])
    sizes = [len(part["pair"][1]) for part in parts]
    assert sizes == [len(part["x"]) for part in parts] == [len(part["raw"]) for part in parts]
    assert max(sizes) - min(sizes) <= 1 and all(part["size"] == (224, 224) for part in parts)
    if num_samples % num_parts == 0:
        assert join(split_evenly(batch, num_parts, "parts")) == join([batch])


@pytest.mark.parametrize("part", [["a", "b", "c"], ("a", "b", "c"), [1, 2, 3]])
def test_a_list_with_another_number_of_items_is_refused(part: Any) -> None:
    with pytest.raises(BatchError, match=r"an item for each of its samples\(2\), met 3"):
        count_samples({"x": torch.ones(2), "names": part})
