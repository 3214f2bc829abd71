"""Runs of networks whose operators are cut: their layouts, and the ranks that train them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from meshwise.executor.launch.launcher import launch_ranks
from meshwise.executor.modules.layout import ModuleLayout, parse_layout
from meshwise.executor.user_training.job import TrainJob
from meshwise.scenarios.commands.train import choose_cuts_of_job

HERE = Path(__file__).parent
NETWORKS = HERE / "networks.py"


def find_layout(kind: str, words: str, monkeypatch: pytest.MonkeyPatch, file: Path = NETWORKS) -> ModuleLayout:
    """Return the layout of words, with the cuts that the command chooses."""
    monkeypatch.setenv("KIND", kind)
    return choose_cuts_of_job(TrainJob(str(file), parse_layout(words, ModuleLayout()), 3)).layout


def run_ranks(cases: list[dict[str, Any]], ranks: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return, by rank, what each found of every case."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.delenv("KIND", raising=False)
    folder.mkdir(exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    launch_ranks("cut_ranks", [str(folder)], folder, ranks, timeout=120)
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(ranks)]
