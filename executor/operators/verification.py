"""The first step of every run in fp64, on the ranks, beside the module itself on the whole batch in one process."""

from pathlib import Path
from typing import Any

import numpy as np

from executor.launcher import clear
from executor.operators.job import OperatorJob
from executor.run import losses
from executor.verification import Verification, distance

_EXPECTED, _DONE = "expected.npz", "done"
_LOSSES, _TOLERANCE = "losses", "tolerance"


def expect(folder: Path, expected_losses: tuple[float, ...], arrays: dict[str, Any], tolerance: float) -> None:
    """Write what one process computes into the folder of a verification, of which nothing older stays."""
    folder.mkdir(parents=True, exist_ok=True)
    clear(folder)
    (folder / _DONE).unlink(missing_ok=True)
    stored: dict[str, Any] = {_LOSSES: np.array(expected_losses), _TOLERANCE: np.array(tolerance)} | arrays
    np.savez(folder / _EXPECTED, **stored)


def verdict(job: OperatorJob, folder: Path) -> Verification:
    """Return how far what the ranks of a dumped job left is from what was expected; ``is_done`` says so then."""
    with np.load(folder / _EXPECTED, allow_pickle=False) as stored:
        expected = {name: stored[name] for name in stored.files}
    wanted, tolerance = expected.pop(_LOSSES), expected.pop(_TOLERANCE)
    met = losses(job.plan, job.steps, folder)
    found = distance(job.plan.mesh.num_ranks, folder, met, tuple(wanted.tolist()), expected, float(tolerance))
    (folder / _DONE).touch()
    return found


def is_done(folder: Path) -> bool:
    """Return whether all ranks came to the end of a verification."""
    return (folder / _DONE).exists()
