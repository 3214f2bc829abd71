"""The job of a worker: one JSON document in the job folder, and the files of results beside it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwise.executor.device import CPU
from meshwise.executor.options import CONSTANT_RATE, KEPT_CHECKPOINTS, TIMEOUT, LearningRate
from meshwise.simulator.brief import brief_repr
from meshwise.simulator.machine.accelerator import RMS_NORM
from meshwise.simulator.models.experts import Experts
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Training

JOB_VERSION = 1


@dataclass(frozen=True, slots=True)
class Job:
    """One training run; fields that are not stated here are those of `meshwise.executor.options.RunOptions`.

    Parameters
    ----------
    dump
        Whether gradients of the last step and final parameters are written, to be compared.
    profile
        Whether one more step runs under the profiler after the timed ones.
    timeout
        Seconds that a rank waits for another before it gives up.
    checkpoint_every
        Steps between checkpoints, with one more after the last step; 0 for none. Checkpoints go into the folder
        ``checkpoints`` beside the job, and the newest ``keep`` stay.
    resume
        The checkpoint from which the job continues, made after ``first_step`` steps.
    """

    spec: Transformer
    training: Training
    plan: Plan
    steps: int
    seed: int = 0
    dump: bool = False
    profile: bool = True
    timeout: float = TIMEOUT
    data: str | None = None
    learning_rate: LearningRate = CONSTANT_RATE
    checkpoint_every: int = 0
    keep: int = KEPT_CHECKPOINTS
    resume: str | None = None
    first_step: int = 0
    device: str = CPU

    __repr__ = brief_repr()

    def write(self, folder: Path) -> Path:
        """Write the job into ``folder`` and return the file; results go beside it."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "job.json"
        path.write_text(self.to_text())
        return path

    def to_text(self) -> str:
        """Return the job as JSON, in ASCII."""
        document = {"version": JOB_VERSION, **asdict(self), "plan": self.plan.to_json()}
        return json.dumps(document, indent=1)

    @classmethod
    def read(cls, path: Path) -> "Job":
        """Return the job in a file; ``ValueError`` where the file has none."""
        return cls.from_document(json.loads(path.read_text()), str(path))

    @classmethod
    def from_document(cls, job_document: Mapping[str, Any], path: str) -> "Job":
        """Return the job of a document as `to_text` writes it; ``ValueError`` with ``path`` where it is no job."""
        document = dict(job_document)
        if document.pop("version", None) != JOB_VERSION:
            raise ValueError(f"{path}: a job of this program has version {JOB_VERSION}")
        try:
            return cls(
                spec=_build_spec(**document.pop("spec")),
                training=_build_training(**document.pop("training")),
                plan=Plan.from_json(document.pop("plan")),
                learning_rate=LearningRate(**document.pop("learning_rate")),
                **document,
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}: a job states spec, training, plan and steps; met {error}") from error


def _build_spec(*, experts: dict[str, Any] | None, **sizes: Any) -> Transformer:
    return Transformer(experts=Experts(**experts) if experts else None, **sizes)


def _build_training(*, composed: Sequence[str] = (), composes_norms: bool = False, **fields: Any) -> Training:
    # Earlier jobs say of norms alone whether they are composed.
    return Training(composed=tuple(composed) or (RMS_NORM,) * composes_norms, **fields)


def checkpoints_folder(folder: Path) -> Path:
    """Return the folder of the checkpoints of the job in ``folder``."""
    return folder / "checkpoints"


def metrics_file(folder: Path, rank: int) -> Path:
    """Return the file in which ``rank`` writes a JSON line a step: step, loss (null off the last stage), seconds."""
    return folder / f"rank-{rank}.jsonl"


def result_file(folder: Path, rank: int) -> Path:
    """Return the file in which ``rank`` writes its spans and peak memory as JSON."""
    return folder / f"rank-{rank}.json"


def tensors_file(folder: Path, rank: int) -> Path:
    """Return the file in which ``rank`` writes gradients and parameters by name."""
    return folder / f"rank-{rank}.npz"
