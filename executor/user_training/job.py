"""The job of the ranks that train a user's file, one JSON document in the folder of the run, and its other files."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from meshwise.executor.device import CPU
from meshwise.executor.modules.layout import ModuleLayout
from meshwise.executor.options import TIMEOUT
from meshwise.simulator.brief import brief_repr

JOB_VERSION = 1
CHECKPOINTS, WEIGHTS, TOKENS = "checkpoints", "weights", "tokens"
"""Folders of a run: its checkpoints, the whole weights at its end, and the tokens of its texts."""


@dataclass(frozen=True, slots=True)
class TrainJob:
    """A run of a user's file.

    Parameters
    ----------
    file
        The absolute path of the file; that of a folder for a model of transformers.
    steps
        Steps in all; a run that goes on from a checkpoint makes those that are left.
    batch
        Samples of a step on all ranks; ``None`` for what the file says.
    learning_rate
        That of AdamW, where the file has no ``optimizer``.
    max_norm
        The norm to which gradients are clipped; ``None`` for no clipping.
    checkpoint_every
        Steps between checkpoints; 0 for one at the end only.
    evaluate_every
        Steps between evaluations; 0 for one at the end only, -1 for none.
    resume
        Whether the run goes on from the newest checkpoint of its folder.
    source
        The absolute path of a checkpoint of a script of torch that the run begins with.
    weights
        The form in which the weights are exported at the end, ``safetensors`` or ``dcp``.
    is_trial
        Whether the run is compared with another and then forgotten.
    without_dropout
        Whether dropout modules drop nothing, so that runs under two plans can be compared.
    tokens, evaluation_tokens
        The absolute paths of files that tell where the tokens lie that a model of transformers is trained and
        evaluated on.
    sequence
        Tokens of a sample of them.
    timeout
        Seconds that a rank waits for another before it gives up.
    """

    file: str
    layout: ModuleLayout
    steps: int
    batch: int | None = None
    precision: str = "fp32"
    learning_rate: float = 1e-3
    max_norm: float | None = None
    seed: int = 0
    checkpoint_every: int = 0
    evaluate_every: int = 0
    resume: bool = False
    source: str | None = None
    weights: str = "safetensors"
    is_trial: bool = False
    without_dropout: bool = False
    tokens: str | None = None
    evaluation_tokens: str | None = None
    sequence: int = 0
    device: str = CPU
    timeout: float = TIMEOUT

    __repr__ = brief_repr()

    def write(self, folder: Path) -> Path:
        """Write the job into a folder and return its file."""
        folder.mkdir(parents=True, exist_ok=True)
        document = {field.name: getattr(self, field.name) for field in fields(self)} | {"layout": self.layout.to_json()}
        path = folder / "job.json"
        path.write_text(json.dumps({"version": JOB_VERSION} | document, indent=1))
        return path

    @classmethod
    def read(cls, path: Path) -> "TrainJob":
        """Return the job in a file; ``ValueError`` where the file is not a job."""
        document: dict[str, Any] = json.loads(path.read_text())
        if document.pop("version", None) != JOB_VERSION:
            raise ValueError(f"{path}: a job of this program has version {JOB_VERSION}")
        try:
            return cls(**document | {"layout": ModuleLayout.from_json(document["layout"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}: a job states file, layout and steps; met {error}") from error


def metrics_file(folder: Path, rank: int) -> Path:
    """Return the path of the JSON lines of a rank: step, loss, seconds and samples of every step."""
    return folder / f"rank-{rank}.metrics"


def facts_file(folder: Path, rank: int) -> Path:
    """Return the path of the JSON document of a rank with what it used: bytes, parameters and blocks."""
    return folder / f"rank-{rank}.facts"


def stop_file(folder: Path) -> Path:
    """Return the path of the file whose presence asks the ranks to end after the step that runs."""
    return folder / "rank-stop"
