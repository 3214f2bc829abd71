"""What runs around operators, by hand: transfers and their bytes, what is kept cut, statistics, and what waits."""

from collections.abc import Iterable

import pytest

from meshwise.simulator.collective import Collective
from meshwise.simulator.machine.compute import backward_parameters
from meshwise.simulator.models.layers import linear, norm
from meshwise.simulator.models.model import BlockBuilder
from meshwise.simulator.operator_graph import Block, Operator, OperatorKind
from meshwise.simulator.program import TaskKind
from meshwise.simulator.units import TICKS_PER_SECOND
from meshwise.strategies.lowering.costs.layout import BlockLayout, defers
from meshwise.strategies.lowering.costs.operator import (
    SurroundingSegments,
    build_collectives,
    build_surrounding,
    find_exchange_axes,
    find_regathered_inputs,
    list_transfers,
)
from meshwise.strategies.lowering.costs.segments import Segment
from meshwise.strategies.lowering.timing import RankClock
from meshwise.strategies.plan.mesh import TENSOR, TENSOR_DEPTH, Axis, Mesh
from meshwise.strategies.plan.sharding import REPLICATED, OperatorSharding, ShardingSpec

from ...operators.tiny import layer, setting, tiny_problem

Cuts = tuple[tuple[str, tuple[str, ...]], ...]
"""The axes that cut each dim."""

FOUR = Mesh((Axis("pipeline", 1), Axis("data", 1), Axis(TENSOR_DEPTH, 2), Axis(TENSOR, 2)))
SIZES = {"sequence": 4, "hidden": 8, "ffn": 16}
TOKENS = "batch sequence hidden"
BOTH: tuple[str, ...] = (TENSOR_DEPTH, TENSOR)

# one sequence of 4 tokens, hidden 8, wide 16, in fp32: x has 4 * 8 * 4 = 128 bytes, a weight 8 * 16 * 4 = 512, its bias
# 16 * 4 = 64, and the weight of a norm, or its bias, 8 * 4 = 32; a number for each token 4 * 4 = 16
X, WEIGHT, BIAS, SCALE, NUMBERS = 128, 512, 64, 32, 16

GATHER, SCATTER, SUM, EXCHANGE = (
    Collective.ALL_GATHER,
    Collective.REDUCE_SCATTER,
    Collective.ALL_REDUCE,
    Collective.ALL_TO_ALL,
)
PRODUCTS = ("MATMUL", "BATCH_MATMUL", "GROUPED_MATMUL", "CONVOLUTION")


def clock() -> RankClock:
    """What times one of four ranks in groups of 2; 64 byte/s, and a quarter of a second a message."""
    return setting(tiny_problem(layer(), devices=4), {TENSOR_DEPTH: 2, TENSOR: 2}).clock


def mesh(**sizes: int) -> Mesh:
    """Return the mesh of four ranks, some of its axes of another size."""
    return Mesh(tuple(Axis(axis.name, sizes.get(axis.name, axis.size)) for axis in FOUR.axes))


def reads(kind: OperatorKind, parameters: str = "", saved: str = "") -> Operator:
    return Operator("work", kind, (), ("x",), ("y",), tuple(parameters.split()), saved=tuple(saved.split()))


def laid_out(
    block: Block, *cut: OperatorSharding, produced: ShardingSpec | None = None, on: Mesh = FOUR
) -> BlockLayout:
    """Return a block of which x arrives as its first reader keeps it, where nothing is said."""
    shardings = {f"{block.name}.{each.operator}": each for each in cut}
    return BlockLayout(block, on, shardings, 1, input_layouts=() if produced is None else (produced,))


def product(*, bias: bool = True) -> Block:
    """One product of x with a weight."""
    builder = BlockBuilder("fp32", SIZES)
    x, wide = builder.add_tensor("x", TOKENS), builder.add_tensor("wide", "batch sequence ffn")
    linear(builder, "up", x, (wide,), "ffn", bias=bias)
    return builder.build_block("block", (x,), (wide,), layer=True)


def normed(*, bias: bool = True) -> Block:
    """One norm of x."""
    builder = BlockBuilder("fp32", SIZES)
    x = builder.add_tensor("x", TOKENS)
    return builder.build_block("block", (x,), (norm(builder, "norm", x, bias=bias),), layer=True)


