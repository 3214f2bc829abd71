"""Where ranks lie along the axes of a mesh."""

from itertools import product

import pytest

from meshwise.strategies.plan.mesh import (
    CONTEXT,
    DATA,
    EXPERT,
    EXPERT_DATA,
    PIPELINE,
    TENSOR,
    Axis,
    Mesh,
    list_state_ranks,
)

MESH = Mesh((Axis(PIPELINE, 2), Axis(DATA, 3), Axis(EXPERT, 2), Axis(TENSOR, 4)))


def test_the_last_axis_varies_fastest() -> None:
    assert [MESH.stride(name) for name in (PIPELINE, DATA, EXPERT, TENSOR)] == [24, 8, 4, 1]
    # rank 37 = 1 * 24 + 1 * 8 + 1 * 4 + 1
    assert [MESH.coordinate(37, name) for name in (PIPELINE, DATA, EXPERT, TENSOR)] == [1, 1, 1, 1]
    for name in (PIPELINE, DATA, EXPERT, TENSOR, CONTEXT):
        assert MESH.coordinates(name).tolist() == [MESH.coordinate(rank, name) for rank in range(MESH.num_ranks)]


def test_an_axis_that_is_not_there_has_one_rank() -> None:
    assert MESH.size(CONTEXT) == 1
    assert MESH.rows(CONTEXT).shape == (0, 1)
    with pytest.raises(ValueError, match="mesh has the axes pipeline, data, expert, tensor, met context"):
        MESH.stride(CONTEXT)


def test_groups_span_the_axes_of_their_kind() -> None:
    assert (MESH.group_size(DATA), MESH.group_size(EXPERT_DATA)) == (3 * 2, 3)
    rows = MESH.rows(DATA, EXPERT)
    assert rows.shape == (8, 6)
    assert rows[0].tolist() == [0, 4, 8, 12, 16, 20]
    assert sorted(rows.ravel().tolist()) == list(range(48))


def test_ranks_that_share_states_are_numbered_within_their_replica() -> None:
    mesh = Mesh((Axis("replica", 2), Axis(DATA, 2), Axis(EXPERT, 2), Axis(CONTEXT, 3), Axis(TENSOR, 2)))
    # (data 1 * 2 experts + expert 0) * 3 parts of a sequence + part 2 = 8, of 12; tensor ranks and replicas are alike
    for replica, tensor in product((0, 1), (0, 1)):
        rank = 24 * replica + 12 * 1 + 6 * 0 + 2 * 2 + tensor
        assert list_state_ranks(mesh)[rank] == 8
    assert sorted(list_state_ranks(mesh).tolist()) == sorted(list(range(12)) * 4)


@pytest.mark.parametrize("axes", [(Axis(DATA, 2), Axis(DATA, 2)), (Axis(DATA, 0),)])
def test_axes_have_names_of_their_own_and_at_least_one_rank(axes: tuple[Axis, ...]) -> None:
    with pytest.raises(ValueError, match="mesh axes have distinct names and sizes of at least 1"):
        Mesh(axes)
