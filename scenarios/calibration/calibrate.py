"""Calibration: measures this machine as a `Cluster` with which the simulator can predict runs on it."""

from collections.abc import Callable

from meshwise.executor.calibration.cores import measure_cores
from meshwise.scenarios.calibration.pace import measure_slowdown, with_slowdown
from meshwise.simulator.machine.cluster import Cluster


def calibrate(*, processes: int = 2, seconds: float = 20.0, progress: Callable[[str], None] | None = None) -> Cluster:
    """Measure this machine and return it as a cluster of ``processes`` accelerators: cores with one thread each.

    All cores are measured while all are busy, as in training.

    Parameters
    ----------
    seconds
        About how long to measure kernels and messages; some seconds to start and some training steps come on top.
    progress
        Called with a word about the current measurement.

    Raises
    ------
    ValueError
        Where there is no process or no time.
    """
    cores = measure_cores(processes=processes, seconds=seconds, progress=progress)
    if progress is not None:
        progress("training steps")
    return with_slowdown(cores, measure_slowdown(cores))
