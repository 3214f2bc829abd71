"""One part of what is timed on a device: its kernels, training steps, or collectives with other ranks."""

from collections.abc import Callable
from pathlib import Path

from meshwise.executor.calibration.device_machine import this_machine
from meshwise.executor.calibration.device_measures import FULL, SMALL, kernel_rows
from meshwise.executor.calibration.device_training import candidates, training_rows, trial
from meshwise.executor.calibration.device_transfers import collective_rows, joined
from meshwise.executor.calibration.figures import append
from meshwise.executor.recording.rank_files import Heartbeat
from meshwise.executor.recording.timer import device_timer

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