def readers(*names: str) -> Block:
    """Operators that read x and y, each with a result of its own."""
    builder = BlockBuilder("fp32", SIZES)
    x, y = (builder.add_tensor(each, TOKENS) for each in ("x", "y"))
    made = tuple(builder.add_tensor(f"{name}_out", TOKENS) for name in names)
    for name, out in zip(names, made, strict=True):
        builder.add_elementwise(name, TOKENS, (x, y), (out,))
    return builder.build_block("block", (x, y), made, layer=True)


def moved(block: BlockLayout, source: ShardingSpec, target: ShardingSpec) -> list[tuple[Collective, str, float]]:
    return [(move.collective, move.axis, size) for move, size in list_transfers(block, "x", source, target)]


def shown(steps: Iterable[Segment]) -> list[tuple[Collective | None, str, float, str]]:
    return [(step.collective, step.axis, step.size, step.tensor) for step in steps]


def around(block: Block, *cut: OperatorSharding, inputs: tuple[str, ...] = (), on: Mesh = FOUR) -> SurroundingSegments:
    """Return what runs around the first operator of a block."""
    return build_surrounding(laid_out(block, *cut, on=on), block.operators[0], inputs)


@pytest.mark.parametrize("kind", OperatorKind)
def test_gradients_of_weights_and_tables_are_made_apart_and_of_what_has_none_nothing(kind: OperatorKind) -> None:
    assert defers(reads(kind, "weight bias")) is (kind.name in (*PRODUCTS, "EMBEDDING"))
    assert defers(reads(kind)) is False
    assert defers(reads(kind, "", "x")) is False


@pytest.mark.parametrize("kind", OperatorKind)
def test_backward_reads_weights_and_scales_and_neither_biases_nor_tables(kind: OperatorKind) -> None:
    weighs, scales = kind.name in (*PRODUCTS, "NORM"), kind.name == "ELEMENTWISE"
    assert backward_parameters(reads(kind, "weight bias", "x")) == (("weight",) if weighs or scales else ())
    assert backward_parameters(reads(kind, "weight bias")) == (("weight",) if weighs else ())  # a sum keeps nothing
    assert backward_parameters(reads(kind, "weight", "x")) == (("weight",) if weighs or scales else ())
    assert backward_parameters(reads(kind)) == backward_parameters(reads(kind, "", "x")) == ()


def test_an_exchange_moves_what_each_rank_has_before_it() -> None:
    block = laid_out(product())
    tokens, hidden = ShardingSpec((("sequence", (TENSOR,)),)), ShardingSpec((("hidden", (TENSOR,)),))
    assert moved(block, tokens, hidden) == moved(block, hidden, tokens) == [(EXCHANGE, TENSOR, X / 2)]
    # what is cut for free is cut first: of half of the tokens, half of hidden
    nested = ShardingSpec((("hidden", BOTH),))
    assert moved(block, tokens, nested) == [(EXCHANGE, TENSOR, X / 2 / 2)]
    # and what another axis has cut, and leaves cut
    both = ShardingSpec((("sequence", BOTH),))
    each = ShardingSpec((("sequence", (TENSOR_DEPTH,)), ("hidden", (TENSOR,))))
    assert moved(block, both, each) == [(EXCHANGE, TENSOR, X / 2 / 2)]


def test_a_gather_moves_what_a_group_has_together() -> None:
    block = laid_out(product())
    tokens, both = ShardingSpec((("sequence", (TENSOR,)),)), ShardingSpec((("sequence", BOTH),))
    assert moved(block, tokens, REPLICATED) == [(GATHER, TENSOR, X)]
    # the inner axis leaves first: its group has half together, and then that of the outer all
    assert moved(block, both, REPLICATED) == [(GATHER, TENSOR, X / 2), (GATHER, TENSOR_DEPTH, X)]
    assert moved(block, REPLICATED, both) == moved(block, both, both) == []  # each rank keeps its part for free


