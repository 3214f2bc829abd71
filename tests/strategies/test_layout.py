"""Layouts: every rule with its message."""

import pytest

from strategies.layout import Layout, complete, violations

from .problems import problem

PROBLEM = problem()


@pytest.mark.parametrize(
    ("layout", "field", "message"),
    [
        (
            Layout(data=2, tensor=2),
            "data",
            "data(2) * tensor(2) * pipeline(1) = 4 ranks, cluster has 8; data: 4 would do",
        ),
        (
            Layout(data=8, microbatch=3),
            "microbatch",
            "microbatch(3) * data(8) = 24 divides global_batch(32); nearest microbatch: 2",
        ),
        (Layout(tensor=8, pipeline=1, zero=2), "zero", "zero is 0 or 1, met 2; nearest: 1"),
        (Layout(pipeline=8, schedule="zigzag"), "schedule", "schedule is one of gpipe, 1f1b, interleaved, met zigzag"),
        (Layout(pipeline=8, chunks=2), "chunks", "1f1b has 1 chunk, met 2; nearest: schedule interleaved"),
        (Layout(data=2, pipeline=4, stages=(2, 2, 2, 1)), "stages", "that add to layers(8), met [2, 2, 2, 1] = 7"),
        (Layout(data=8, sequence_parallel=True), "sequence_parallel", "needs tensor of at least 2"),
        (Layout(data=0), "data", "data is at least 1, met 0"),
    ],
)
def test_a_broken_rule_says_what_holds_and_what_was_met(layout: Layout, field: str, message: str) -> None:
    found = [violation for violation in violations(PROBLEM, layout) if violation.field == field]
    assert found and message in found[0].message
    with pytest.raises(ValueError):
        complete(PROBLEM, layout)


def test_heads_bound_the_tensor_degree() -> None:
    wide = problem(heads=6, kv_heads=6, hidden=48)
    assert any("tensor divides heads(6), met 8; nearest: 6" in v.message for v in violations(wide, Layout(tensor=8)))


def test_interleaved_asks_for_whole_rounds() -> None:
    small = problem(batch=4)
    layout = Layout(pipeline=8, schedule="interleaved", chunks=1)
    assert {v.field for v in violations(small, layout)} == {"chunks", "schedule"}
