"""From a sharding for every operator to a plan."""

import pytest

from meshwise.simulator.operator_graph import BATCH
from meshwise.strategies.operators.choices import list_choices
from meshwise.strategies.operators.operator_plan import (
    build_operator_plan,
    list_data_variants,
    merge_shardings,
    with_all_kept,
    with_data,
    with_tied_layouts,
)
from meshwise.strategies.plan.mesh import DATA, TENSOR, TENSOR_ROWS
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.sharding import OperatorSharding

from ..problems import problem

SMALL = problem(devices=8, layers=2, batch=16)


def cut(small: Problem, axes: dict[str, tuple[str, ...]], *, kept: bool = False) -> tuple[OperatorSharding, ...]:
    """Return shardings that cut named dims of every operator that has them, parameters kept cut or not."""
    result = []
    for block in small.graph.blocks:
        for operator in block.operators:
            cuts = tuple((dim, axes[dim]) for dim, _ in operator.dims if dim in axes)
            legal = list_choices(block.name, block, operator, {TENSOR_ROWS: 2, TENSOR: 4}, 16)
            same = [each for each in legal if dict(each.cuts) == dict(cuts)]
            result.append(same[-1] if kept else same[0])
    return tuple(result)


def degrees(plan: Plan) -> dict[str, int]:
    return {axis.name: axis.size for axis in plan.mesh.axes if axis.size > 1}


def test_an_axis_that_cuts_every_batch_is_data_parallelism() -> None:
    plan = build_operator_plan(
        SMALL, {TENSOR_ROWS: 2, TENSOR: 4}, 16, cut(SMALL, {BATCH: (TENSOR_ROWS,), "ffn": (TENSOR,)})
    )
    moved = with_data(SMALL, plan)
    assert (degrees(moved), moved.microbatch, moved.zero) == ({DATA: 2, TENSOR: 4}, 8, 0)
    ffn = {s.operator: s.cuts for s in moved.shardings if s.cuts}
    assert set(ffn.values()) == {(("ffn", (TENSOR,)),)}
    assert set(ffn) == {"layers.up", "layers.activation", "layers.down"}


def test_with_every_parameter_kept_it_is_zero_3() -> None:
    plan = build_operator_plan(
        SMALL, {TENSOR_ROWS: 2, TENSOR: 4}, 16, cut(SMALL, {BATCH: (TENSOR_ROWS, TENSOR)}, kept=True)
    )
    assert any(sharding.kept for sharding in plan.shardings)
    moved = with_data(SMALL, plan)
    assert (degrees(moved), moved.microbatch, moved.zero) == ({DATA: 8}, 2, 3)
    assert not any(sharding.cuts or sharding.kept for sharding in moved.shardings)


def test_one_operator_that_is_whole_keeps_an_axis_from_being_data_parallelism() -> None:
    most = cut(SMALL, {BATCH: (TENSOR_ROWS, TENSOR)})
    most = (OperatorSharding(most[0].operator, ()), *most[1:])
    plan = build_operator_plan(SMALL, {TENSOR_ROWS: 2, TENSOR: 4}, 16, most)
    assert with_data(SMALL, plan) == plan
    # but near to it are the plans in which that operator is cut as the others are, along either axis
    near = list_data_variants(SMALL, plan)
    assert [degrees(each) for each in near] == [
        {TENSOR_ROWS: 2, TENSOR: 4},
        {DATA: 2, TENSOR: 4},
        {TENSOR_ROWS: 2, DATA: 4},
    ]


def test_what_all_layers_do_is_said_once() -> None:
    block = SMALL.graph.blocks[1]
    every = {
        f"{n}.{o.name}": OperatorSharding(f"{n}.{o.name}", ()) for n, b in SMALL.graph.occurrences for o in b.operators
    }
    other = OperatorSharding("layers.1.up", (("ffn", (TENSOR,)),))
    found = merge_shardings(SMALL, every | {"layers.1.up": other})
    assert [each for each in found if each.cuts] == [other]
    assert len(found) == len({each.operator for each in found}) == 1 + sum(len(b.operators) for b in SMALL.graph.blocks)
    assert {each.operator for each in found} >= {f"layers.{operator.name}" for operator in block.operators}


def test_ranks_are_devices_and_the_batch_is_whole_microbatches() -> None:
    with pytest.raises(ValueError, match=r"data\(1\) \* tensor\(4\) = 4 ranks, cluster has 8"):
        build_operator_plan(SMALL, {TENSOR: 4}, 16)
    with pytest.raises(ValueError, match=r"data\(1\) \* microbatch\(5\) divides global_batch\(16\)"):
        build_operator_plan(SMALL, {TENSOR: 8}, 5)


def test_parameters_are_kept_cut_along_every_axis_that_cuts_what_they_lack() -> None:
    shardings = cut(SMALL, {BATCH: (TENSOR_ROWS,), "ffn": (TENSOR,)})
    plan = with_all_kept(SMALL, build_operator_plan(SMALL, {TENSOR_ROWS: 2, TENSOR: 4}, 16, shardings))
    kept = {each.operator: dict(each.kept) for each in plan.shardings}
    # up_weight [hidden 64, ffn 256]: ffn is cut by tensor, and hidden, the first dim, by the axis of the batch besides
    assert kept["layers.up"]["up_weight"] == (("hidden", (TENSOR_ROWS,)), ("ffn", (TENSOR,)))
    assert kept["layers.qkv"]["qkv_weight"] == (("hidden", (TENSOR_ROWS,)),)
    assert {each.operator: each.cuts for each in plan.shardings} == {each.operator: each.cuts for each in shardings}
    assert with_data(SMALL, plan).zero == 3


def test_a_tied_parameter_is_kept_as_its_second_user_keeps_it() -> None:
    tied = problem(devices=8, layers=2, batch=16, tied=True)
    uncut = cut(tied, {BATCH: (TENSOR_ROWS,)})
    vocab = {each.operator: each for each in cut(tied, {BATCH: (TENSOR_ROWS,), "vocab": (TENSOR,)})}
    shardings = tuple(vocab[each.operator] if each.operator == "head.logits" else each for each in uncut)
    plan = build_operator_plan(tied, {TENSOR_ROWS: 2, TENSOR: 4}, 16, shardings)
    found = {each.operator: each.cuts for each in with_tied_layouts(tied, plan).shardings}
    assert found["embedding.token"] == ((BATCH, (TENSOR_ROWS,)), ("vocab", (TENSOR,)))
    assert {name: cuts for name, cuts in found.items() if name != "embedding.token"} == {
        each.operator: each.cuts for each in shardings if each.operator != "embedding.token"
    }
