"""How a plan's stages are cut, in words."""

from dataclasses import replace

from meshwise.strategies.operators.cut_summary import describe_stages
from meshwise.strategies.operators.operator_plan import build_operator_plan
from meshwise.strategies.plan.mesh import TENSOR
from meshwise.strategies.plan.partition import Stage
from meshwise.strategies.plan.recomputation import PerStage, Recompute
from meshwise.strategies.plan.sharding import OperatorSharding

from .tiny import layer, tiny_problem


def test_every_stage_is_told_with_what_is_cut_and_what_is_whole() -> None:
    of = tiny_problem(layer(name="first"), layer(name="last"), devices=4)
    cut = (
        OperatorSharding("first.up", (("ffn", (TENSOR,)),)),
        OperatorSharding("first.side", (("ffn", (TENSOR,)),)),
        OperatorSharding("last.down", (("batch", (TENSOR,)),), (("weight", ((TENSOR, ("hidden",)),)),)),
    )
    stages = Stage(("first",)), Stage(("last",))
    plan = build_operator_plan(of, {TENSOR: 2}, 2, cut, stages=stages)
    plan = replace(plan, recompute=PerStage((Recompute.NONE, Recompute.FULL)))
    first, last = describe_stages(of, plan)
    assert first == "first: first.up, first.side: ffn over tensor; first.activation, first.down: whole"
    assert last == (
        "last: last.down: batch over tensor (parameters kept in parts); last.up, last.side, last.activation: whole; "
        "recompute full"
    )
