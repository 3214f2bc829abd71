import base64
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.reports.page.sections import Columns

MOMENTS = st.lists(st.integers(0, 2**32 - 1), max_size=20)


@given(st.lists(st.tuples(st.sampled_from(["u1", "u4", "i4", "f8"]), st.lists(st.integers(0, 255)))), MOMENTS)
def test_every_column_is_found_again(given_columns: list[tuple[str, list[int]]], moments: list[int]):
    columns = Columns()
    references = [columns.add(values, kind) for kind, values in given_columns]
    steps = columns.add_steps(np.array(moments, np.int64))
    data = zlib.decompress(base64.b64decode(columns.to_text()))
    assert all(where["at"] % 8 == 0 for where in [*references, steps])
    for where, (kind, values) in zip(references, given_columns, strict=True):
        assert np.frombuffer(data, f"<{kind}", where["count"], where["at"]).tolist() == values
    changes = np.frombuffer(data, "<u4", steps["count"], steps["at"])
    assert np.cumsum(changes, dtype=np.uint32).tolist() == moments


@pytest.mark.parametrize(("values", "kind"), [([256], "u1"), ([-1], "u4"), ([2**31], "i4"), ([0.5], "i4")])
def test_numbers_that_do_not_fit_are_refused(values: list[float], kind: str):
    with pytest.raises(ValueError, match=f"fit into {kind}"):
        Columns().add(values, kind)


@pytest.mark.parametrize("moment", [-1, 2**32])
def test_moments_beyond_32_bits_are_refused(moment: int):
    with pytest.raises(ValueError, match=r"lie in \[0, 2\*\*32\)"):
        Columns().add_steps(np.array([0, moment]))
