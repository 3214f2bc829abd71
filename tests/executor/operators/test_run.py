"""``meshwise execute --module``: a user's module runs under a plan as in one process, or one message says why not."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from meshwise import load
from meshwise.executor.job import tensors_file
from meshwise.scenarios.commands.main import run
from meshwise.strategies.operators.operator_plan import build_operator_plan
from meshwise.strategies.plan.mesh import TENSOR
from meshwise.strategies.plan.partition import Stage
from meshwise.strategies.plan.sharding import OperatorSharding

MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, hidden=8):
        super().__init__()
        self.up = nn.Linear(4, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.frozen = nn.Linear(hidden, hidden).requires_grad_(False)
        self.unread = nn.Linear(3, 3)
        self.down = nn.Linear(hidden, 1)

    def forward(self, x):
        return self.down(torch.relu(self.frozen(self.norm(self.up(x))))).square().mean()

def make():
    print("weights are drawn")
    return Net(), (torch.randn(8, 4),)

def wider():
    return Net(16), (torch.randn(8, 4),)

def other():
    return nn.Sequential(nn.Linear(4, 1), nn.Flatten(0), nn.Softmax(0), Sum()), (torch.randn(8, 4),)

class Sum(nn.Module):
    def forward(self, x):
        return x.sum()

def fewer():
    return Net(), (torch.randn(6, 4),)

def ragged():
    return Net(), (torch.randn(8, 4), torch.randn(4, 4))

def loud():
    raise RuntimeError("no weights here")

class Branches(nn.Module):
    def forward(self, x):
        return x.sum() if x.sum() > 0 else x.sum() * 2

def branches():
    return Branches(), (torch.randn(8, 4),)

class Ranked(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        self.seen.copy_(self.up(x).detach().mean(0).sort().values)
        return super().forward(x)

def ranked():
    return Ranked(), (torch.randn(8, 4),)
"""

SCENARIO = """
model: {graph: graph.json}
training: {global_batch: 8, sequence: 1, precision: fp32, framework: execute}
cluster: {preset: local-cpu, nodes: 1, devices_per_node: 2}
"""


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a module, its graph and a scenario."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "user.py").write_text(MODULE)
    (folder / "s.yaml").write_text(SCENARIO)
    assert run(["capture", f"{folder / 'user.py'}:make", "--out", str(folder / "graph.json")]) == 0
    return folder


def plan_file(user: Path, *shardings: tuple[str, str], **changes: object) -> str:
    """Write a plan on two ranks whose first operator is cut, and others of some names, each along a dim."""
    problem = load(user / "s.yaml").problem
    cut = [OperatorSharding(name, ((dim, (TENSOR,)),)) for name, dim in (("up.up", "ffn"), *shardings)]
    plan = replace(build_operator_plan(problem, {TENSOR: 2}, 8, cut), **changes)
    file = user / "plan.json"
    file.write_text(json.dumps(plan.to_json()))
    return str(file)


