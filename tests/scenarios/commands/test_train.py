"""``meshwise train``: one command for a user's file, and one message for every fault."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from meshwise.scenarios.commands.main import run

FILE = """
import torch
BATCH = 4

def model():
    return torch.nn.Linear(2, 1)

def data():
    return torch.utils.data.TensorDataset(torch.arange(24.0).view(12, 2) / 24)

def loss(outputs, batch):
    return outputs.square().mean()
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    return "mine.py"


def test_a_run_and_its_continuation(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--no-calibrate", "--processes", "1"]
    words = ["--plan", "data=2,zero=1", "--no-calibrate"]
    assert run(["train", file, *words, "--steps", "3", "--verify", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["verify"]["equal"] and first["plan"]["zero"] == 1 and len(first["loss"]) == 3
    assert run(["train", file, "--steps", "5", "--resume", "--checkpoint-every", "1", "--json", *options]) == 0
    rest = json.loads(capsys.readouterr().out)
    assert rest["first_step"] == 3 and len(rest["loss"]) == 2
    names = sorted(path.name for path in Path("meshwise-train/checkpoints").iterdir())
    assert names == ["step-00000003", "step-00000004", "step-00000005"]
    assert run(["train", file, "--steps", "6", "--resume", *options]) == 0
    text = capsys.readouterr().out
    assert "3 parameters, 0 blocks" in text and "at step 5" in text
    assert run(["train", file, "--steps", "2", *options]) == 2
    assert "met step-00000006 in meshwise-train/checkpoints; nearest: --resume or --replace" in capsys.readouterr().err
    assert run(["train", file, "--steps", "2", "--replace", "--learning-rate", "0.5", *options]) == 0
    assert [path.name for path in Path("meshwise-train/checkpoints").iterdir()] == ["step-00000002"]
    rows = [json.loads(line) for line in Path("meshwise-train/metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["learning_rate"]) for row in rows] == [(0, 0.5), (1, 0.5)]


def test_a_searched_plan_runs_beside_its_prediction_and_is_read_again(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", file, "--steps", "6", "--processes", "2", "--out", "first", "--json"]) == 0
    output = capsys.readouterr()
    first = json.loads(output.out)
    # two data ranks with ZeRO 0 to 3, or two tensor ranks, with 1 or 2 microbatches
    assert first["plan"]["data"] * first["plan"]["tensor"] == 2 and first["plans"] == (4 + 1) * 2
    assert first["predicted_step_time"] > 0 and first["tokens_per_second"] is None
    # 3 parameters of 4 bytes with gradients and two moments at least
    assert min(first["predicted_peak_memory"], first["peak_memory"]) > 3 * 4 * 3
    assert "fastest of" in output.err and "% slower" in output.err and "passes: " in output.err
    assert run(["train", file, "--steps", "6", "--plan", "first/plan.json", "--no-calibrate"]) == 0
    text = capsys.readouterr().out
    assert "predicted step time" in text and "predicted memory" in text


def test_a_run_of_several_hosts_is_prepared_and_collected(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--plan", "data=4,zero=1", "--rendezvous", "node0.invalid:29501", "--processes", "2", "--out", "far"]
    assert run(["train", file, *words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["nodes"] == 2 and document["commands"][1].endswith("far/host.sh 1")
    script = Path("far/host.sh").read_text()
    assert "--nnodes 2" in script and "meshwise.executor.user_training.worker" in script
    assert json.loads(Path("far/job.json").read_text())["layout"]["data"] == 4
    assert run(["train", "--collect", "--out", "far"]) == 1
    assert "no step is done; run `sh far/host.sh NUMBER` on each host" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["mine.py", "--rendezvous", "node0"],
            "several hosts run a plan that is known, compared on one host, met no --plan",
        ),
        (["mine.py", "--plan", "data=2", "--verify", "--rendezvous", "node0"], "compared on one host, met --verify"),
        (
            ["mine.py", "--plan", "data=3", "--processes", "2", "--rendezvous", "node0.invalid"],
            "met 2 processes of 3 ranks; nearest: 1",
        ),
        (["--collect", "--rendezvous", "node0"], "--rendezvous comes before a run and --collect after it, met both"),
        (["--collect", "--out", "empty"], "the folder of a run has a job.json"),
        (["mine.py", "other.py"], "one FILE.py, or --hf FOLDER --text FILES, met 2 files"),
        (["mine.py", "--sequence", "8"], "are of a model, met no --hf FOLDER"),
        (
            ["mine.py", "--evaluate-every", "2"],
            "the file has evaluation_data(), samples that are not trained on",
        ),
        (["none.py"], "a Python file that has model() and data(), met no such file"),
        (["mine.py", "--plan", "data=2,zerro=1"], "met 'zerro=1'; nearest: zero"),
        (["mine.py", "--plan", "zero=high"], "zero is a number, met 'high'"),
        (["mine.py", "--plan", "recompute=some"], "or full:2 or selective:2 with it, met 'some'; nearest: full"),
        (["mine.py", "--plan", "none.json"], "none.json: a plan file as `meshwise search --out` writes it"),
        (["mine.py", "--plan", "data=2", "--processes", "3"], "those of the plan, 2, met 3; nearest: 2"),
        (["mine.py", "--plan", "data=3"], "data ranks(3) divide the samples of a step, met 4; nearest: 3"),
        (["mine.py", "--resume"], "a folder of checkpoints has step-..., met none"),
        (["mine.py", "--precision", "fp8"], "met fp8; nearest: bf16"),
        (["mine.py", "--clip", "0"], "are above 0"),
        (["mine.py", "--batch", "13"], "at most all samples of the dataset(12), met 13; nearest: 12"),
    ],
)
def test_bad_input_is_one_message(
    arguments: list[str], message: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", *arguments, "--steps", "2", "--no-calibrate"]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


EVALUATION = """
def evaluation_data():
    return torch.utils.data.TensorDataset(torch.arange(10.0).view(5, 2))

def evaluate(model, batch):
    return {"mean": batch[0].mean(), "outputs": (model(batch[0]).sum(), len(batch[0]))}
"""


def test_figures_of_an_evaluation_are_over_all_samples(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(file).write_text(FILE + EVALUATION)
    printed = []
    for plan in ("data=1", "data=2,zero=3", "data=2"):
        options = ["--plan", plan, "--steps", "3", "--evaluate-every", "2", "--replace", "--json"]
        assert run(["train", file, *options]) == 0
        printed.append(json.loads(capsys.readouterr().out)["evaluation"])
        rows = [json.loads(line) for line in Path("meshwise-train/metrics.jsonl").read_text().splitlines()]
        assert [{"step": row["step"]} | row["evaluation"] for row in rows if "evaluation" in row] == printed[-1]
    for figures in printed:
        assert [row["step"] for row in figures] == [1, 2] and {row["mean"] for row in figures} == {4.5}
        assert [row["outputs"] for row in figures] == pytest.approx([row["outputs"] for row in printed[0]])
    Path(file).write_text(FILE + EVALUATION.replace("model(batch[0])", "model(batch[1])"))
    assert run(["train", file, "--steps", "1", "--replace"]) == 2
    assert "mine.py:18: evaluate(): IndexError" in capsys.readouterr().err


def test_a_fault_in_the_users_code_is_told_with_its_line(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(file).write_text(FILE.replace("outputs.square().mean()", "outputs.sqare().mean()"))
    assert run(["train", file, "--plan", "data=2", "--steps", "2", "--no-calibrate"]) == 2
    error = capsys.readouterr().err
    assert "mine.py:12: AttributeError: 'Tensor' object has no attribute 'sqare'" in error and "Traceback" not in error


def test_a_module_that_no_rank_can_build_in_parts_is_told(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    own_generator = """
    module = torch.nn.Linear(2, 1)
    torch.nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(1))
    return module
"""
    options = ["--plan", "data=2,zero=3", "--no-calibrate", "--steps", "1", "--replace"]
    assert run(["train", file, *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["whole_start"] is None
    Path(file).write_text(FILE.replace("    return torch.nn.Linear(2, 1)", own_generator))
    assert run(["train", file, *options]) == 0
    text = "with the whole module on every rank: rank 0: draws from a generator of its own"
    assert text in " ".join(capsys.readouterr().out.split())
