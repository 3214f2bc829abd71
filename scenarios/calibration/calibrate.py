"""Measure this machine into a Cluster that the simulator can predict its own runs with."""

from collections.abc import Callable

from meshwise.executor.calibration.cores import measure_cores
from meshwise.scenarios.calibration.pace import at_pace, pace
from meshwise.simulator.machine.cluster import Cluster


def calibrate(*, processes: int = 2, seconds: float = 20.0, progress: Callable[[str], None] | None = None) -> Cluster:
    """Return this machine as a cluster of ``processes`` accelerators: its cores, one thread each, all busy at once.

    Parameters
    ----------
    seconds
        About how long to measure, besides some seconds to start and for some training steps.
    progress
        Called with what is measured now.

    Raises
    ------
    ValueError
        Where there is no process or no time.
    """
    cores = measure_cores(processes=processes, seconds=seconds, progress=progress)
    if progress is not None:
        progress("training steps")
    return at_pace(cores, pace(cores))
