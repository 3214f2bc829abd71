"""The losses of a whole run, in one file that grows with it and that a resumed run goes on with."""

import json
from collections.abc import Callable
from pathlib import Path

Progress = Callable[[int, float, float], None]


def metrics_log(folder: Path) -> Path:
    """Return where a run in ``folder`` has one JSON line a step: step, loss, seconds, learning_rate."""
    return folder / "metrics.jsonl"


def logged(folder: Path, first_step: int, rate: Callable[[int], float], progress: Progress | None) -> Progress:
    """Return what writes every step down and tells ``progress``; lines from ``first_step`` on are replaced.

    Parameters
    ----------
    rate
        The learning rate of a step.
    """
    path = metrics_log(folder)
    folder.mkdir(parents=True, exist_ok=True)
    before = _lines_before(path, first_step) if first_step else []
    path.write_text("".join(before))

    def tell(step: int, loss: float, seconds: float) -> None:
        row = {"step": step, "loss": loss, "seconds": seconds, "learning_rate": rate(step)}
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if progress is not None:
            progress(step, loss, seconds)

    return tell


def _lines_before(path: Path, step: int) -> list[str]:
    """Return the first whole lines of a log that a run wrote before a step."""
    lines: list[str] = []
    if path.is_file():
        for line in path.read_text(errors="replace").splitlines(keepends=True):
            try:
                if json.loads(line)["step"] >= step:
                    break
            except (ValueError, KeyError, TypeError):
                break
            lines.append(line)
    return lines
