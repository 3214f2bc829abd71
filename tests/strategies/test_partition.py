"""Stages cover every block of the network once."""

from hypothesis import given
from hypothesis import strategies as st

from strategies.partition import num_layers, partition

from .problems import problem

PROBLEM = problem()


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
