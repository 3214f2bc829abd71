"""``meshwise export`` to trainers, and ``--plan TARGET:FILE`` back: on the command line, and without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from meshwise import load
from meshwise.scenarios.commands.main import run

ROOT = Path(__file__).parents[3]
SCENARIOS = {
    "torchtitan": "pipeline-zbv",
    "megatron": "llama3-405b-16384-1f1b",
    "deepspeed": "zero-1-optimizer",
    "accelerate": "data-parallel-buckets",
    "nanotron": "tinyllama-1.1b-8-a100",
}


def test_the_plan_comes_back(tmp_path: Path, capsys) -> None:
    file = tmp_path / "arguments.sh"
    assert run(["export", SCENARIOS["megatron"], "--to", "megatron", "--out", str(file), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["target"], document["version"]) == ("megatron", "core 0.16.1")
    assert document["text"] == file.read_text()
    own = load(SCENARIOS["megatron"])
    assert load(SCENARIOS["megatron"], f"megatron:{file}").plan == own.plan
    text = file.read_text().replace("--pipeline-model-parallel-size 16", "--pipeline-model-parallel-size 8")
    file.write_text(text)
    other = load(SCENARIOS["megatron"], f"megatron:{file}").plan
    assert other is not None and own.plan is not None
    # the layout's 16 stages are now two for each of 8 ranks, and data ranks twice as many
    assert (other.pipeline, other.chunks, other.data) == (8, 2, 2 * own.plan.data)


def test_a_file_of_another_model_is_refused(tmp_path: Path, capsys) -> None:
    file = tmp_path / "arguments.sh"
    assert run(["export", "gpt3-175b-1024-a100", "--to", "megatron", "--out", str(file)]) == 0
    file.write_text(file.read_text().replace("--seq-length 2048", "--seq-length 1024").replace("51200", "51264"))
    capsys.readouterr()
    assert run(["simulate", "gpt3-175b-1024-a100", "--plan", f"megatron:{file}"]) == 2
    error = capsys.readouterr().err
    assert "training.sequence: is 2048 in the scenario that the plan is of, met 1024" in error
    assert "model.vocab: is 51200 in the scenario that the plan is of, met 51264" in error


def test_a_rule_that_is_broken_is_shown_in_the_trainers_file(tmp_path: Path, capsys) -> None:
    file = tmp_path / "arguments.sh"
    assert run(["export", "gpt3-175b-1024-a100", "--to", "megatron", "--out", str(file)]) == 0
    file.write_text(file.read_text().replace("--micro-batch-size 1", "--micro-batch-size 5"))
    line = file.read_text().split("\n").index("    --micro-batch-size 5") + 1
    capsys.readouterr()
    assert run(["simulate", "gpt3-175b-1024-a100", "--plan", f"megatron:{file}"]) == 2
    assert f"arguments.sh:{line}:5: microbatch: microbatch(5) * data(16) = 80 divides" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["export", "gpt3-175b-1024-a100", "--to", "accelerate"],
            "accelerate 1.15.0 cannot say this: plan.zero: 3 with",
        ),
        (["export", "resnet-50-8-a100", "--to", "torchtitan"], "model: the model is a decoder transformer, met"),
        (["export", "tensor-parallel-2d", "--to", "megatron"], "plan.tensor_rows: 1 alone, its tensor parallelism has"),
        (
            ["simulate", "local/dp2", "--plan", "megatron:nowhere.sh"],
            "nowhere.sh: the file cannot be read: No such file",
        ),
    ],
)
def test_one_message(arguments: list[str], words: str, capsys) -> None:
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_every_trainer_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from meshwise.scenarios.commands.main import run\n"
        f"sys.exit(sum(run(['export', name, '--to', to]) for to, name in {SCENARIOS!r}.items()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["simulate", "explain", "execute", "export"])
def test_help_says_where_a_file_of_another_trainer_may_be_named(command: str, capsys) -> None:
    assert run([command, "--help"]) == 0
    assert "TARGET:FILE of another trainer" in " ".join(capsys.readouterr().out.split())
