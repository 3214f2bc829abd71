"""One rank of a calibration: ``python -m meshwise.executor.calibration.worker FOLDER SECONDS``."""

import json
import sys
from pathlib import Path

from meshwise.executor.calibration.figures import calibration_file
from meshwise.executor.launch.worker import run_rank
from meshwise.executor.recording.rank_files import Heartbeat

TIMEOUT = 60.0


def main(folder: Path, seconds: float) -> int:
    """Measure for about ``seconds``, write the figures into ``folder`` and return the exit code."""
    return run_rank(folder, lambda rank: _measure_rank(folder, rank, seconds))


def _measure_rank(folder: Path, rank: int, seconds: float) -> None:
    from meshwise.executor.calibration.measures import measure_all  # torch comes after the watch has begun
    from meshwise.executor.launch.process_group import join_process_group

    heartbeat = Heartbeat(folder, rank)
    heartbeat.beat("start")
    with join_process_group(folder, TIMEOUT):
        calibration_file(folder, rank).write_text(json.dumps(measure_all(seconds, heartbeat.beat)))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2])))
