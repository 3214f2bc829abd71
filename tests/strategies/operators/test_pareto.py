"""What is kept is what no other row beats."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwise.strategies.operators.bucket_elimination import undominated
from meshwise.strategies.operators.cost_graph import MOST

ROWS = st.lists(st.tuples(*[st.integers(0, 4)] * 4), max_size=40)


@given(ROWS, st.integers(1, 3))
def test_equals_comparing_all_pairs(rows: list[tuple[int, int, int, int]], criteria: int) -> None:
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T[: criteria + 1]
    kept = undominated(*columns)
    seen = {row[: criteria + 1] for row in rows}
    best = {
        row
        for row in seen
        if not any(row != o and row[0] == o[0] and all(a >= b for a, b in zip(row, o, strict=True)) for o in seen)
    }
    assert len(kept) == len(best) and {tuple(map(int, columns[:, index])) for index in kept} == best


def test_large_values_in_many_groups_stay_apart() -> None:
    times = np.array([MOST - 1, MOST - 2, MOST - 1, MOST - 1])
    assert undominated(np.array([0, 0, 1, 2]), times).tolist() == [1, 2, 3]
