"""The earliest repetition among rows of ends."""

import numpy as np

from meshwise.simulator.engine.steady_state import recurrence


def test_a_recurrence_is_the_earliest_repetition() -> None:
    assert recurrence(np.array([[0, 5], [3, 9], [6, 13]]), 1) is None
    found = recurrence(np.array([[0, 1], [2, 9], [3, 4], [5, 12]]), 2)
    assert found is None or found.period == 2
    assert recurrence(np.array([[0, 1], [2, 9], [3, 4], [5, 12]]), 1) == (0, 2, 3)
