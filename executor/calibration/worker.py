"""A process that measures this machine: as one rank of a calibration of cores, or a part of its devices.

``python -m meshwise.executor.calibration.worker FOLDER SECONDS`` writes the figures of cores into FOLDER. With OUT,
DEVICE and PART, one of `PARTS`, rows of a device go to OUT as they are measured, and a file in FOLDER lists what was
left out.
"""

import json
import sys
from pathlib import Path

from meshwise.executor.calibration.figures import append_row, calibration_file
from meshwise.executor.launch.worker import run_rank
from meshwise.executor.recording.rank_files import Heartbeat

PARTS = ("kernels", "training", "collectives")
CORES_TIMEOUT, DEVICES_TIMEOUT = 60.0, 120.0
"""Seconds that a rank waits for the others; those that are measured come on top for devices."""


def skipped_file(folder: Path) -> Path:
    """Return the file in which a worker lists, one a line, what it left out and why."""
    return folder / "skipped"


def measure_cores(folder: Path, rank: int, seconds: float) -> None:
    """Measure for about ``seconds``, and write the figures into ``folder``."""
    from meshwise.executor.calibration.measures import measure_all  # torch comes after the watch has begun
    from meshwise.executor.launch.process_group import join_process_group

    heartbeat = Heartbeat(folder, rank)
    heartbeat.beat("start")
    with join_process_group(folder, CORES_TIMEOUT):
        calibration_file(folder, rank).write_text(json.dumps(measure_all(seconds, heartbeat.beat)))


def measure_devices(folder: Path, rank: int, seconds: float, out: Path, device: str, part: str) -> None:
    """Write the rows of a part to ``out`` as they are measured, for about ``seconds``."""
    from meshwise.executor.calibration.device_machine import describe_machine  # torch comes after the watch has begun
    from meshwise.executor.calibration.device_measures import CPU_SIZES, GPU_SIZES, measure_kernels
    from meshwise.executor.calibration.device_training import build_trials, list_candidates, measure_training
    from meshwise.executor.calibration.device_transfers import join_group, measure_collectives
    from meshwise.executor.recording.timer import make_timer

    def skip(item: str, cause: str) -> None:
        with skipped_file(folder).open("a") as file:
            file.write(f"{item}: {cause}\n")

    beat = Heartbeat(folder, rank).beat
    beat("start")
    cuda = device == "cuda"
    sizes = GPU_SIZES if cuda else CPU_SIZES
    if part == "collectives":
        with join_group(folder, device, DEVICES_TIMEOUT + seconds):  # ranks outside a group wait for it
            for row in measure_collectives(sizes.messages, describe_machine(device), make_timer(device), seconds, beat):
                append_row(out, row)
        return
    machine, timer = describe_machine(device), make_timer(device)
    if part == "training":
        rows = measure_training(list_candidates() if cuda else build_trials(), machine, timer, beat, skip)
    else:
        rows = measure_kernels(sizes, machine.fields(), timer, seconds, beat, skip)
    for row in rows:
        append_row(out, row)


def main(folder: Path, seconds: float, *device_words: str) -> int:
    """Measure for about ``seconds``, cores or with OUT, DEVICE and PART a device, and return the exit code."""
    if not device_words:
        return run_rank(folder, lambda rank: measure_cores(folder, rank, seconds))
    out, device, part = device_words
    return run_rank(folder, lambda rank: measure_devices(folder, rank, seconds, Path(out), device, part))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:]))
