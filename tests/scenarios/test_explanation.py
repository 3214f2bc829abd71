"""Fields of a plan as a user asks about them."""

from meshwise.scenarios.explanation import plan_fields
from meshwise.strategies.plan.recomputation import Recompute


def test_fields_of_a_plan() -> None:
    assert plan_fields("tensor=8, pipeline = 2") == {"tensor": 8, "pipeline": 2}
    assert plan_fields("recompute=full,sequence_parallel=true") == {
        "recompute": Recompute.FULL,
        "sequence_parallel": True,
    }
    assert plan_fields("microbatch=[2, 1],zero=1") == {"microbatch": (2, 1), "zero": 1}