def test_it_computes_what_one_process_does(user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_file(user, ("up.norm_div", "ffn"), ("up.norm_div_2", "ffn"))  # so are the running statistics
    arguments = ["--plan", plan, "--module", f"{user / 'user.py'}:make", "--verify", "--steps", "2", "--json"]
    assert run(["execute", str(user / "s.yaml"), *arguments, "--out", str(user / "run")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["steps"] == 2 and len(told["loss"]) == 2 and told["loss"][1] < told["loss"][0]
    assert told["verify"]["equal"] and told["verify"]["parameter_error"] < 1e-9
    assert json.loads((user / "run" / "result.json").read_text()) == told

    for rank in (0, 1):
        left = np.load(tensors_file(user / "run" / "verify", rank))
        assert left["buffer norm.num_batches_tracked"] == 3  # one a step
        assert {"parameter frozen.weight", "buffer norm.running_mean", "buffer norm.running_var"} <= set(left.files)
        assert not left["gradient frozen.weight"].any() and left["gradient up.weight"].any()


def staged(user: Path, microbatch: int = 4, **changes: object) -> list[str]:
    """Return the arguments of a plan of two pipeline stages, each on two ranks that cut products."""
    file = user / "four.yaml"
    file.write_text(SCENARIO.replace("devices_per_node: 2", "devices_per_node: 4"))
    problem = load(file).problem
    first, *rest = (name for name, _ in problem.graph.occurrences)
    stages = Stage((first,)), Stage(tuple(rest))
    cut = [OperatorSharding(name, ((dim, (TENSOR,)),)) for name, dim in (("up.up", "ffn"), ("down.down", "hidden"))]
    plan = replace(build_operator_plan(problem, {TENSOR: 2}, microbatch, cut, stages=stages), **changes)
    (user / "staged.json").write_text(json.dumps(plan.to_json()))
    return [str(file), "--plan", str(user / "staged.json")]


def test_pipeline_stages_of_single_operators(user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = ["--module", f"{user / 'user.py'}:make", "--steps", "1", "--json"]
    arguments = staged(user)
    assert run(["simulate", *arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == 4
    assert run(["execute", *arguments, *module]) == 2
    line = next(number for number, text in enumerate(MODULE.splitlines(), 1) if "self.norm(" in text)
    assert (
        f"user.py:{line}: the loss of a batch is the mean of those of its 2 microbatches, met samples that depend"
        in (capsys.readouterr().err)
    )
    assert run(["execute", *staged(user, microbatch=8, schedule="gpipe"), *module]) == 0
    assert json.loads(capsys.readouterr().out)["verify"]["equal"]  # which no run goes without


TRAINING = {
    "bf16": ("precision: bf16", "precision: a captured module is trained as it was made, met bf16; nearest: fp32"),
    "clipped": (
        "precision: fp32, gradient_clipping: true",
        "gradient_clipping: gradients of a captured module are not",
    ),
    "lion": ("precision: fp32, optimizer: lion", "optimizer: the executor steps with adamw or sgd, met lion"),
}


@pytest.mark.parametrize("name", TRAINING)
def test_training_that_a_module_does_not_have_is_refused(
    name: str, user: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, told = TRAINING[name]
    text = SCENARIO.replace("precision: fp32", given) + "plan: {tensor: 2, microbatch: 8}\n"
    (user / "trained.yaml").write_text(text.replace("local-cpu", "dgx-a100-80gb"))
    assert run(["execute", str(user / "trained.yaml"), "--module", f"{user / 'user.py'}:make"]) == 2
    assert told in capsys.readouterr().err


def test_ranks_that_differ_do_not_start_the_run(
    user: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one process computes is spoiled in one gradient: the message has its name, and no step was run."""
    from meshwise.executor.operators import trainer as reference

    def spoiled(job: object, train: object = reference.train) -> object:
        losses, arrays = train(job)  # type: ignore[operator]
        arrays["gradient down.weight"][0, 0] += 1e-6
        return losses, arrays

    monkeypatch.setattr(reference, "train", spoiled)
    out = user / "differs"
    arguments = ["--plan", plan_file(user), "--module", f"{user / 'user.py'}:make", "--steps", "1", "--out", str(out)]
    assert run(["execute", str(user / "s.yaml"), *arguments]) == 1
    error = capsys.readouterr().err
    assert "the run was not started" in error and "most in gradient down.weight" in error
    assert not list(out.glob("*.metrics.jsonl")) and not list(out.glob("rank-*.npz"))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"stages": (Stage(("down",)), Stage(("up",)))}, "block 0 is up, met down"),
        ({"chunks": 2, "schedule": "interleaved"}, "pipeline(2) * chunks(2) = 4 stages, met 2"),
        ({"schedule": "pipedream"}, "run a published schedule with a flush; nearest: "),
        ({"schedule": "zbv"}, "zbv: chunks(1) = 2 does not hold; nearest: 2"),
    ],
)
def test_stages_that_are_wrong(
    changes: dict[str, object], told: str, user: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", *staged(user, **changes)]) == 2
    assert told in capsys.readouterr().err


FACTORIES = {
    "nothing": ("nothing", "user.py has no function nothing"),
    "loud": ("loud", "user.py:loud: the factory failed: RuntimeError: no weights here"),
    "ragged": ("ragged", "user.py:ragged: dim 0 of each input is the batch, of one size for all, met 8, 4"),
    "fewer": ("fewer", "user.py:fewer: microbatch(8) * data(1) * microbatches(1) is the batch of the inputs, met 6"),
    "branches": ("branches", "user.py:42: torch cannot export the module: control flow does not depend on data"),
    "ranked": ("ranked", "user.py:53: the executor renews buffers point by point, each from one value of the loss"),
    "wider": ("wider", "the module is the one that the scenario's graph was captured from; up.up is "),
    "other": ("other", "user.py:other: the module is the one that the scenario's graph was captured from; met up.up"),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_a_module_that_is_wrong_is_one_message(name: str, user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    factory, told = FACTORIES[name]
    arguments = ["--plan", plan_file(user), "--module", f"{user / 'user.py'}:{factory}", "--out", str(user / "never")]
    assert run(["execute", str(user / "s.yaml"), *arguments]) == 2
    captured = capsys.readouterr()
    assert told in captured.err and "\n" not in captured.err.strip() and not captured.out
    assert not list((user / "never").glob("*"))


def test_a_file_that_is_not_there(user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = user / "missing.py"
    assert run(["execute", str(user / "s.yaml"), "--plan", plan_file(user), "--module", f"{missing}:make"]) == 2
    assert f"{missing}: the file cannot be read: there is no such file" in capsys.readouterr().err
    assert run(["execute", str(user / "s.yaml"), "--plan", plan_file(user), "--module", "user"]) == 2
    assert "a factory is named FILE.py:FACTORY, met 'user'" in capsys.readouterr().err


PLANS: dict[str, tuple[tuple[tuple[str, str], ...], dict[str, object], str]] = {
    "no such operator": (
        (("up.upp", "ffn"),),
        {},
        "shardings name operators of the model, met up.upp; nearest: up.up",
    ),
    "no such dim": ((("down.down", "width"),), {}, "down.down: may be cut: batch, hidden; met width"),
    "not divided": (
        (("down.down", "batch"),),
        {"microbatch": 1, "num_microbatches": 8},
        "down.down: tensor(2) divides batch(1), met 2; nearest: 1",
    ),
    "zero": ((), {"zero": 3}, "zero: shards of a captured module's parameters are in its shardings, met 3; nearest: 0"),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_that_is_wrong_is_one_message(name: str, user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shardings, changes, told = PLANS[name]
    file = plan_file(user, *shardings, **changes)
    assert run(["execute", str(user / "s.yaml"), "--plan", file, "--module", f"{user / 'user.py'}:make"]) == 2
    assert told in capsys.readouterr().err


def test_a_microbatch_of_one_sample_is_refused(user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (user / "one.yaml").write_text(SCENARIO + "plan: {tensor: 2, microbatch: 1}\n")
    assert run(["execute", str(user / "one.yaml"), "--module", f"{user / 'user.py'}:make"]) == 2
    assert "a microbatch of a captured module has at least 2 samples, met microbatch(1)" in capsys.readouterr().err


GRAPHS = {
    "a cycle": (lambda graph: graph["blocks"][0]["operators"].reverse(), "cycle"),
    "a missing tensor": (lambda graph: graph["blocks"][0]["tensors"].pop(), "tensor"),
    "an absurd size": (
        lambda graph: graph["blocks"][0]["tensors"][0].update(shape=[10**30, 4]),
        "tensors.0.shape.0: is at most",
    ),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_that_is_wrong_is_told_before_the_module_runs(
    name: str, user: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, told = GRAPHS[name]
    graph = json.loads((user / "graph.json").read_text())
    spoil(graph)
    (tmp_path / "graph.json").write_text(json.dumps(graph))
    (tmp_path / "s.yaml").write_text(SCENARIO + "plan: {tensor: 2, microbatch: 8}\n")
    assert run(["execute", str(tmp_path / "s.yaml"), "--module", f"{user / 'user.py'}:loud"]) == 2
    error = capsys.readouterr().err
    assert "graph.json" in error and told in error and "no weights" not in error and "Traceback" not in error


def test_a_pin_that_is_wrong_offers_the_nearest(user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (user / "pinned.yaml").write_text(SCENARIO + "search: {algorithm: frontier, pin: {up.upp: {batch: tensor}}}\n")
    assert run(["search", str(user / "pinned.yaml")]) == 2
    error = capsys.readouterr().err
    assert "pinned.yaml" in error and "nearest: up.up" in error
