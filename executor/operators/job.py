"""The job of the workers of a captured module, one JSON document in the job folder, and the files of its verification.

The first step of every run is verified: it runs in fp64 on the ranks, and the module itself runs on the whole batch in
one process.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwise.executor.check.verification import Verification, distance
from meshwise.executor.device import CPU
from meshwise.executor.launch.launcher import clear_folder
from meshwise.executor.launch.run import read_losses
from meshwise.executor.options import TIMEOUT
from meshwise.simulator.brief import brief_repr
from meshwise.strategies.plan.plan import Plan

JOB_VERSION = 1


@dataclass(frozen=True, slots=True)
class OperatorJob:
    """One training run of a user's module.

    Parameters
    ----------
    module
        ``FILE.py:FACTORY``.
    optimizer
        A name of `meshwise.executor.training.optimizer.OPTIMIZERS`.
    double
        Whether parameters and inputs are cast to fp64, for the comparison with one process.
    dump
        Whether gradients of the last step, final parameters and collectives are written.
    profile
        Whether one more step runs under the profiler after the timed ones.
    timeout
        Seconds that a rank waits for another before it gives up.
    device
        A name of `meshwise.executor.device.DEVICES`.
    """

    module: str
    plan: Plan
    steps: int
    optimizer: str = "adamw"
    seed: int = 0
    double: bool = False
    dump: bool = False
    profile: bool = True
    timeout: float = TIMEOUT
    device: str = CPU

    __repr__ = brief_repr()

    def write(self, folder: Path) -> Path:
        """Write the job into ``folder`` and return the path of its file; results go beside it."""
        folder.mkdir(parents=True, exist_ok=True)
        document = {name: getattr(self, name) for name in self.__dataclass_fields__} | {"plan": self.plan.to_json()}
        path = folder / "job.json"
        path.write_text(json.dumps({"version": JOB_VERSION} | document, indent=1))
        return path

    @classmethod
    def read(cls, path: Path) -> "OperatorJob":
        """Return the job in a file; ``ValueError`` where the file is not a job."""
        document: dict[str, Any] = json.loads(path.read_text())
        if document.pop("version", None) != JOB_VERSION:
            raise ValueError(f"{path}: a job of this program has version {JOB_VERSION}")
        try:
            return cls(**document | {"plan": Plan.from_json(document["plan"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}: a job states module, plan and steps; met {error}") from error


def collectives_file(folder: Path, rank: int) -> Path:
    """Return the path of the JSON file with the collectives of ``rank`` in its last step."""
    return folder / f"rank-{rank}.collectives.json"


_EXPECTED, _DONE = "expected.npz", "done"
_LOSSES, _TOLERANCE = "losses", "tolerance"


def expect(folder: Path, expected_losses: tuple[float, ...], arrays: dict[str, Any], tolerance: float) -> None:
    """Write the results of one process into the folder of a verification, and remove those of earlier runs."""
    folder.mkdir(parents=True, exist_ok=True)
    clear_folder(folder)
    (folder / _DONE).unlink(missing_ok=True)
    stored: dict[str, Any] = {_LOSSES: np.array(expected_losses), _TOLERANCE: np.array(tolerance)} | arrays
    np.savez(folder / _EXPECTED, **stored)


def verdict(job: OperatorJob, folder: Path) -> Verification:
    """Return how far the results of a dumped job are from those expected, and mark the verification as done."""
    with np.load(folder / _EXPECTED, allow_pickle=False) as stored:
        expected = {name: stored[name] for name in stored.files}
    expected_losses, tolerance = expected.pop(_LOSSES), expected.pop(_TOLERANCE)
    rank_losses = read_losses(job.plan, job.steps, folder)
    verification = distance(
        job.plan.mesh.num_ranks, folder, rank_losses, tuple(expected_losses.tolist()), expected, float(tolerance)
    )
    (folder / _DONE).touch()
    return verification


def is_done(folder: Path) -> bool:
    """Return whether a verification is done: all ranks reached its end, and their results were compared."""
    return (folder / _DONE).exists()
