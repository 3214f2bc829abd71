"""``meshwise capture``: a user's file becomes a graph file, or one message."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from meshwise import load
from meshwise.scenarios.commands.main import run
from meshwise.scenarios.inputs.graph_file import load_graph

HEAD = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x.square().sum()
"""

SCENARIO = """
model: {graph: graph.json}
training: {global_batch: 8, sequence: 1, precision: fp32}
cluster: {preset: dgx-a100-80gb, nodes: 1}
plan: {data: 4, pipeline: 2, microbatch: 1, stages: balanced}
"""


@pytest.fixture
def user(tmp_path: Path) -> Path:
    return tmp_path / "user.py"


def test_a_file_is_captured_and_simulated(user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    user.write_text(HEAD + "def make():\n    return Net(), (torch.randn(4, 8),)\n")
    out = user.parent / "graph.json"
    assert run(["capture", f"{user}:make", "--out", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["warnings"] == [] and told["graph"] == json.loads(out.read_text())
    first = out.read_bytes()
    assert run(["capture", f"{user}:make", "--out", str(out)]) == 0
    assert out.read_bytes() == first
    assert "layers_0, layers x 2" in capsys.readouterr().out  # the first one reads data, the others one another
    (user.parent / "s.yaml").write_text(SCENARIO)
    scenario = load(user.parent / "s.yaml")
    assert scenario.problem.graph.num_parameters == 3 * (8 * 8 + 8)
    assert scenario.simulate().step_time > 0


FACTORIES = {
    "nothing": ("", "has no function make"),
    "misspelt": ("def mak():\n    pass\n", "has no function make; nearest: mak"),
    "no tuple": ("def make():\n    return Net()\n", "returns (module, inputs) with a torch.nn.Module, met Net"),
    "swapped": (
        "def make():\n    return (torch.ones(2, 8),), Net()\n",
        "returns (module, inputs) with a torch.nn.Module, met a tuple of tuple, Net",
    ),
    "inputs of another kind": (
        "def make():\n    return Net(), {'x': torch.ones(2, 8)}\n",
        "inputs are a tuple of tensors, met dict",
    ),
    "a list among inputs": ("def make():\n    return Net(), ([1.0],)\n", "inputs are tensors, met list at place 0"),
    "other batches": (
        "def make():\n    return Net(), (torch.ones(2, 8), torch.ones(3))\n",
        "of one size for all, met 2, 3",
    ),
    "failing": ("def make():\n    return 1 / 0\n", "the factory failed: ZeroDivisionError: division by zero"),
    "failing to import": ("import nothing_of_this_name\n", "the file cannot be imported: ModuleNotFoundError"),
    "no syntax": ("def make(:\n", "the file cannot be imported: SyntaxError"),
    "a vector": (
        "class V(nn.Module):\n    def forward(self, x):\n        return x * 2\n"
        "def make():\n    return V(), (torch.ones(2, 8),)\n",
        "returns a scalar loss, met a tensor of shape (2, 8)",
    ),
    "wrong shapes": ("def make():\n    return Net(), (torch.ones(2, 7),)\n", "torch cannot export the module"),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_that_is_wrong_is_one_message(name: str, user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, told = FACTORIES[name]
    user.write_text(HEAD + text)
    assert run(["capture", f"{user}:make", "--out", str(user.parent / "graph.json")]) == 2
    error = capsys.readouterr().err.strip()
    assert told in error and "\n" not in error
    assert not (user.parent / "graph.json").exists()


TRAINED = (
    HEAD
    + """
BATCH = 4

def model():
    return Net()

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, number):
        return torch.full((8,), float(number))

def data():
    return Rows()
"""
)


def test_a_file_of_train_is_captured_as_its_factory_is(user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    user.write_text(TRAINED + "def make():\n    return Net(), (torch.randn(4, 8),)\n")
    factory_file, training_file = user.parent / "factory.json", user.parent / "training.json"
    assert run(["capture", f"{user}:make", "--out", str(factory_file)]) == 0
    assert run(["capture", str(user), "--out", str(training_file)]) == 0
    first, second = (load_graph(path).operator_graph for path in (factory_file, training_file))
    # one names its input x, the other by its place in the batch
    assert [name for name, _ in first.occurrences] == [name for name, _ in second.occurrences]
    assert (first.flops, first.num_parameters) == (second.flops, second.num_parameters)


def test_names_and_places_that_are_wrong(user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(user.parent / "graph.json")
    for factory, told in (
        ("user.py", "user.py: a file FILE.py with model() and data(), met no such file"),
        ("user.txt:make", "a factory is named FILE.py:FACTORY"),
        (f"{user}:make", "there is no such file"),
    ):
        assert run(["capture", factory, "--out", out]) == 2
        assert told in capsys.readouterr().err
    user.write_text(HEAD)
    assert run(["capture", f"{user}:make", "--out", str(user.parent / "graph.txt")]) == 2
    assert "a name ends in .json" in capsys.readouterr().err


def test_without_torch_the_message_is_clear(
    user: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    for name in [each for each in sys.modules if each.startswith("meshwise.executor.capture")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert run(["capture", f"{user}:make", "--out", str(user.parent / "graph.json")]) == 1
    assert "torch" in capsys.readouterr().err
