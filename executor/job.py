"""What a worker is told: one JSON document in the job folder."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from simulator.models.experts import Experts
from simulator.models.transformer import Transformer
from strategies.plan import Plan
from strategies.training import Training

JOB_VERSION = 1


@dataclass(frozen=True, slots=True)
class Job:
    """One training run.

    Parameters
    ----------
    dump
        Whether gradients of the last step and final parameters are written for comparison.
    profile
        Whether one more step runs under the profiler after the timed ones.
    timeout
        Seconds that a rank waits for another before it gives up.
    """

    spec: Transformer
    training: Training
    plan: Plan
    steps: int
    seed: int = 0
    dump: bool = False
    profile: bool = True
    timeout: float = 600.0

    def write(self, folder: Path) -> Path:
        """Write the job into ``folder`` and return the file; results go beside it."""
        folder.mkdir(parents=True, exist_ok=True)
        document = {
            "version": JOB_VERSION,
            "spec": asdict(self.spec),
            "training": asdict(self.training),
            "plan": self.plan.to_json(),
            "steps": self.steps,
            "seed": self.seed,
            "dump": self.dump,
            "profile": self.profile,
            "timeout": self.timeout,
        }
        path = folder / "job.json"
        path.write_text(json.dumps(document, indent=1))
        return path

    @classmethod
    def read(cls, path: Path) -> "Job":
        """Return the job in a file; ``ValueError`` where it is none."""
        document: dict[str, Any] = json.loads(path.read_text())
        if document.pop("version", None) != JOB_VERSION:
            raise ValueError(f"{path}: a job of this program has version {JOB_VERSION}")
        try:
            return cls(
                spec=_spec(**document.pop("spec")),
                training=Training(**document.pop("training")),
                plan=Plan.from_json(document.pop("plan")),
                **document,
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}: a job states spec, training, plan and steps; met {error}") from error


def _spec(*, experts: dict[str, Any] | None, **sizes: Any) -> Transformer:
    return Transformer(experts=Experts(**experts) if experts else None, **sizes)


def metrics_file(folder: Path, rank: int) -> Path:
    """Return where ``rank`` writes one JSON line a step: step, loss (null off the last stage), seconds."""
    return folder / f"rank-{rank}.jsonl"


def result_file(folder: Path, rank: int) -> Path:
    """Return where ``rank`` writes its spans and peak memory as JSON."""
    return folder / f"rank-{rank}.json"


def tensors_file(folder: Path, rank: int) -> Path:
    """Return where ``rank`` writes gradients and parameters by name."""
    return folder / f"rank-{rank}.npz"
