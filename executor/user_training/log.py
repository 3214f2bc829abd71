"""The steps of a run as its ranks write them, read while they run, and the log of the whole run.

The log has a JSON line a step, and goes on where a run goes on. TensorBoard reads a copy of its figures where asked.
"""

import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meshwise.executor.launch.run import metrics_log, read_lines_before
from meshwise.executor.user_training.job import metrics_file

TENSORBOARD = "tensorboard"
"""The folder of a run for TensorBoard."""


class StepRow(NamedTuple):
    """A step of all ranks.

    Parameters
    ----------
    seconds
        Those of the slowest rank, with the time to read the batch.
    samples, tokens
        Of all ranks; tokens are ``None`` where batches are not of token numbers.
    evaluation
        Figures of an evaluation after the step; empty where there was none.
    """

    step: int
    loss: float
    seconds: float
    samples: int
    tokens: int | None
    learning_rate: float
    evaluation: dict[str, float]

    @property
    def samples_per_second(self) -> float:
        """Samples of all ranks in a second."""
        return self.samples / self.seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of all ranks in a second."""
        return None if self.tokens is None else self.tokens / self.seconds

    def to_json(self) -> dict[str, Any]:
        """Return the step as a line of the log has it."""
        row: dict[str, Any] = {
            "step": self.step,
            "loss": self.loss,
            "seconds": self.seconds,
            "learning_rate": self.learning_rate,
            "samples_per_second": self.samples_per_second,
        }
        if self.tokens_per_second is not None:
            row["tokens_per_second"] = self.tokens_per_second
        return row | ({"evaluation": self.evaluation} if self.evaluation else {})


Progress = Callable[[StepRow], None]


class StepReader:
    """Reads the steps that all ranks have finished, on from where it was.

    Parameters
    ----------
    data_ranks
        A rank for every part of the batch; others read the same samples.
    progress
        Called with every new step.

    ``rows`` are the steps so far.
    """

    def __init__(
        self, folder: Path, num_ranks: int, data_ranks: Sequence[int], progress: Progress | None = None
    ) -> None:
        self._data_ranks = data_ranks
        self.rows: list[StepRow] = []
        self._paths = [metrics_file(folder, rank) for rank in range(num_ranks)]
        self._offsets = [0] * num_ranks
        self._waiting: list[list[dict[str, Any]]] = [[] for _ in range(num_ranks)]
        self._progress = progress

    def read_on(self) -> None:
        """Read what the ranks have written since the last call."""
        for rank in range(len(self._paths)):
            self._waiting[rank] += self._read_rank(rank)
        for _ in range(min(map(len, self._waiting))):
            row = _join([waiting.pop(0) for waiting in self._waiting], self._data_ranks)
            self.rows.append(row)
            if self._progress is not None:
                self._progress(row)

    def _read_rank(self, rank: int) -> list[dict[str, Any]]:
        try:
            with self._paths[rank].open("rb") as file:
                file.seek(self._offsets[rank])
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]  # a rank may be writing its last line at this moment
        self._offsets[rank] += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def _join(rank_rows: list[dict[str, Any]], data_ranks: Sequence[int]) -> StepRow:
    first_row, data_rows = rank_rows[0], [rank_rows[rank] for rank in data_ranks]
    tokens = [row["tokens"] for row in data_rows]
    return StepRow(
        first_row["step"],
        first_row["loss"],
        max(row["seconds"] for row in rank_rows),
        sum(row["samples"] for row in data_rows),
        None if None in tokens else sum(tokens),
        first_row["learning_rate"],
        first_row.get("evaluation", {}),
    )


def log_rows(folder: Path, first_step: int, progress: Progress | None, *, has_board: bool) -> Progress:
    """Return a callback that logs every step and calls ``progress``; old lines from ``first_step`` on are removed."""
    path = metrics_log(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(read_lines_before(path, first_step) if first_step else []))
    board = _open_board(folder, first_step) if has_board else None

    def log_row(row: StepRow) -> None:
        with path.open("a") as file:
            file.write(json.dumps(row.to_json()) + "\n")
        if board is not None:
            for name, value in (*row.to_json().items(), *row.evaluation.items()):
                if isinstance(value, float):
                    board.add_scalar(f"evaluation/{name}" if name in row.evaluation else name, value, row.step)
            board.flush()
        if progress is not None:
            progress(row)

    return log_row


def _open_board(folder: Path, first_step: int) -> Any:
    """Return a writer of TensorBoard's files, which hide those of earlier runs from ``first_step`` on."""
    require_tensorboard()
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder / TENSORBOARD, purge_step=first_step)


def require_tensorboard() -> None:
    """Raise ``ValueError`` where TensorBoard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ValueError("--tensorboard needs tensorboard, which is not installed; pip install tensorboard")
