"""Boxes of a tensor that ranks share are written and read as the indices of their parts say."""

from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save

from meshwise.executor.saving.background import HostCopies
from meshwise.executor.saving.shared_states import SharedState, list_boxes, list_runs, select_boxes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
WHOLE = torch.arange(72.0).view(12, 6)
PARTS = ([0, 1, 4, 5, 8, 9], [3, 4]), ([2, 3, 6, 7, 10, 11], [0, 1, 2, 5]), (range(12), [1])


def make_part(rows: list[int], columns: list[int], values: torch.Tensor) -> SharedState:
    return SharedState(values, WHOLE.shape, list_boxes([list_runs(list(rows)), list_runs(list(columns))]))


@pytest.mark.parametrize(("rows", "columns"), PARTS)
def test_parts_are_read_of_a_whole(rows: list[int], columns: list[int], tmp_path: Path) -> None:
    save({"x": WHOLE}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    part = torch.zeros(len(rows), len(columns))
    state = make_part(rows, columns, part)
    assert state.shape == state.size() == WHOLE.shape
    load({"x": state}, storage_reader=FileSystemReader(tmp_path), no_dist=True)
    assert torch.equal(part, WHOLE[list(rows)][:, columns])


def test_a_whole_is_read_of_boxes_whose_copies_were_written(tmp_path: Path) -> None:
    rows = [4, 5, 0, 1, 2, 3, 10, 11, 6, 7, 8, 9]
    state = make_part(rows, range(6), WHOLE[rows].clone())
    copies = HostCopies()
    copies.take({"x": make_part(rows, range(6), torch.zeros(12, 6))})
    save(copies.take({"x": state}), storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    state.part.zero_()
    found = torch.zeros(12, 6)
    load({"x": found}, storage_reader=FileSystemReader(tmp_path), no_dist=True)
    assert torch.equal(found, WHOLE)


def test_boxes_of_a_box_of_a_part_have_its_elements() -> None:
    for rows, columns in PARTS:
        part = WHOLE[list(rows)][:, columns]
        boxes = list_boxes([list_runs(list(rows)), list_runs(list(columns))])
        for first, size, left, width in product((0, 1, 3), (1, 3), (0,), range(1, len(columns) + 1)):
            expected = part[first : first + size, left : left + width]
            found = torch.full(expected.shape, -1.0)
            for (row, column), (own_row, own_column), (height, length) in select_boxes(
                boxes, (first, left), (size, width)
            ):
                values = WHOLE[row : row + height, column : column + length]
                found[own_row : own_row + height, own_column : own_column + length] = values
            assert torch.equal(found, expected)
