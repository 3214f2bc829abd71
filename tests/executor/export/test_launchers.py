"""A batch script says what the request says, whatever names hold, and runs the plan."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_requests import HOSTILE, request

from meshwise.executor.export.launchers import LaunchRequest, UnsupportedRequest, to_slurm
from meshwise.executor.launch.several_hosts import read_run

ROOT = Path(__file__).parents[3]


def _options(script: str) -> dict[str, str]:
    """Return the options as sbatch reads them: lines before the first command."""
    head = script.partition("set -euo pipefail")[0]
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", head, re.MULTILINE))


def _torchrun(script: str) -> list[str]:
    """Return the words of torchrun as two shells read them."""
    [line] = [line for line in script.splitlines() if line.startswith("srun ")]
    words = shlex.split(line)
    return shlex.split(words[words.index("-c") + 1])[1:]


def _syntax(script: str, tmp_path: Path) -> None:
    (tmp_path / "script").write_text(script)
    subprocess.run(["bash", "-n", str(tmp_path / "script")], check=True)


@pytest.mark.parametrize(("ranks", "processes", "gpus"), [(4, 2, False), (8, 8, True), (6, 1, True)])
def test_numbers(ranks: int, processes: int, gpus: bool, tmp_path: Path) -> None:
    script = to_slurm(request(ranks, processes, device="cuda" if gpus else "cpu"))
    _syntax(script, tmp_path)
    options, words = _options(script), _torchrun(script)
    assert int(options["nodes"]) == ranks // processes
    assert options["ntasks-per-node"] == "1" and int(options["cpus-per-task"]) == processes
    assert options.get("gpus-per-node") == (str(processes) if gpus else None)
    said = dict(zip(words[1:-3:2], words[2:-3:2], strict=True))
    assert words[0] == "torchrun" and words[-3:] == ["-m", "meshwise.executor.launch.worker", "$2/job.json"]
    assert said == {
        "--nnodes": options["nodes"],
        "--node-rank": "$SLURM_NODEID",
        "--nproc-per-node": str(processes),
        "--master-addr": "$1",
        "--master-port": "29518",
    }
    assert ("export NCCL_DEBUG=WARN" in script) is gpus


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_words(name: str, tmp_path: Path) -> None:
    script = to_slurm(request(name=name))
    _syntax(script, tmp_path)
    plain = to_slurm(request())
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]{0,63}", _options(script)["job-name"])
    same = [{key: value for key, value in _options(each).items() if "name" not in key} for each in (script, plain)]
    assert same[0] | {"output": ""} == same[1] | {"output": ""}
    assert script.splitlines()[8:] == plain.splitlines()[8:]  # no name reaches a command


@pytest.mark.parametrize("folder", ["a b", "it's", "$(touch pwned)", '"; touch pwned; "', "-p", "`touch pwned`"])
def test_hostile_folders_are_folders(folder: str, tmp_path: Path) -> None:
    script = to_slurm(request(folder=folder))
    command = script.partition("export OMP")[0] + 'printf %s "$run"\n'
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == str(tmp_path / folder)
    assert json.loads((tmp_path / folder / "job.json").read_text()) == json.loads(request().job.to_text())
    assert [path.name for path in tmp_path.iterdir()] == [folder]


def test_script_runs_the_plan(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    # two tasks of one machine stand for two nodes; scontrol and srun are what a script needs of Slurm
    asked = request(2, 1)
    fakes = tmp_path / "bin"
    fakes.mkdir()
    (fakes / "scontrol").write_text(
        "#!/bin/sh\n[ \"$*\" = 'show hostnames n[0-1]' ] && printf '127.0.0.1\\nother\\n'\n"
    )
    (fakes / "srun").write_text(
        '#!/bin/sh\nshift\n(SLURM_NODEID=0 "$@") & first=$!\n(SLURM_NODEID=1 "$@") & second=$!\n'
        "wait $first && wait $second\n"
    )
    for fake in fakes.iterdir():
        fake.chmod(0o755)
    search = os.pathsep.join([str(fakes), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": search, "SLURM_JOB_NODELIST": "n[0-1]", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", to_slurm(asked)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    job, run = read_run(tmp_path / "run")
    assert job == asked.job
    assert len(run.losses) == 2 and run.losses[1] < run.losses[0]


def refusals(wrong: LaunchRequest) -> str:
    with pytest.raises(UnsupportedRequest) as caught:
        to_slurm(wrong)
    return str(caught.value)


def test_what_it_cannot_say() -> None:
    good = request()
    plan, training = good.job.plan, good.job.training
    assert "met 3 processes of 4 ranks; nearest: 2" in refusals(replace(good, processes=3))
    assert "folder: " in refusals(replace(good, folder="a\nb"))
    permuted = replace(good, job=replace(good.job, plan=replace(plan, placement=(3, 2, 1, 0))))
    assert refusals(permuted).count("placement: torchrun gives ranks to hosts in order, met 4 devices by name") == 1
    frozen = replace(good, processes=5, job=replace(good.job, training=replace(training, frozen=True)))
    assert "frozen: " in refusals(frozen) and "met 5 processes" in refusals(frozen)  # all reasons at once
