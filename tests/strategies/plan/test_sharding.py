"""Layouts and the collectives between them: Megatron's are found, not written down."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.collective import Collective
from meshwise.simulator.program import TaskKind
from meshwise.strategies.lowering import StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.mesh import TENSOR
from meshwise.strategies.plan.sharding import REPLICATED, ShardingSpec, after, redistribute

from ..problems import problem
from .redistributed import Ranks

CUT_HIDDEN, CUT_SEQUENCE = ShardingSpec((("hidden", (TENSOR,)),)), ShardingSpec((("sequence", (TENSOR,)),))
PARTIAL = ShardingSpec(partial=(TENSOR,))


@pytest.mark.parametrize(
    ("source", "target", "collectives"),
    [
        (REPLICATED, REPLICATED, []),
        (REPLICATED, CUT_HIDDEN, []),
        (PARTIAL, REPLICATED, [Collective.ALL_REDUCE]),
        (PARTIAL, CUT_SEQUENCE, [Collective.REDUCE_SCATTER]),
        (CUT_SEQUENCE, REPLICATED, [Collective.ALL_GATHER]),
        (CUT_SEQUENCE, CUT_HIDDEN, [Collective.ALL_TO_ALL]),
    ],
)
def test_redistribution(source: ShardingSpec, target: ShardingSpec, collectives: list[Collective]) -> None:
    assert [move.collective for move in redistribute(source, target)] == collectives


def test_nothing_is_made_partial() -> None:
    with pytest.raises(ValueError, match="not made partial"):
        redistribute(REPLICATED, PARTIAL)


AXES = {"depth": 2, "rows": 3, "columns": 2}
DIMS = ("sequence", "hidden")


@st.composite
def layouts(draw: st.DrawFn, *, partial: bool) -> ShardingSpec:
    """Return any layout of a tensor of two dims over three axes, each axis at one place, in any order."""
    places = ("whole", *DIMS, "partial") if partial else ("whole", *DIMS)
    spec = ShardingSpec()
    for axis in draw(st.permutations(list(AXES))):
        place = draw(st.sampled_from(places))
        if place in DIMS:
            spec = spec.cut(place, axis)
        elif place == "partial":
            spec = ShardingSpec(spec.cuts, (*spec.partial, axis))
    return spec


@given(layouts(partial=True), layouts(partial=False))
@settings(max_examples=400, deadline=None)
def test_every_rank_has_what_the_target_says(source: ShardingSpec, target: ShardingSpec) -> None:
    whole = np.arange(144).reshape(12, 12)
    ranks, layout = Ranks(AXES, DIMS, whole, source), source
    for move in redistribute(source, target):
        ranks.run(move, move.before(layout))
        layout = after(layout, move)
    assert not layout.partial
    for dim in DIMS:  # what is left is free
        assert target.axes(dim)[: len(layout.axes(dim))] == layout.axes(dim)
        for axis in target.axes(dim)[len(layout.axes(dim)) :]:
            ranks.slice(dim, axis)
    assert ranks.holds(whole, target)


def test_an_outer_axis_leaves_after_the_inner_one() -> None:
    # with the outer axis gathered alone a rank would have strips from all over the dim, no part of it
    both, inner = ShardingSpec((("hidden", ("depth", "rows")),)), ShardingSpec((("hidden", ("rows",)),))
    assert [(move.collective, move.axis) for move in redistribute(both, inner)] == [
        (Collective.ALL_GATHER, "rows"),
        (Collective.ALL_GATHER, "depth"),
    ]


def collectives(sequence_parallel: bool, block: int, direction: str) -> list[str]:
    small = problem()
    plan = complete(small, Layout(tensor=8, sequence_parallel=sequence_parallel))
    costs = StageCosts(small)
    found = costs.blocks.cost(plan, small.graph.blocks[block].name, costs.machine(plan).rank(0))
    steps = getattr(found.steps, direction)
    return [step.operators for step in steps if step.kind is TaskKind.TENSOR_COMMUNICATION]


def test_a_layer_has_two_all_reduces_each_way() -> None:
    # Shoeybi et al. 2019, figure 4: g after each row-parallel matmul, f before each column-parallel one
    assert collectives(False, 1, "forward") == ["all_reduce projected", "all_reduce narrow"]
    assert collectives(False, 1, "backward") == [
        "all_reduce gradient of feed_forward_norm_out",
        "all_reduce gradient of input_norm_out",
    ]


def test_sequence_parallel_turns_each_into_gather_and_scatter() -> None:
    # Korthikanti et al. 2022, figure 5; section 4.2.2: of what was gathered forward only the shard is kept, and
    # gathered again for the gradient of the weight
    assert collectives(True, 1, "forward") == [
        "all_gather input_norm_out",
        "reduce_scatter projected",
        "all_gather feed_forward_norm_out",
        "reduce_scatter narrow",
    ]
    assert collectives(True, 1, "backward") == [
        "all_gather gradient of narrow",
        "all_gather feed_forward_norm_out",
        "reduce_scatter gradient of feed_forward_norm_out",
        "all_gather gradient of projected",
        "all_gather input_norm_out",
        "reduce_scatter gradient of input_norm_out",
    ]


def test_embedding_and_loss_are_vocabulary_parallel() -> None:
    assert collectives(False, 0, "forward") == ["all_reduce embedded"]
    # the largest logit, the sum of exponentials and the target's logit (Shoeybi et al. 2019, section 3)
    parts = ["largest_logit", "sum_of_exponentials", "target_logit"]
    assert collectives(False, 2, "forward") == [f"all_reduce {part}" for part in parts]
    assert collectives(False, 2, "backward") == ["all_reduce gradient of final_norm_out"]


def test_a_microbatch_has_four_all_reduces_a_layer_and_five() -> None:
    # the executor counts the same on torch (tests/executor/launch/test_run.py): 4 * layers, the embedding, the
    # three parts of the loss, and the gradient that leaves the output layer
    small = problem()
    layers = small.graph.blocks[1].repeat
    each = [len(collectives(False, block, way)) for block in range(3) for way in ("forward", "backward")]
    assert sum(each[:2]) + layers * sum(each[2:4]) + sum(each[4:]) == 4 * layers + 5
