"""Values in safetensors files are read whole and in parts, and fit a module by name and shape or not at all."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from meshwise.executor.starting.construction import DeferredModule, start_module
from meshwise.executor.starting.stored_values import StoredValues, find_stored_tensors, match_parameters


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.words.weight
        self.scale = nn.Parameter(torch.tensor(2.0))


def draw_states() -> dict[str, Tensor]:
    return {name: torch.rand(tensor.shape).add(1) for name, tensor in Tied().state_dict().items()}


def write(folder: Path, states: dict[str, Tensor], *, num_files: int = 1) -> None:
    names = [f"model-{place}.safetensors" for place in range(num_files)] if num_files > 1 else ["model.safetensors"]
    parts = {name: list(states)[place::num_files] for place, name in enumerate(names)}
    for name, keys in parts.items():
        save_file({key: states[key] for key in keys}, folder / name)
    index = {"weight_map": {key: name for name, keys in parts.items() for key in keys}}
    if num_files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def start() -> DeferredModule:
    result = start_module(Tied, 0)
    assert isinstance(result, DeferredModule)
    return result


@pytest.mark.parametrize("num_files", [1, 3])
def test_a_module_has_the_values_of_its_files(tmp_path: Path, num_files: int) -> None:
    states = draw_states()
    del states["words.weight"]  # a tied table lies there under one of its names
    write(tmp_path, states, num_files=num_files)
    module = start().module
    values = match_parameters(module, find_stored_tensors(tmp_path))
    assert values is not None
    built = DeferredModule(module, values).build()
    assert built.head.weight is built.words.weight
    for name, tensor in built.state_dict().items():
        expected = states["head.weight" if name == "words.weight" else name]
        assert torch.equal(tensor, expected.to(tensor.dtype)), name


@given(st.data())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_part_is_that_of_the_whole(tmp_path: Path, data: st.DataObject) -> None:
    states = {"half": torch.arange(60).view(3, 4, 5).bfloat16(), "row": torch.rand(7), "point": torch.tensor(3.0)}
    if not (tmp_path / "model.safetensors").exists():
        write(tmp_path, states)
    stored = {name: item._replace(dtype=torch.float64) for name, item in find_stored_tensors(tmp_path).items()}
    values, name = StoredValues(stored), data.draw(st.sampled_from(sorted(stored)))
    whole = values.read(name)
    ends = [sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in whole.shape]
    part = values.read_part(name, [first for first, _ in ends], [end - first for first, end in ends])
    assert part.dtype == torch.float64 and torch.equal(part, whole[tuple(slice(*pair) for pair in ends)])


def test_what_does_not_fit_is_not_taken(tmp_path: Path) -> None:
    states, module = draw_states(), start().module
    changes = {"scale": None, "words.weight": torch.ones(5, 3), "norm.running_mean": torch.ones(3)}
    assert match_parameters(module, find_stored_tensors(tmp_path)) is None
    for place, (name, tensor) in enumerate(changes.items()):
        folder = tmp_path / str(place)
        folder.mkdir()
        changed = {key: value for key, value in states.items() if key not in (name, "head.weight")}
        write(folder, changed if tensor is None else changed | {name: tensor})
        assert match_parameters(module, find_stored_tensors(folder)) is None, name
    assert module.norm.running_mean.tolist() == [0.0] * 4


def test_digests_are_those_of_names_and_files(tmp_path: Path) -> None:
    digests = []
    for name in ("scale", "other"):
        folder = tmp_path / name
        folder.mkdir()
        write(folder, {name: torch.ones(2)})
        digests += [StoredValues(find_stored_tensors(folder)).compute_digest() for _ in range(2)]
    assert digests[0] == digests[1] != digests[2] == digests[3]