def test_a_sum_moves_what_each_rank_has_a_term_of() -> None:
    block, depth = laid_out(product()), (TENSOR_DEPTH,)
    tokens, term = ShardingSpec((("sequence", (TENSOR,)),)), ShardingSpec((), (TENSOR,))
    assert moved(block, term, REPLICATED) == [(SUM, TENSOR, X)]
    assert moved(block, term, tokens) == [(SCATTER, TENSOR, X)]
    # half of the tokens are summed along the other axis; what is cut for free before a scatter is not summed whole
    assert moved(block, ShardingSpec(tokens.cuts, depth), tokens) == [(SUM, TENSOR_DEPTH, X / 2)]
    assert moved(block, term, ShardingSpec((("hidden", BOTH),))) == [(SCATTER, TENSOR, X / 2)]
    # summed along the one axis, then exchanged along the other
    hidden = ShardingSpec((("hidden", (TENSOR,)),))
    half = [(SUM, TENSOR_DEPTH, X / 2), (EXCHANGE, TENSOR, X / 2)]
    assert moved(block, ShardingSpec(tokens.cuts, depth), hidden) == half


def test_collectives_say_what_they_move_and_take_as_long_as_their_bytes() -> None:
    block, both = laid_out(product()), ShardingSpec((("sequence", BOTH),))
    inner, outer = build_collectives(block, "x", both, REPLICATED, "all of ")
    assert shown([inner, outer]) == [(GATHER, TENSOR, X / 2, "x"), (GATHER, TENSOR_DEPTH, X, "x")]
    assert inner.label == outer.label == f"{GATHER} all of x"
    assert build_collectives(block, "x", both, REPLICATED)[0].label == f"{GATHER} x"
    assert inner.kind is outer.kind is TaskKind.TENSOR_COMMUNICATION
    # half of the bytes come from the other rank in one message: 0.25 + 32 / 64 and 0.25 + 64 / 64 seconds
    assert [clock().count_ticks(step) / TICKS_PER_SECOND for step in (inner, outer)] == [0.75, 1.25]
    assert not inner.deferred
    assert not inner.overlaps_next


def test_along_axes_of_one_rank_nothing_moves() -> None:
    both = ShardingSpec((("sequence", BOTH),))
    for axis, other in (BOTH, BOTH[::-1]):
        alone = build_collectives(laid_out(product(), on=mesh(**{other: 1})), "x", both, REPLICATED)
        assert shown(alone) == [(GATHER, axis, X, "x")]
    nobody = laid_out(product(), on=mesh(**dict.fromkeys(BOTH, 1)))
    assert build_collectives(nobody, "x", both, REPLICATED) == []


TO_HIDDEN = OperatorSharding("one", (("hidden", (TENSOR,)),))


@pytest.mark.parametrize(
    ("arrives", "wanted", "axes"),
    [
        ((("sequence", (TENSOR,)),), (("hidden", (TENSOR,)),), {TENSOR}),
        ((("sequence", (TENSOR_DEPTH,)),), (("hidden", (TENSOR_DEPTH,)),), {TENSOR_DEPTH}),
        ((("sequence", (TENSOR,)),), (("sequence", (TENSOR,)),), set()),
        ((("sequence", (TENSOR,)),), (), set()),  # gathered
        ((), (("hidden", (TENSOR,)),), set()),  # cut for free, and gathered in backward
        ((("sequence", (TENSOR_DEPTH,)),), (("hidden", (TENSOR,)),), set()),  # one leaves, another comes
        (
            (("sequence", (TENSOR_DEPTH,)), ("hidden", (TENSOR,))),
            (("sequence", (TENSOR,)), ("hidden", (TENSOR_DEPTH,))),
            {TENSOR, TENSOR_DEPTH},  # the one is gathered so that the other may come; in backward it is the other way
        ),
        # the inner axis of hidden leaves first, and the outer one may come to the tokens; back, both are gathered first
        ((("hidden", BOTH),), (("sequence", (TENSOR_DEPTH,)), ("hidden", (TENSOR,))), {TENSOR_DEPTH}),
        # both are gathered, for what comes must come outside; back, the inner one leaves, and the outer is exchanged
        (
            (("sequence", (TENSOR,)), ("hidden", (TENSOR_DEPTH,))),
            (("hidden", (TENSOR, TENSOR_DEPTH)),),
            {TENSOR},
        ),
    ],
)
def test_exchanged_axes_are_those_that_cut_another_dim_for_the_reader(
    arrives: Cuts, wanted: Cuts, axes: set[str]
) -> None:
    block = laid_out(readers("one"), OperatorSharding("one", wanted), produced=ShardingSpec(arrives))
    block.produced_layouts["y"] = ShardingSpec(wanted)
    assert find_exchange_axes(block) == axes


