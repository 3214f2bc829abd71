"""Plans: every rule with its message, JSON round trip, stages that cover the network once."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.plan import Layout, Plan, Recompute, complete, num_layers, partition, violations

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


LAYOUTS = st.sampled_from(
    [
        Layout(data=8, microbatch=2, zero=1),
        Layout(tensor=8, sequence_parallel=True, recompute=Recompute.SELECTIVE),
        Layout(pipeline=4, data=2, schedule="interleaved", chunks=2, recompute=Recompute.FULL),
        Layout(pipeline=4, tensor=2, schedule="gpipe", stages=(3, 2, 2, 1)),
    ]
)


@given(LAYOUTS)
def test_json_round_trip(layout: Layout) -> None:
    plan = complete(PROBLEM, layout)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize("change", [{"version": 9}, {"mesh": 3}, {"stages": [{}]}, {"recompute": "some"}])
def test_a_broken_document_is_a_value_error(change: dict[str, object]) -> None:
    document = complete(PROBLEM, Layout(data=8)).to_json() | change
    with pytest.raises(ValueError):
        Plan.from_json(document)


@given(st.integers(1, 8), st.sampled_from(["balanced", "even"]))
def test_stages_cover_every_block_once_in_order(stages: int, how: str) -> None:
    if how == "even" and num_layers(PROBLEM.graph) % stages:
        return
    blocks = [block for stage in partition(PROBLEM.graph, stages, how) for block in stage.blocks]
    assert blocks == [name for name, _ in PROBLEM.graph.occurrences]


def test_balanced_stages_leave_room_for_the_output_layer() -> None:
    # 10 layers on 4 stages with an output layer worth about 5 layers: the last stage gets the fewest
    heavy = problem(layers=10, vocab=4096)
    counts = [sum("layers" in b for b in stage.blocks) for stage in partition(heavy.graph, 4, "balanced")]
    assert sum(counts) == 10 and counts == [3, 3, 3, 1]
