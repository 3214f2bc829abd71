"""Rules of pipelines: what a schedule asks of microbatches."""

from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.rules import violations

from ..problems import problem


def test_interleaved_asks_for_whole_rounds() -> None:
    small = problem(batch=4)
    layout = Layout(pipeline=8, schedule="interleaved", chunks=1)
    assert [v.message for v in violations(small, layout) if v.field == "schedule"] == [
        "interleaved: microbatches(4) >= pipeline(8) does not hold; nearest: 8"
    ]
