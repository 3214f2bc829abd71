"""The ends of steps, compiled or not."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.engine.compiled import installed
from meshwise.strategies.bounds.longest_path import Endings, Steps, Walked, finish


def rows(*values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_two_positions_by_hand() -> None:
    # Position 0 ends its passes at 50. Its bucket 0 is full at 40 + 3 and reduced in 10: 53; bucket 1 at
    # 40 + 9 = 49, but the first is under way until 53, so until 53 + 20 = 73.
    # Position 1 ends at 45; its bucket is full at 30 + 6 and done at 36 + 4 = 40: it waits for its passes, 45.
    # Tied gradients: both wait for 73 and add 5: 78. Optimizer 2 and gather 7, or 1 and 9: 78 + 10 = 88.
    # Gradients of replicated parameters: 73 + 1, or 45 + 40 = 85, so both wait for 85: 85 + 5 + 10 = 100.
    walked = Walked(rows([50, 45]), rows([40, 30]))
    endings = Endings(
        first=rows([0, 2, 3]),
        leaving=rows([10, 20, 4]),
        late=rows([0, 0]),
        replicated=rows([0, 0]),
        optimizer=rows([2, 1]),
        gather=rows([7, 9]),
        squares=rows([0, 0]),
        norm=rows([]),
        tied=rows([5]),
    )
    steps = Steps(np.array([0]), np.array([0]))
    for pair in ([0, 1], [1, 0]):
        assert finish(steps, walked, rows([3, 9, 6]), endings, rows([0], [1]), rows(pair)).tolist() == [88]
        summed = endings._replace(replicated=rows([1, 40]))
        assert finish(steps, walked, rows([3, 9, 6]), summed, rows([0], [1]), rows(pair)).tolist() == [100]
    # clipped: position 0 reads until 78 + 3, position 1 until 78 + 6; the norm takes 4 more, until 88; then as before
    clipped = endings._replace(squares=rows([3, 6]), norm=rows([4]))
    assert finish(steps, walked, rows([3, 9, 6]), clipped, rows([0], [1]), rows([0, 1])).tolist() == [98]
    late = endings._replace(first=rows([0, 0, 0]), late=rows([11, 30]), tied=rows([]), gather=rows([0, 0]))
    # after the passes: 50 + 11 + 2 = 63, and 45 + 30 + 1 = 76
    assert finish(steps, walked, rows([]), late, rows([0], [1]), rows().reshape(0, 2)).tolist() == [76]


@pytest.mark.skipif(not installed(), reason="numba is not installed")
def test_compiled_or_not_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    @settings(max_examples=100, deadline=None)
    @given(st.integers(1, 3), st.integers(1, 2), st.integers(0, 2**32))
    def law(ranks: int, chunks: int, seed: int) -> None:
        draw = np.random.default_rng(seed)
        stages, ways, steps = ranks * chunks, 3, 7
        first = np.concatenate([np.zeros((ways, 1), np.int64), draw.integers(0, 3, (ways, stages)).cumsum(1)], axis=1)
        sizes = (first.max(), ranks, ranks, ranks, ranks, ranks, draw.integers(0, 2), 2)
        endings = Endings(first, *(draw.integers(0, 50, (ways, size)) for size in sizes))
        walked = Walked(draw.integers(0, 50, (ways, ranks)), draw.integers(0, 50, (ways, stages)))
        last = np.arange(stages).reshape(chunks, ranks).T[:, ::-1].copy()
        chosen = Steps(*draw.integers(0, ways, (2, steps)))
        pairs = draw.integers(0, ranks, (2, 2))
        filled = draw.integers(0, 50, (ways, first.max()))
        found = []
        for numba in (False, True):
            monkeypatch.setattr("meshwise.strategies.bounds.longest_path.pays", lambda tasks, numba=numba: numba)
            found.append(finish(chosen, walked, filled, endings, last, pairs).tolist())
        assert found[0] == found[1]

    law()
