"""What a rank holds of a tensor, as boxes of it."""

import numpy as np
import pytest

pytest.importorskip("torch")
from meshwise.executor.training.checkpoint import Box, split_rows


@pytest.mark.parametrize("sizes", [(7,), (3, 5), (2, 3, 4)])
def test_boxes_make_up_any_run_of_elements(sizes: tuple[int, ...]) -> None:
    box = Box((2,) * len(sizes), sizes)
    elements = np.arange(box.volume).reshape(sizes)
    for start in range(box.volume):
        for stop in range(start + 1, box.volume + 1):
            parts = [(place, elements[part.find_slices(box)].ravel()) for place, part in split_rows(box, start, stop)]
            assert np.concatenate([part for _, part in parts]).tolist() == list(range(start, stop))
            assert all(place == part[0] for place, part in parts)
