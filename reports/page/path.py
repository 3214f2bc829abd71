"""The critical path on a page: which kinds of ranks it runs on, stretch by stretch."""

from typing import Any

import numpy as np

from reports.page.columns import Columns
from simulator.units import TICKS_PER_SECOND
from strategies.explanation.critical_path import CriticalPath


def path(found: CriticalPath, unit: float, columns: Columns) -> dict[str, Any]:
    """Return the stretches of a critical path; columns of them go into ``columns``, moments in ``unit`` seconds."""
    stretches = np.array(found.stretches(), np.int64).reshape(-1, 3)
    start, end = np.rint(stretches[:, 1:].T / (TICKS_PER_SECOND * unit)).astype(np.int64)
    return {
        "class": columns.add(stretches[:, 0], "u4"),
        "start": columns.add_steps(start),
        "duration": columns.add(end - start, "u4"),
    }
