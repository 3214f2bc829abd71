"""Layouts: every rule with its message."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.schedules.schedule import SCHEDULES

from ..problems import problem

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
        (Layout(tensor=8, pipeline=1, zero=4), "zero", "zero is 0, 1, 2 or 3, met 4; nearest: 3"),
        (
            Layout(data=8, zero=3, zero_shards=3),
            "zero_shards",
            "zero_shards(3) divides data(8) and is at least 2, or is 0 for all data ranks; nearest: 2",
        ),
        (Layout(data=8, zero=3, zero_shards=1), "zero_shards", "nearest: 0"),
        (Layout(data=8, zero_shards=4), "zero_shards", "zero_shards needs zero of at least 1, met 4 with zero 0"),
        (
            Layout(data=8, zero=2, reshard_after_forward=False),
            "reshard_after_forward",
            "reshard_after_forward: false needs zero 3, met zero 2; nearest: true",
        ),
        (Layout(pipeline=8, schedule="zigzag"), "schedule", f"schedule is one of {', '.join(SCHEDULES)}, met 'zigzag'"),
        (Layout(pipeline=8, chunks=2), "chunks", "1f1b: chunks(2) = 1 does not hold; nearest: 1"),
        (Layout(data=2, pipeline=4, stages=(2, 2, 2, 1)), "stages", "that add to layers(8), met [2, 2, 2, 1] = 7"),
        (Layout(data=8, sequence_parallel=True), "sequence_parallel", "needs tensor of at least 2"),
        (Layout(data=0), "data", "data is at least 1, met 0"),
        (
            Layout(data=8, overlap_tensor=True),
            "overlap_tensor",
            "overlap_tensor needs tensor of at least 2, met tensor 1; nearest: false",
        ),
        (
            Layout(tensor=8, overlap_tensor=True),
            "overlap_tensor",
            "overlap_tensor needs sequence_parallel, whose gathers and scatters go chunk by chunk beside products, "
            "met sequence_parallel false; nearest: false",
        ),
        (
            Layout(tensor=2, tensor_rows=4, microbatch=4, overlap_tensor=True),
            "overlap_tensor",
            "needs sequence_parallel",
        ),
        (
            Layout(tensor=2, pipeline=4, sequence_parallel=True, schedule="zb1p", overlap_tensor=True),
            "overlap_tensor",
            "overlap_tensor needs schedules that keep backward whole, for the product of a weight's gradient hides "
            "the scatter of its input's, met zb1p; nearest: false",
        ),
        (
            Layout(data=8, zero=1, gradient_reduction="parameter_server"),
            "gradient_reduction",
            "gradient_reduction: parameter_server needs zero 0, for with ZeRO every rank keeps the sum of its share",
        ),
        (
            Layout(data=8, gradient_reduction="server"),
            "gradient_reduction",
            "gradient_reduction is one of all_reduce, parameter_server, met server",
        ),
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


@given(
    st.integers(1, 300), st.sampled_from([1, 2, 3]), st.integers(1, 12), st.sampled_from([1, 2, 4]), st.integers(1, 9)
)
def test_the_nearest_values_beside_a_batch_that_is_not_divided_hold(
    batch: int, nodes: int, data: int, tensor: int, microbatch: int
) -> None:
    own, layout = problem(batch=batch, nodes=nodes), Layout(data=data, tensor=tensor, microbatch=microbatch)
    messages = [found.message for found in violations(own, layout) if " divides global_batch(" in found.message]
    assert bool(messages) == bool(batch % (data * microbatch))
    for message in messages:
        values = {name: int(value) for name, value in re.findall(r"(\w+): (\d+)", message.split("; nearest ")[1])}
        new_batch = values.pop("global_batch", batch)
        changed = replace(layout, **values)
        left = [found.message for found in violations(replace_batch(own, new_batch), changed)]
        assert not [line for line in left if "global_batch" in line or "ranks, cluster has" in line], message
        size = changed.microbatch
        assert isinstance(size, int) and values.get("data", data) == 8 * nodes // tensor
        if "microbatch" in values:
            share = batch // changed.data
            assert abs(size - microbatch) == min(abs(n - microbatch) for n in range(1, share + 1) if share % n == 0)
        elif new_batch != batch:
            step = changed.data * size
            assert abs(new_batch - batch) == min(abs(n - batch) for n in range(step, batch + step + 1, step))


def replace_batch(own: Problem, batch: int) -> Problem:
    return replace(own, training=replace(own.training, global_batch=batch))
