"""An environment of its own for each trainer, and the facts that the trainer's own code reads out of exported files.

Packages come from the registry that pip is configured with; torch is that of the running environment, through a
``.pth`` file. Environments stay in ``build/trainers``. What Megatron-LM and nanotron have in no package is taken from a
clone that the environment variable of `SOURCES` names, at the commit written for; it is no part of this repository.
"""

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from meshwise.scenarios.interchange.facts import TrainerRequest
from meshwise.scenarios.interchange.targets import TARGETS

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PACKAGES = {
    "torchtitan": ("torchtitan==0.3.0", "triton"),
    "deepspeed": ("deepspeed==0.19.8",),
    "accelerate": ("accelerate==1.15.0", "deepspeed==0.19.8", "transformers"),
    "megatron": ("megatron-core==0.16.1",),
    "nanotron": ("dacite", "datasets", "safetensors", "tqdm", "transformers"),
}
SOURCES = {
    "megatron": ("MESHWISE_MEGATRON_SOURCE", "core_v0.16.1", ("megatron",), "."),
    "nanotron": ("MESHWISE_NANOTRON_SOURCE", "2411b022a75fb7f7561a1bb4166706da5e1b76de", ("src",), "src"),
}
"""By trainer: the variable with a clone's path, the commit, the folders that are taken, and where its packages lie."""
FILES = {"torchtitan": "py", "megatron": "sh", "deepspeed": "json", "accelerate": "yaml", "nanotron": "yaml"}


@cache
def find_interpreter(trainer: str) -> Path:
    """Return the Python of a trainer's environment, which is made where it is missing; skip where it cannot be."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        pytest.skip("torch is not installed")
    folder = ROOT / "build" / "trainers" / trainer
    python, mark = folder / "bin" / "python", folder / "packages.txt"
    wanted = "\n".join(PACKAGES[trainer])
    if mark.exists() and mark.read_text() == wanted:
        return python
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "shared.pth").write_text(f"{Path(torch.origin).parents[1]}\n")
    command = [str(python), "-m", "pip", "install", "-q", *PACKAGES[trainer]]
    done = subprocess.run(command, env=os.environ | {"DS_BUILD_OPS": "0"}, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{', '.join(PACKAGES[trainer])}: {(done.stderr.strip().splitlines() or ['no answer'])[-1]}")
    mark.write_text(wanted)
    return python


@cache
def find_source(trainer: str) -> Path:
    """Return the folder of a trainer's packages at the commit written for; skip where no clone is named."""
    variable, commit, folders, place = SOURCES[trainer]
    if variable not in os.environ:
        pytest.skip(f"{variable} names no clone of {trainer}")
    target = ROOT / "build" / "trainers" / f"{trainer}-{commit}"
    if not target.exists():
        archive = subprocess.run(
            ["git", "-C", os.environ[variable], "archive", commit, *folders], check=True, capture_output=True
        )
        target.mkdir(parents=True)
        subprocess.run(["tar", "x", "-C", str(target)], input=archive.stdout, check=True)
    return target / place


def read_with_trainer(
    trainer: str, cases: dict[str, tuple[TrainerRequest, int]], folder: Path
) -> dict[str, dict[str, Any]]:
    """Return by case the facts that a trainer's own code reads out of the exported file, and the steps that it took."""
    python, rows = find_interpreter(trainer), []
    sources = [str(find_source(trainer))] if trainer in SOURCES else []
    for name, (request, steps) in cases.items():
        file = folder / name / f"{name}.{FILES[trainer]}"
        file.parent.mkdir()
        named = TrainerRequest(request.name, request.spec, request.problem, request.plan, str(file))
        file.write_text(TARGETS[trainer].to_text(named))
        rows.append({"file": str(file), "ranks": request.plan.mesh.num_ranks, "steps": steps})
    (folder / "cases.json").write_text(json.dumps(rows))
    command = [str(python), str(HERE / f"read_{trainer}.py"), str(folder / "cases.json"), *sources]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    facts = [json.loads(line.removeprefix("FACTS")) for line in done.stdout.splitlines() if line.startswith("FACTS")]
    assert done.returncode == 0, f"after {len(facts)} of {len(cases)} cases: {done.stdout[-2000:]}{done.stderr[-6000:]}"
    return dict(zip(cases, facts, strict=True))