def test_any_reader_of_any_tensor_exchanges() -> None:
    tokens = ShardingSpec((("sequence", (TENSOR,)),))
    for one, two, axes in (((), TO_HIDDEN.cuts, {TENSOR}), (TO_HIDDEN.cuts, (), {TENSOR}), ((), (), set())):
        cut = (OperatorSharding("one", one), OperatorSharding("two", two))
        for first, second in ((tokens, REPLICATED), (REPLICATED, tokens)):
            block = laid_out(readers("one", "two"), *cut)
            block.produced_layouts |= {"x": first, "y": second}
            assert find_exchange_axes(block) == axes


def test_gradients_of_what_is_summed_are_whole() -> None:
    # x comes in parts of each depth rank, and along tokens: it is summed, exchanged, and its gradient exchanged back
    block = laid_out(readers("one"), TO_HIDDEN)
    block.produced_layouts["x"] = ShardingSpec((("sequence", (TENSOR,)),), (TENSOR_DEPTH,))
    assert find_exchange_axes(block) == {TENSOR}
    # what is summed and scattered is gathered in backward
    block.produced_layouts["x"] = ShardingSpec((), (TENSOR,))
    assert find_exchange_axes(block) == set()


ROWS = ("up_weight", (("hidden", (TENSOR,)),))
BIASES = ("up_bias", (("ffn", (TENSOR,)),))
HALF_OF_TOKENS: Cuts = (("sequence", (TENSOR,)),)


def test_a_product_gathers_what_it_keeps_cut_and_again_its_weight_and_scatters_both_gradients_apart() -> None:
    found = around(product(), OperatorSharding("up", HALF_OF_TOKENS, (ROWS, BIASES)))
    weight, bias = (GATHER, TENSOR, WEIGHT, "up_weight"), (GATHER, TENSOR, BIAS, "up_bias")
    assert shown(found.before_forward) == [weight, bias]
    assert shown(found.before_backward) == [weight]
    assert shown(found.after_backward) == [(SCATTER, TENSOR, WEIGHT, "up_weight"), (SCATTER, TENSOR, BIAS, "up_bias")]
    assert [step.label for step in found.after_backward] == [
        f"{SCATTER} gradient of up_weight",
        f"{SCATTER} gradient of up_bias",
    ]
    assert [step.label for step in found.before_backward] == [f"{GATHER} up_weight"]
    # backward of the input needs the weight; the gradients of weights can wait
    assert not any(step.deferred for step in (*found.before_forward, *found.before_backward))
    assert all(step.deferred for step in found.after_backward)


def test_a_bias_alone_that_is_kept_cut_is_not_gathered_again() -> None:
    found = around(product(), OperatorSharding("up", HALF_OF_TOKENS, (BIASES,)))
    assert shown(found.before_forward) == [(GATHER, TENSOR, BIAS, "up_bias")]
    assert found.before_backward == []
    assert shown(found.after_backward) == [(SCATTER, TENSOR, BIAS, "up_bias")]


def test_what_is_kept_as_it_is_read_moves_nothing() -> None:
    assert around(product(), OperatorSharding("up", HALF_OF_TOKENS)) == ([], [], [])
    whole = OperatorSharding("up", HALF_OF_TOKENS, (("up_weight", ()),))
    assert around(product(), whole) == ([], [], [])
    cut = OperatorSharding("up", HALF_OF_TOKENS, (ROWS, BIASES))
    assert around(product(), cut, on=mesh(**{TENSOR: 1})) == ([], [], [])  # and along axes of one rank


