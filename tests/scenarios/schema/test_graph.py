"""The fields of a graph file: what each may hold, and that all of them are those of an operator."""

import pytest
from pydantic import ValidationError

from meshwise.scenarios.schema.graph import MAX_DIMS, MAX_SIZE, GraphOperatorTable, GraphTable, GraphTensorTable
from meshwise.simulator.operator_graph import ITEMSIZE, OperatorKind

OPERATOR = {"name": "up", "kind": "matmul", "dims": ["batch"], "sizes": [1], "inputs": ["x"], "outputs": ["y"]}


@pytest.mark.parametrize("kind", OperatorKind)
def test_every_kind_of_operator_has_a_word(kind: OperatorKind) -> None:
    assert GraphOperatorTable(**{**OPERATOR, "kind": kind.value}).kind == kind


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_every_dtype_is_one_of_a_tensor(dtype: str) -> None:
    assert GraphTensorTable(name="x", dims=["batch"], shape=[1], dtype=dtype).differentiable


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "matmull"},
        {"sizes": [0]},
        {"sizes": [MAX_SIZE + 1]},
        {"dims": ["d"] * (MAX_DIMS + 1)},
        {"executed_fraction": 0.0},
        {"executed_fraction": 1.5},
        {"flops_per_point": -1.0},
        {"kernel": "fast"},
    ],
)
def test_what_no_operator_has_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        GraphOperatorTable(**{**OPERATOR, **wrong})


def test_a_file_of_another_version_or_without_blocks_is_refused() -> None:
    for version, blocks in ((2, []), (1, [])):
        with pytest.raises(ValidationError):
            GraphTable(version=version, name="g", sequence=1, precision="bf16", blocks=blocks)
