"""What a worker is told: one JSON document in the job folder.

The learning rate of every step is a linear warm-up, then constant, or a cosine down to a floor.

References
----------
Goyal et al. 2017, "Accurate, large minibatch SGD", section 2.2 (gradual warm-up).
Loshchilov and Hutter 2017, "SGDR: stochastic gradient descent with warm restarts", equation 5, without restarts.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwise.executor.device import CPU
from meshwise.simulator.brief import brief
from meshwise.simulator.models.experts import Experts
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Training

PEAKS = {"adamw": 1e-3, "sgd": 0.02}
"""The largest learning rate of an optimizer where none is given."""


@dataclass(frozen=True, slots=True)
class LearningRate:
    """A schedule over steps, which count from 0.

    Parameters
    ----------
    peak
        The largest learning rate; ``None`` for that of the optimizer in `PEAKS`.
    warmup_steps
        Steps of a linear rise, the first of which has ``peak / warmup_steps``.
    decay_steps
        The step from which on the learning rate is ``minimum``, after a cosine from the end of the warm-up; ``None``
        for no decay.
    minimum
        What the cosine ends at.
    """

    peak: float | None = None
    warmup_steps: int = 0
    decay_steps: int | None = None
    minimum: float = 0.0

    def __post_init__(self) -> None:
        if self.peak is not None and not 0 < self.peak < math.inf:
            raise ValueError(f"learning_rate is above 0 and finite, met {self.peak:g}")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps is at least 0, met {self.warmup_steps}")
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            held = f"decay_steps is above warmup_steps({self.warmup_steps})"
            raise ValueError(f"{held}, met {self.decay_steps}; nearest: {self.warmup_steps + 1}")
        if not 0 <= self.minimum < math.inf or self.minimum > (self.peak or math.inf):
            raise ValueError(f"min_learning_rate is from 0 to learning_rate, met {self.minimum:g}")
        if self.minimum and self.decay_steps is None:
            raise ValueError(f"min_learning_rate is what a decay ends at, met {self.minimum:g} without decay_steps")

    def at(self, step: int, optimizer: str) -> float:
        """Return the learning rate of a step.

        >>> [LearningRate(0.8, warmup_steps=4, decay_steps=6).at(step, "adamw") for step in (0, 3, 4, 5, 6, 7)]
        [0.2, 0.8, 0.8, 0.4, 0.0, 0.0]
        """
        peak = PEAKS[optimizer] if self.peak is None else self.peak
        if step < self.warmup_steps:
            return peak * ((step + 1) / self.warmup_steps)
        if self.decay_steps is None or step == self.warmup_steps:
            return peak
        if step >= self.decay_steps:
            return self.minimum
        turned = math.pi * (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        return min(peak, self.minimum + (peak - self.minimum) * (1 + math.cos(turned)) / 2)


CONSTANT = LearningRate()
"""The usual learning rate of the optimizer, at every step."""


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
    device
        A name of `meshwise.executor.device.DEVICES`.
    data
        A text file or a folder of them; ``None`` for the documentation topics that ship with Python.
    checkpoint_every
        Steps from one checkpoint to the next, and one after the last; 0 for none. They go into ``checkpoints``
        beside the job, and the newest ``keep`` stay.
    resume
        The checkpoint from which the job goes on, which was made after ``first_step`` steps.
    """

    spec: Transformer
    training: Training
    plan: Plan
    steps: int
    seed: int = 0
    dump: bool = False
    profile: bool = True
    timeout: float = 600.0
    data: str | None = None
    learning_rate: LearningRate = CONSTANT
    checkpoint_every: int = 0
    keep: int = 2
    resume: str | None = None
    first_step: int = 0
    device: str = CPU

    __repr__ = brief()

    def write(self, folder: Path) -> Path:
        """Write the job into ``folder`` and return the file; results go beside it."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "job.json"
        path.write_text(self.text())
        return path

    def text(self) -> str:
        """Return the job as JSON, in ASCII."""
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
            "data": self.data,
            "learning_rate": asdict(self.learning_rate),
            "checkpoint_every": self.checkpoint_every,
            "keep": self.keep,
            "resume": self.resume,
            "first_step": self.first_step,
            "device": self.device,
        }
        return json.dumps(document, indent=1)

    @classmethod
    def read(cls, path: Path) -> "Job":
        """Return the job in a file; ``ValueError`` where it is none."""
        return cls.of(json.loads(path.read_text()), str(path))

    @classmethod
    def of(cls, given: Mapping[str, Any], path: str) -> "Job":
        """Return what `text` says, read from ``path``; ``ValueError`` where it is no job."""
        document = dict(given)
        if document.pop("version", None) != JOB_VERSION:
            raise ValueError(f"{path}: a job of this program has version {JOB_VERSION}")
        try:
            return cls(
                spec=_spec(**document.pop("spec")),
                training=Training(**document.pop("training")),
                plan=Plan.from_json(document.pop("plan")),
                learning_rate=LearningRate(**document.pop("learning_rate")),
                **document,
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}: a job states spec, training, plan and steps; met {error}") from error


def _spec(*, experts: dict[str, Any] | None, **sizes: Any) -> Transformer:
    return Transformer(experts=Experts(**experts) if experts else None, **sizes)


def checkpoints_folder(folder: Path) -> Path:
    """Return where the job in ``folder`` keeps its checkpoints."""
    return folder / "checkpoints"


def metrics_file(folder: Path, rank: int) -> Path:
    """Return where ``rank`` writes one JSON line a step: step, loss (null off the last stage), seconds."""
    return folder / f"rank-{rank}.jsonl"


def result_file(folder: Path, rank: int) -> Path:
    """Return where ``rank`` writes its spans and peak memory as JSON."""
    return folder / f"rank-{rank}.json"


def tensors_file(folder: Path, rank: int) -> Path:
    """Return where ``rank`` writes gradients and parameters by name."""
    return folder / f"rank-{rank}.npz"
