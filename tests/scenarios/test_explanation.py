"""Fields of a plan as a user asks about them."""

from meshwise.scenarios.explanation import parse_question
from meshwise.strategies.plan.recomputation import Recompute


def test_fields_of_a_plan() -> None:
    assert parse_question("tensor=8, pipeline = 2") == {"tensor": 8, "pipeline": 2}
    assert parse_question("recompute=full,sequence_parallel=true") == {
        "recompute": Recompute.FULL,
        "sequence_parallel": True,
    }
    assert parse_question("microbatch=[2, 1],zero=1") == {"microbatch": (2, 1), "zero": 1}
