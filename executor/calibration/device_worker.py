"""Measures a device in its own process.

``python -m meshwise.executor.calibration.device_worker FOLDER OUT DEVICE PART SECONDS``: PART is one of `PARTS`. Rows
go to OUT as they are measured; a file in FOLDER lists what was left out.
"""

import sys
from pathlib import Path

from meshwise.executor.launch.worker import run_rank

PARTS = ("kernels", "training", "collectives")


def skipped_file(folder: Path) -> Path:
    """Return the file in which a worker lists, one a line, what it left out and why."""
    return folder / "skipped"


def main(folder: Path, out: Path, device: str, part: str, seconds: float) -> int:
    """Measure for about ``seconds`` and return the exit code."""
    return run_rank(folder, lambda rank: _measure_part(folder, rank, out, device, part, seconds))


def _measure_part(folder: Path, rank: int, out: Path, device: str, part: str, seconds: float) -> None:
    from meshwise.executor.calibration.device_parts import measure_part  # torch comes after the watch has begun

    def skip(item: str, cause: str) -> None:
        with skipped_file(folder).open("a") as file:
            file.write(f"{item}: {cause}\n")

    measure_part(part, folder, rank, out, device, seconds, skip)


if __name__ == "__main__":
    folder_name, rows, device, part, seconds = sys.argv[1:]
    sys.exit(main(Path(folder_name), Path(rows), device, part, float(seconds)))
