"""One part of what is timed on a device: its kernels, training steps, or collectives with other ranks."""

from collections.abc import Callable
from pathlib import Path

from meshwise.executor.calibration.device_machine import describe_machine
from meshwise.executor.calibration.device_measures import CPU_SIZES, GPU_SIZES, measure_kernels
from meshwise.executor.calibration.device_training import build_trials, list_candidates, measure_training
from meshwise.executor.calibration.device_transfers import join_group, measure_collectives
from meshwise.executor.calibration.figures import append_row
from meshwise.executor.recording.rank_files import Heartbeat
from meshwise.executor.recording.timer import make_timer

TIMEOUT = 120.0
"""Seconds that a rank waits for the others, besides those that are measured."""


def measure_part(
    part: str, folder: Path, rank: int, out: Path, device: str, seconds: float, skip: Callable[[str, str], None]
) -> None:
    """Write the rows of a part to ``out`` as they are measured, for about ``seconds``.

    Parameters
    ----------
    folder
        Where ranks meet and give signs of life.
    skip
        Told what is left out, and why.
    """
    beat = Heartbeat(folder, rank).beat
    beat("start")
    cuda = device == "cuda"
    sizes = GPU_SIZES if cuda else CPU_SIZES
    if part == "collectives":
        with join_group(folder, device, TIMEOUT + seconds):  # ranks outside a group wait for it
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
