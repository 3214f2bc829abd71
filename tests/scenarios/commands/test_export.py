"""``meshwise export``: from a scenario or a plan file to another system's file, or one message."""

import json
import re
from pathlib import Path

import pytest
import yaml

from meshwise import load
from meshwise.scenarios.commands.main import run
from meshwise.scenarios.launches import list_launches
from meshwise.simulator.units import format_size
from meshwise.strategies.explanation.uncertainty import format_risk
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout


def test_script_has_the_nodes_of_the_scenario(tmp_path: Path, capsys) -> None:
    out = tmp_path / "job.sbatch"
    assert run(["export", "local/dp2-tp2-pp2", "--to", "slurm", "--out", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    cluster = load("local/dp2-tp2-pp2").problem.cluster
    assert (document["nodes"], document["processes"]) == (cluster.num_nodes, cluster.first_node.devices) == (1, 8)
    assert document["device"] == "cpu" and out.read_text() == document["text"]
    assert re.search(r"^#SBATCH --nodes=1$", document["text"], re.MULTILINE)


def test_scenario_of_gpus_asks_for_gpus(tmp_path: Path, capsys) -> None:
    text = (Path(__file__).parents[3] / "scenarios" / "local" / "dp2-tp2.yaml").read_text()
    cluster = "preset: dgx-a100-80gb\n  nodes: 1\n  devices_per_node: 4"
    text = re.sub(r"preset: local-cpu.*\n  nodes: 1\n  devices_per_node: 4", cluster, text)
    (tmp_path / "gpus.yaml").write_text(text)
    assert run(["export", str(tmp_path / "gpus.yaml"), "--to", "slurm", "--processes", "2"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --gpus-per-node=2\n" in script and '"device": "cuda"' in script


def test_plan_file_needs_its_scenario(tmp_path: Path, capsys) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(load("local/dp2-tp2").choose_plan().to_json()))
    options = ["--to", "kubernetes", "--image", "registry/meshwise:1", "--claim", "runs", "--processes", "1"]
    assert run(["export", str(plan), *options]) == 2
    assert "a plan says nothing of model and training; name what it is of: --scenario" in capsys.readouterr().err
    assert run(["export", str(plan), "--scenario", "local/tp2", *options]) == 2  # of a machine with 2 devices
    capsys.readouterr()
    assert run(["export", str(plan), "--scenario", "local/dp2-tp2", *options]) == 0
    *_, job = yaml.safe_load_all(capsys.readouterr().out)
    assert job["spec"]["completions"] == 4


@pytest.mark.parametrize(
    ("name", "trainer"),
    [
        ("pipeline-zbv", "torchtitan"),
        ("llama3-405b-16384-1f1b", "megatron"),
        ("zero-1-optimizer", "deepspeed"),
        ("data-parallel-buckets", "accelerate"),
    ],
)
def test_a_file_that_is_written_is_told_with_the_memory_it_needs(
    name: str, trainer: str, tmp_path: Path, capsys
) -> None:
    file = tmp_path / "file"
    assert run(["export", name, "--to", trainer, "--out", str(file)]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{file} is written: ") and printed.out.count("\n") == 1
    scenario = load(name)
    launch = next(each for each in list_launches(scenario, scenario.choose_plan()) if each.trainer == trainer)
    if launch.peak_memory is None or launch.out_of_memory is None:
        assert printed.err == f"{launch.describe()}\n"
        return
    start = (
        f"the plan {'fits' if launch.fits else 'does not fit'} in {trainer}: {format_size(launch.peak_memory)} by its"
    )
    assert printed.err == f"{start} conventions, {format_risk(launch.out_of_memory)}\n"


def test_conventions_that_the_scenario_names_judge_its_plan(tmp_path: Path, capsys) -> None:
    scenario = load("llama3-8b-8-h100")
    named, plan, file = tmp_path / "named.yaml", tmp_path / "plan.json", tmp_path / "file"
    named.write_text(
        re.sub(r"(?m)^training:\n", "training:\n  framework: megatron\n", Path(scenario.file).read_text(), count=1)
    )
    # Megatron-LM keeps no parameters after forward but by torch's FSDP2, torchtitan does: 83.8 GiB of 80
    layout = Layout(data=8, zero=3, reshard_after_forward=False)
    plan.write_text(json.dumps(complete(scenario.problem, layout).to_json()))
    for of, words in (
        (named, "by the conventions of megatron, "),
        (Path(scenario.file), "does not fit in torchtitan: "),
    ):
        assert run(["export", str(plan), "--scenario", str(of), "--to", "torchtitan", "--out", str(file)]) == 0
        error = capsys.readouterr().err
        assert words in error and "out of memory with probability " in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["local/dp2", "--to", "pbs"],
            "--to is one of torchtitan, megatron, deepspeed, accelerate, nanotron, slurm, kubernetes, met 'pbs'",
        ),
        (["local/dp2", "--to", "slurm", "--processes", "3"], "met 3 processes of 2 ranks; nearest: 2"),
        (["local/dp2", "--to", "kubernetes"], "image: the name of a container image"),
        (["local/dp2", "--to", "slurm", "--out", "/nowhere/x"], "there is no folder /nowhere"),
        (["operators/mlp", "--to", "slurm"], "model.graph: a graph has no code to run"),
        (["nothing", "--to", "slurm"], "there is no such file"),
    ],
)
def test_one_message(arguments: list[str], words: str, capsys) -> None:
    assert run(["export", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