def test_terms_of_ranks_that_keep_the_same_part_are_not_summed_here() -> None:
    # a quarter of the tokens each, and half of the weight's rows: its gradient is scattered along the axis of these
    found = around(product(bias=False), OperatorSharding("up", (("sequence", BOTH),), (ROWS,)))
    assert shown(found.after_backward) == [(SCATTER, TENSOR, WEIGHT, "up_weight")]
    # each has half of the columns too, which stay: half of the weight is gathered, and half of its gradient scattered
    cuts: Cuts = (("sequence", (TENSOR,)), ("ffn", (TENSOR_DEPTH,)))
    kept = ("up_weight", (("hidden", (TENSOR,)), ("ffn", (TENSOR_DEPTH,))))
    found = around(product(bias=False), OperatorSharding("up", cuts, (kept,)))
    assert shown(found.before_forward) == shown(found.before_backward) == [(GATHER, TENSOR, WEIGHT / 2, "up_weight")]
    assert shown(found.after_backward) == [(SCATTER, TENSOR, WEIGHT / 2, "up_weight")]
    # a gradient that all ranks have whole is cut for free
    found = around(product(bias=False), OperatorSharding("up", (), (ROWS,)))
    assert shown(found.before_forward) == [(GATHER, TENSOR, WEIGHT, "up_weight")]
    assert found.after_backward == []


@pytest.mark.parametrize("kind", [OperatorKind.MATMUL, OperatorKind.ELEMENTWISE])
def test_an_input_that_is_gathered_again_waits_where_the_gradients_of_weights_do(kind: OperatorKind) -> None:
    builder = BlockBuilder("fp32", SIZES)
    x, scale, out = (
        builder.add_tensor("x", TOKENS),
        builder.add_tensor("scale", "hidden"),
        builder.add_tensor("out", TOKENS),
    )
    builder.add_operator("work", kind, TOKENS, (x,), (out,), parameters=(scale,), saved=(x,))
    kept = ((x, HALF_OF_TOKENS), (scale, (("hidden", (TENSOR,)),)))
    cut = OperatorSharding("work", (("batch", (TENSOR_DEPTH,)),), kept)
    block = builder.build_block("block", (x,), (out,), layer=True)
    late = kind is OperatorKind.MATMUL
    found = around(block, cut, inputs=(x,))
    # the input first, then the scale; forward gathers the input with what arrives
    assert shown(found.before_forward) == [(GATHER, TENSOR, SCALE, "scale")]
    assert shown(found.before_backward) == [(GATHER, TENSOR, X, "x"), (GATHER, TENSOR, SCALE, "scale")]
    assert [step.deferred for step in found.before_backward] == [late, False]
    assert shown(around(block, cut).before_backward) == [(GATHER, TENSOR, SCALE, "scale")]
    apart = OperatorSharding("work", HALF_OF_TOKENS, (kept[1],))
    assert [step.deferred for step in around(block, apart).after_backward] == [late]


@pytest.mark.parametrize(("bias", "count"), [(True, 2), (False, 1)])
def test_ranks_that_cut_what_a_norm_is_over_sum_its_statistics_in_either_pass(*, bias: bool, count: int) -> None:
    found = around(normed(bias=bias), OperatorSharding("norm", (("hidden", (TENSOR,)),)))
    assert shown(found.before_forward) == [(SUM, TENSOR, count * NUMBERS, "norm_out")]
    assert shown(found.before_backward) == [(SUM, TENSOR, count * NUMBERS, "")]
    assert found.after_backward == []
    (forward,), (backward,) = found.before_forward, found.before_backward
    assert forward.label == backward.label == f"{SUM} statistics of norm"
    assert not backward.deferred
    # half of them go there and half come back, each in a message: 2 * (0.25 + 8 * count / 64) seconds
    assert [clock().count_ticks(step) for step in (forward, backward)] == [
        2 * (0.25 + count / 8) * TICKS_PER_SECOND
    ] * 2


def test_statistics_are_summed_along_each_axis_that_cuts_them_and_of_a_rank_its_own_tokens() -> None:
    both = around(normed(), OperatorSharding("norm", (("hidden", BOTH),)))
    assert shown(both.before_forward) == [(SUM, axis, 2 * NUMBERS, "norm_out") for axis in BOTH]
    half = around(normed(), OperatorSharding("norm", (("sequence", (TENSOR_DEPTH,)), ("hidden", (TENSOR,)))))
    assert shown(half.before_forward) == [(SUM, TENSOR, 2 * NUMBERS / 2, "norm_out")]
    assert around(normed(), OperatorSharding("norm", HALF_OF_TOKENS)) == ([], [], [])
    assert around(normed(), OperatorSharding("norm", ())) == ([], [], [])


