"""Critical paths: as long as the walk says, and below it whatever passes take."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.strategies.bounds.longest_path import arrange_schedule, walk_schedule
from meshwise.strategies.stages.division import find_critical_paths

SCHEDULES = st.sampled_from([("1f1b", 3, 5, 1), ("gpipe", 2, 3, 1), ("naive", 3, 2, 1), ("interleaved", 2, 4, 3)])


@given(SCHEDULES, st.randoms(use_true_random=False))
def test_a_path_is_as_long_as_its_rank_takes_and_no_longer_in_any_other_step(
    which: tuple[str, int, int, int], random: np.random.Generator
) -> None:
    arranged, columns = arrange_schedule(*which), 2 * which[1] * which[3]
    steps = [np.array([[random.randint(0, 9) for _ in range(columns)]] * 1, np.int64) for _ in range(4)]
    ends = walk_schedule(arranged, *steps[:2]).ends[0]
    found = find_critical_paths(arranged, steps[0][0].astype(float), steps[1][0].astype(float))
    assert found.end_ticks.tolist() == ends.tolist()
    assert (found.pass_counts @ steps[0][0] + found.send_counts @ steps[1][0]).tolist() == ends.tolist()
    other = walk_schedule(arranged, *steps[2:]).ends[0]
    assert (found.pass_counts @ steps[2][0] + found.send_counts @ steps[3][0] <= other).all()


def test_compiled_and_plain_loops_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    arranged, rng = arrange_schedule("interleaved", 4, 8, 2), np.random.default_rng(0)
    ticks, sends = rng.integers(1, 9, (2, 16)).astype(float)
    results = []
    for pays in (False, True):
        monkeypatch.setattr("meshwise.strategies.stages.division.pays", lambda count, pays=pays: pays)
        results.append([each.tolist() for each in find_critical_paths(arranged, ticks, sends)])
    assert results[0] == results[1]
