"""States of a rank's part of a table are boxes of the whole."""

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

from meshwise.executor.embedding_tables.cut_table import CutTable
from meshwise.executor.embedding_tables.table_form import TableForm
from meshwise.executor.embedding_tables.tables import Part, TableError
from meshwise.executor.saving.shared_states import Box, SharedState


def make_form(part: Part) -> TableForm:
    other = Part(0, part.first_row, 0, 4)
    return TableForm({"a.weight": CutTable("a", nn.Parameter(torch.ones(part.sizes)), [other, part], 1, WHOLE)})


WHOLE = nn.Embedding(5, 4)


@pytest.mark.parametrize(
    ("shape", "box", "whole"),
    [((3, 4), Box((2, 0), (0, 0), (3, 4)), (5, 4)), ((3,), Box((2,), (0,), (3,)), (5,)), ((3, 1), None, (5, 1))],
)
def test_states_of_elements_and_of_rows_are_shared(
    shape: tuple[int, ...], box: Box | None, whole: tuple[int, ...]
) -> None:
    state = make_form(Part(2, 5, 0, 4)).share("a.weight", torch.zeros(shape))
    assert isinstance(state, SharedState) and tuple(state.shape) == whole
    assert state.boxes == (box or Box((2, 0), (0, 0), (3, 1)),)


def test_a_rank_without_rows_has_no_box_and_numbers_stay() -> None:
    form, steps = make_form(Part(5, 5, 0, 4)), torch.tensor(3.0)
    state = form.share("a.weight", torch.zeros(0, 4))
    assert isinstance(state, SharedState) and tuple(state.shape) == (5, 4) and state.boxes == ()
    assert form.share("a.weight", steps) is steps


@pytest.mark.parametrize(("part", "shape"), [(Part(0, 5, 2, 4), (5,)), (Part(2, 5, 0, 4), (4,))])
def test_states_that_are_no_part_of_one_whole_are_refused(part: Part, shape: tuple[int, ...]) -> None:
    with pytest.raises(TableError, match=rf"met shape \[{shape[0]}\] for a; nearest: tables=rows"):
        make_form(part).share("a.weight", torch.zeros(shape))
