"""Weights of a block on one rank by hand: what ZeRO shares, what two stages share, what ranks have whole."""

from meshwise.strategies.lowering.costs.layout import BlockLayout, BlockTraining
from meshwise.strategies.lowering.costs.weights import find_tied_parameters, find_unit, summed_elements
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout

from ...problems import problem

HIDDEN, WIDE, VOCAB = 64, 256, 128


def layer(**layout: int) -> BlockLayout:
    small = problem()
    plan = complete(small, Layout(**layout))
    return BlockLayout(
        small.graph.blocks[1], plan.mesh, {each.operator: each for each in plan.shardings}, 1, BlockTraining("fp32")
    )


def test_a_rank_has_the_sum_of_its_share_from_zero_2_on() -> None:
    small = problem()
    plans = [complete(small, Layout(data=8, zero=zero)) for zero in range(4)]
    assert [summed_elements(plan, 1001) for plan in plans] == [1001, 1001, 126, 126]  # 1001 / 8 = 125.1


def test_a_unit_is_a_layer_of_which_tensor_ranks_have_their_part() -> None:
    training = problem().training
    # products of 4 hidden^2 and 2 hidden wide, with biases; two norms of two vectors
    products, biases = 4 * HIDDEN**2 + 2 * HIDDEN * WIDE, 3 * HIDDEN + WIDE
    whole = 4 * HIDDEN + 2 * HIDDEN  # norms, and the biases of what is summed over ranks
    alone = find_unit(training, layer(data=8))
    assert alone == (products + biases + whole, 0, 4 * (products + biases + whole))
    assert find_unit(training, layer(data=4, tensor=2)).elements == (products + biases) // 2 + whole


def test_a_tied_table_is_kept_by_the_first_and_the_last_stage() -> None:
    tied, free = problem(tied=True), problem()
    plan = complete(tied, Layout(data=2, pipeline=4))
    [(pair, (block, _))] = find_tied_parameters(tied.graph, plan.stages, plan.positions)
    assert pair == (0, 3) and block == tied.graph.occurrences[-1][0]
    for small, layout in ((tied, Layout(data=8)), (free, Layout(data=2, pipeline=4))):
        untied = complete(small, layout)
        assert find_tied_parameters(small.graph, untied.stages, untied.positions) == []
