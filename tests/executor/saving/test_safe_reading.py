"""Folders of states are read as torch reads them, and run nothing."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from meshwise.executor.saving.safe_reading import list_shapes, load_keys
from meshwise.executor.saving.writing import METADATA

STATES: dict[str, Any] = {"a": torch.arange(3.0), "b": torch.ones(2, 2, dtype=torch.bfloat16), "options": {"lr": 0.1}}


class Intruder:
    """Runs a command where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save(STATES, checkpoint_id=tmp_path / "states", no_dist=True)
    return tmp_path / "states"


def test_states_are_those_that_torch_wrote(folder: Path) -> None:
    assert list_shapes(folder) == {"a": (3,), "b": (2, 2), "options.lr": None}
    states = {"a": torch.zeros(3), "b": torch.zeros(2, 2, dtype=torch.bfloat16), "options": {"lr": 0.0}}
    load_keys(folder, states, is_alone=True)
    assert torch.equal(states["a"], STATES["a"]) and torch.equal(states["b"], STATES["b"])
    assert states["options"] == {"lr": 0.1}


def test_a_description_that_would_run_something_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / METADATA).write_bytes(pickle.dumps(Intruder(tmp_path / "touched")))
    with pytest.raises(pickle.UnpicklingError, match=r"posix\.system"):
        list_shapes(folder)
    assert not (tmp_path / "touched").exists()


def test_a_state_that_would_run_something_is_refused(tmp_path: Path) -> None:
    dcp.save({"state": Intruder(tmp_path / "touched")}, checkpoint_id=tmp_path / "states", no_dist=True)
    with pytest.raises(CheckpointException, match="Weights only load failed"):
        load_keys(tmp_path / "states", {"state": None}, is_alone=True)
    assert not (tmp_path / "touched").exists()
