"""Measures a device in its own process.

``python -m meshwise.executor.calibration.device_worker FOLDER OUT DEVICE PART SECONDS``: PART is one of `PARTS`. Rows
go to OUT as they are measured; a file in FOLDER lists what was left out.
"""

import sys
from pathlib import Path

from meshwise.executor.launch.worker import run_rank

PARTS = ("kernels", "training", "collectives")
TIMEOUT = 120.0
"""Seconds that a rank waits for the others, in addition to the seconds of measurement."""


def skipped_file(folder: Path) -> Path:
    """Return the file in which a worker lists, one a line, what it left out and why."""
    return folder / "skipped"


def main(folder: Path, out: Path, device: str, part: str, seconds: float) -> int:
    """Measure for about ``seconds`` and return the exit code."""
    return run_rank(folder, lambda rank: _measure(folder, rank, out, device, part, seconds))


def _measure(folder: Path, rank: int, out: Path, device: str, part: str, seconds: float) -> None:
    from meshwise.executor.calibration.device_machine import this_machine
    from meshwise.executor.calibration.device_measures import FULL, SMALL, kernel_rows
    from meshwise.executor.calibration.device_training import candidates, training_rows, trial
    from meshwise.executor.calibration.device_transfers import (
        collective_rows,
        joined,
    )  # torch comes after the watch has begun
    from meshwise.executor.calibration.figures import append
    from meshwise.executor.recording.rank_files import Heartbeat
    from meshwise.executor.recording.timer import device_timer

    beat = Heartbeat(folder, rank).beat
    beat("start")

    def skip(what: str, why: str) -> None:
        with skipped_file(folder).open("a") as file:
            file.write(f"{what}: {why}\n")

    cuda = device == "cuda"
    sizes = FULL if cuda else SMALL
    if part == "collectives":
        with joined(folder, device, TIMEOUT + seconds):  # ranks outside a group wait for it
            for row in collective_rows(sizes.messages, this_machine(device), device_timer(device), seconds, beat):
                append(out, row)
        return
    machine, timer = this_machine(device), device_timer(device)
    if part == "training":
        rows = training_rows(candidates() if cuda else trial(), machine, timer, beat, skip)
    else:
        rows = kernel_rows(sizes, machine.fields(), timer, seconds, beat, skip)
    for row in rows:
        append(out, row)


if __name__ == "__main__":
    where, rows, device, part, seconds = sys.argv[1:]
    sys.exit(main(Path(where), Path(rows), device, part, float(seconds)))