def test_along_axes_of_one_rank_nothing_is_summed() -> None:
    cut = OperatorSharding("norm", (("hidden", BOTH),))
    for axis, other in (BOTH, BOTH[::-1]):
        found = around(normed(), cut, on=mesh(**{other: 1}))
        assert shown(found.before_forward) == [(SUM, axis, 2 * NUMBERS, "norm_out")]
        assert shown(found.before_backward) == [(SUM, axis, 2 * NUMBERS, "")]
    assert around(normed(), cut, on=mesh(**dict.fromkeys(BOTH, 1))) == ([], [], [])


def test_statistics_are_of_the_first_result() -> None:
    builder = BlockBuilder("fp32", SIZES)
    x, out, means = (
        builder.add_tensor("x", TOKENS),
        builder.add_tensor("out", TOKENS),
        builder.add_tensor("means", "sequence"),
    )
    counts = (("hidden", 3), ("sequence", 1))
    builder.add_operator("norm", OperatorKind.NORM, TOKENS, (x,), (out, means), statistics=counts)
    block = builder.build_block("block", (x,), (out, means), layer=True)
    found = around(block, OperatorSharding("norm", (("hidden", (TENSOR,)), ("sequence", (TENSOR_DEPTH,)))))
    # 3 numbers of 4 bytes for each of 2 tokens, and one for each of the 4 of hidden that a rank has
    assert shown(found.before_forward) == [(SUM, TENSOR, 3 * 4 * 2, out), (SUM, TENSOR_DEPTH, 4 * 4, out)]
    assert shown(found.before_backward) == [(SUM, TENSOR, 3 * 4 * 2, ""), (SUM, TENSOR_DEPTH, 4 * 4, "")]


def test_a_norm_gathers_its_weight_before_it_sums_and_its_gradients_do_not_wait() -> None:
    # half of the tokens along the one axis, half of hidden along the other; of that a rank keeps half: half of a scale
    # is gathered, and half of its gradient scattered
    kept = tuple((name, (("hidden", (TENSOR, TENSOR_DEPTH)),)) for name in ("norm_weight", "norm_bias"))
    cut = OperatorSharding("norm", (("sequence", (TENSOR_DEPTH,)), ("hidden", (TENSOR,))), kept)
    found = around(normed(), cut)
    weight, bias = ((GATHER, TENSOR_DEPTH, SCALE / 2, name) for name in ("norm_weight", "norm_bias"))
    assert shown(found.before_forward) == [weight, bias, (SUM, TENSOR, 2 * NUMBERS / 2, "norm_out")]
    assert shown(found.before_backward) == [weight, (SUM, TENSOR, 2 * NUMBERS / 2, "")]
    assert shown(found.after_backward) == [(SCATTER, *weight[1:]), (SCATTER, *bias[1:])]
    assert not any(step.deferred for step in (*found.before_backward, *found.after_backward))


def test_what_several_read_alike_is_gathered_again_by_the_last() -> None:
    def of(*cuts: Cuts, kept: tuple[str, ...] = ("x",)) -> dict[str, tuple[str, ...]]:
        names = ("one", "two", "three")
        keeps = tuple((name, HALF_OF_TOKENS) for name in kept)
        cut = (OperatorSharding(name, how, keeps) for name, how in zip(names, cuts, strict=True))
        return find_regathered_inputs(laid_out(readers(*names), *cut))

    hidden: Cuts = (("hidden", (TENSOR,)),)
    assert of((), (), ()) == {"three": ("x",)}
    assert of((), (), HALF_OF_TOKENS) == {"two": ("x",)}  # the last has it as it is kept
    assert of((), hidden, ()) == {"two": ("x",), "three": ("x",)}
    assert of(hidden, (), ()) == {"one": ("x",), "three": ("x",)}
    assert of((), (), (), kept=("x", "y")) == {"three": ("x", "y")}
    assert of((), hidden, (), kept=("y", "x")) == {"two": ("x", "y"), "three": ("x", "y")}
    assert of((), (), (), kept=()) == {}
