"""What the workers of a captured module are told: one JSON document in the job folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor.device import CPU
from simulator.brief import brief
from strategies.plan import Plan

JOB_VERSION = 1


@dataclass(frozen=True, slots=True)
class OperatorJob:
    """One training run of a user's module.

    Parameters
    ----------
    module
        ``FILE.py:FACTORY``.
    optimizer
        A name of `executor.optimizer.OPTIMIZERS`.
    double
        Whether parameters and inputs are turned to fp64, to compare with one process.
    dump
        Whether gradients of the last step, final parameters and collectives are written.
    profile
        Whether one more step runs under the profiler after the timed ones.
    timeout
        Seconds that a rank waits for another before it gives up.
    device
        A name of `executor.device.DEVICES`.
    """

    module: str
    plan: Plan
    steps: int
    optimizer: str = "adamw"
    seed: int = 0
    double: bool = False
    dump: bool = False
    profile: bool = True
    timeout: float = 600.0
    device: str = CPU

    __repr__ = brief()

    def write(self, folder: Path) -> Path:
        """Write the job into ``folder`` and return the file; results go beside it."""
        folder.mkdir(parents=True, exist_ok=True)
        document = {name: getattr(self, name) for name in self.__dataclass_fields__} | {"plan": self.plan.to_json()}
        path = folder / "job.json"
        path.write_text(json.dumps({"version": JOB_VERSION} | document, indent=1))
        return path

    @classmethod
    def read(cls, path: Path) -> "OperatorJob":
        """Return the job in a file; ``ValueError`` where it is none."""
        document: dict[str, Any] = json.loads(path.read_text())
        if document.pop("version", None) != JOB_VERSION:
            raise ValueError(f"{path}: a job of this program has version {JOB_VERSION}")
        try:
            return cls(**document | {"plan": Plan.from_json(document["plan"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}: a job states module, plan and steps; met {error}") from error


def collectives_file(folder: Path, rank: int) -> Path:
    """Return where ``rank`` writes the collectives of its last step as JSON."""
    return folder / f"rank-{rank}.collectives.json"
