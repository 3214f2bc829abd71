"""Weights in files are those that were written, under all their names, in one file or in shards."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("safetensors")
import torch
from safetensors.torch import load_file, load_model
from torch import nn

from meshwise.executor.recording.weight_files import (
    INDEX,
    WeightsError,
    find_aliases,
    list_weight_files,
    read_weights,
    write_weights,
)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.core, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.words.weight


@pytest.mark.parametrize("shard_size", [10**9, 100])
def test_what_is_written_is_read(shard_size: int, tmp_path: Path) -> None:
    module = Tied()
    path = write_weights(tmp_path, module.state_dict(), find_aliases(module), shard_size)
    weights = read_weights(tmp_path)
    assert weights.keys() == module.state_dict().keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in module.state_dict().items())
    other = Tied()
    if path.name == INDEX:
        index = json.loads(path.read_text())
        assert index["metadata"]["total_size"] == sum(parameter.nbytes for parameter in module.parameters())
        assert all(name in load_file(tmp_path / file) for name, file in index["weight_map"].items())
        for file in set(index["weight_map"].values()):  # as the guide says
            other.load_state_dict(load_file(tmp_path / file), strict=False)
    else:
        load_model(other, path)
    assert torch.equal(other.head.weight, module.words.weight) and torch.equal(other.core.bias, module.core.bias)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 100))
def test_shards_have_every_tensor_once_and_stay_within_their_size(sizes: list[int], shard_size: int) -> None:
    import tempfile

    weights = {f"part{place}": torch.ones(size, dtype=torch.uint8) * place for place, size in enumerate(sizes)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_weights(folder, weights, {}, shard_size)
        files = [path for path in list_weight_files(folder) if path.name != INDEX]
        parts = [load_file(path) for path in files]
    assert sorted(key for part in parts for key in part) == sorted(weights)
    for part in parts:
        assert len(part) == 1 or sum(tensor.nbytes for tensor in part.values()) <= shard_size


def test_files_of_an_earlier_run_are_replaced(tmp_path: Path) -> None:
    weights = {"a": torch.ones(4), "b": torch.zeros(4)}
    write_weights(tmp_path, weights, {}, 16)
    (tmp_path / "notes.txt").write_text("mine")
    write_weights(tmp_path, weights, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "notes.txt"]


def test_views_of_a_larger_tensor_are_written_alone(tmp_path: Path) -> None:
    table = torch.arange(12.0).view(3, 4)
    path = write_weights(tmp_path, {"row": table[1], "column": table[:, 2], "rest": table}, {})
    assert path.stat().st_size < 500
    assert torch.equal(read_weights(tmp_path)["column"], table[:, 2])


def test_what_is_no_weight_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="weights are tensors, met state of dict"):
        write_weights(tmp_path, {"state": {}}, {})  # type: ignore[dict-item]
    with pytest.raises(WeightsError, match=r"a folder with model\.safetensors, met none"):
        read_weights(tmp_path)
