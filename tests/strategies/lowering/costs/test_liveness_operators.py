"""Live tensors of single operators, by hand: copies, masks, casts, parameters that are kept cut, and losses."""

from dataclasses import replace

import pytest

from meshwise.simulator.models.layers import cross_entropy, linear, residual
from meshwise.simulator.models.model import BlockBuilder
from meshwise.simulator.operator_graph import Block, OperatorKind
from meshwise.strategies.lowering.costs.layout import BlockLayout, BlockTraining
from meshwise.strategies.lowering.costs.liveness import KeptTensor, Liveness
from meshwise.strategies.lowering.costs.recompute import Moments, compute_moments
from meshwise.strategies.plan.framework import MEGATRON, TORCH, Framework
from meshwise.strategies.plan.mesh import Axis, Mesh
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.plan.sharding import OperatorSharding, ShardingSpec

ONE = Mesh((Axis("pipeline", 1), Axis("data", 1), Axis("tensor", 1)))
TWO = Mesh((Axis("pipeline", 1), Axis("data", 1), Axis("tensor", 2)))
FOUR = Mesh((Axis("pipeline", 1), Axis("data", 1), Axis("tensor_depth", 2), Axis("tensor", 2)))
SIZES = {"sequence": 4, "hidden": 8, "ffn": 32, "vocab": 16, "capacity": 6, "gate": 2}

# one sequence of 4 tokens, hidden 8, wide 32, 16 words, in bf16: x has 4 * 8 * 2 = 64 bytes, wide 4 * 32 * 2 = 256, a
# weight 8 * 32 * 2 = 512; logits 4 * 16 * 4 = 256 in fp32, and 128 in bf16
X, WIDE, WEIGHT, LOGITS = 64, 256, 512, 256
TOKENS = "batch sequence hidden"


def product() -> Block:
    """One product, with a bias of 32 * 2 = 64 bytes."""
    builder = BlockBuilder("bf16", SIZES)
    x, wide = builder.add_tensor("x", TOKENS), builder.add_tensor("wide", "batch sequence ffn")
    linear(builder, "up", x, (wide,), "ffn", bias=True)
    return builder.build_block("block", (x,), (wide,), layer=True)


def head(*, between: bool = False) -> Block:
    """The product with 16 words and its loss, and an operator between them that widens it."""
    builder = BlockBuilder("bf16", SIZES)
    x, logits = builder.add_tensor("x", TOKENS), builder.add_tensor("logits", "batch sequence vocab", "fp32")
    made = builder.add_tensor("made", "batch sequence vocab") if between else logits
    linear(builder, "words", x, (made,), "vocab")
    if between:
        builder.add_elementwise("widen", "batch sequence vocab", (made,), (logits,))
    return builder.build_block("block", (x,), (cross_entropy(builder, logits, "batch sequence", "vocab", "sequence"),))


def live(block: Block, framework: Framework, mesh: Mesh = ONE, *cut: OperatorSharding, precision: str = "") -> Liveness:
    shardings = {f"{block.name}.{each.operator}": each for each in cut}
    return Liveness(BlockLayout(block, mesh, shardings, 1, BlockTraining(precision)), framework)


def along(operator: str, dim: str, kept: str = "") -> OperatorSharding:
    """Return an operator that is cut along a dim, and its parameters of hidden, which it keeps cut."""
    keeps = ((kept, (("hidden", ("tensor",)),)),) if kept else ()
    return OperatorSharding(operator, ((dim, ("tensor",)),), keeps)


def test_a_softmax_of_torch_keeps_its_result_in_fp32_beside_the_narrow_one() -> None:
    # scores of 1 x 4 x 4 in bf16: 32 bytes; torch's softmax is in fp32, 64 bytes, and the product reads 32 bytes
    for dtype, wide_bytes in (("bf16", 64), ("fp32", 0)):
        builder = BlockBuilder(dtype, SIZES | {"key": 4})
        scores, weights = (builder.add_tensor(name, "batch sequence key") for name in ("scores", "weights"))
        softmax, dims = OperatorKind.SOFTMAX, "batch sequence key"
        builder.add_operator("softmax", softmax, dims, (scores,), (weights,), saved=(weights,))
        block = builder.build_block("block", (scores,), (weights,), layer=True)
        (operator,) = block.operators
        fused, composed = live(block, TORCH), live(block, replace(TORCH, composed=(softmax,)))
        assert fused.list_saved(operator) == ("weights",) and fused.list_unnamed(operator) == {}
        assert composed.list_unnamed(operator) == ({"softmax in fp32": wide_bytes} if wide_bytes else {})
        assert composed.list_saved(operator) == (() if wide_bytes else ("weights",))


def of(found: Liveness) -> Moments:
    return compute_moments(found, Recompute.NONE)


def test_the_gradient_of_logits_is_as_wide_as_the_product_reads_it() -> None:
    torch, megatron = live(head(), TORCH), live(head(), MEGATRON)
    assert (torch.produced_size("logits"), torch.gradient_size("logits")) == (LOGITS, LOGITS // 2)
    assert (megatron.produced_size("logits"), megatron.gradient_size("logits")) == (LOGITS // 2, LOGITS // 2)
    assert (torch.gradient_size("x"), megatron.gradient_size("x")) == (X, X)


def test_what_another_operator_widens_is_wide() -> None:
    found = live(head(between=True), MEGATRON)
    assert (found.produced_size("made"), found.produced_size("logits")) == (LOGITS // 2, LOGITS)
    assert not any(map(found.is_last_product, found.operators))


def test_a_mask_is_kept_in_one_byte_and_there_as_it_is_made() -> None:
    builder = BlockBuilder("bf16", SIZES)
    x, y = builder.add_tensor("x", TOKENS), builder.add_tensor("y", TOKENS)
    out = residual(builder, "sum", (y,), x, with_dropout=True)
    found = live(builder.build_block("block", (y, x), (out,), layer=True), MEGATRON)
    assert found.describe_kept(found.operators[0], "sum_mask") == ("sum_mask", 4 * 8)
    memory = of(found)
    assert memory.kept_bytes == 4 * 8
    assert memory.forward == 4 * 8 + 3 * X  # and what is read, and made
    assert memory.backward[0][0] == 4 * 8 + X + 2 * X  # a gradient is there, and two are made: no sum alone
    # with its tokens cut, a rank has its part of the mask
    half = live(found.block, MEGATRON, TWO, along("sum", "sequence"))
    assert half.describe_kept(half.operators[0], "sum_mask") == ("sum_mask", 4 * 8 // 2)


def test_a_product_in_fp8_keeps_its_input_in_one_byte() -> None:
    found = live(product(), MEGATRON, precision="fp8")
    assert found.describe_kept(found.operators[0], "x") == ("x in fp8", X // 2)


@pytest.mark.parametrize(
    ("kind", "inputs", "parameters", "outputs", "made"),
    [
        (OperatorKind.ELEMENTWISE, "x y", "", "a", 0),  # a sum hands on the gradient it gets
        (OperatorKind.ELEMENTWISE, "x", "p", "a", 0),
        (OperatorKind.ELEMENTWISE, "x", "", "a", X),  # a copy makes one
        (OperatorKind.ELEMENTWISE, "x y", "", "a b", 2 * X),  # and so do others
        (OperatorKind.PERMUTE, "x y", "", "a", 2 * X),
    ],
)
def test_only_a_sum_makes_no_gradients(
    kind: OperatorKind, inputs: str, parameters: str, outputs: str, made: int
) -> None:
    builder = BlockBuilder("bf16", SIZES)
    read, owned, out = (
        tuple(builder.add_tensor(name, TOKENS) for name in names.split()) for names in (inputs, parameters, outputs)
    )
    builder.add_operator("work", kind, TOKENS, read, out, parameters=owned)
    found = live(builder.build_block("block", read, out, layer=True), replace(MEGATRON, routed_copies=1))
    assert found.list_backward_levels({}, {}, range(0)) == [len(out) * X + made]  # those of what it made are there
    assert (
        found.find_forward_peak({}) == (len(read) + len(out)) * X
    )  # all that is read and made, though nothing is kept


def test_a_block_that_only_carries_holds_nothing() -> None:
    builder = BlockBuilder("bf16", SIZES)
    x = builder.add_tensor("x", TOKENS)
    assert live(builder.build_block("block", (x,), (x,)), MEGATRON).find_forward_peak({}) == 0


def test_one_input_with_gates_is_enough_and_the_first_result_is_what_the_gate_becomes() -> None:
    builder = BlockBuilder("bf16", SIZES)
    both, scale = (
        builder.add_tensor("both", "batch sequence ffn gate"),
        builder.add_tensor("scale", "batch sequence ffn"),
    )
    active, largest = (
        builder.add_tensor("active", "batch sequence ffn"),
        builder.add_tensor("largest", "batch sequence"),
    )
    builder.add_elementwise("activation", "batch sequence ffn gate", (both, scale), (active, largest), saved=(both,))
    found = live(builder.build_block("block", (both, scale), (active, largest), layer=True), TORCH)
    assert found.list_unnamed(found.operators[0]) == {"activation gate": WIDE}


def test_what_is_exchanged_after_a_sum_is_a_copy_too() -> None:
    # h is made in parts of each depth rank, and along tokens: it is summed along one axis and exchanged along the other
    builder = BlockBuilder("bf16", SIZES)
    x, h, out = (builder.add_tensor(*each) for each in (("x", "batch sequence ffn"), ("h", TOKENS), ("out", TOKENS)))
    linear(builder, "down", x, (h,), "hidden", "ffn")
    builder.add_elementwise("reads", TOKENS, (h,), (out,), saved=(h,))
    block = builder.build_block("block", (x,), (out,), layer=True)
    down = OperatorSharding("down", (("sequence", ("tensor",)), ("ffn", ("tensor_depth",))))
    found = live(block, MEGATRON, FOUR, down, along("reads", "hidden"))
    assert found.describe_kept(found.operators[1], "h") == ("h exchanged", X // 2)
    whole = live(block, MEGATRON, FOUR, down)
    assert whole.describe_kept(whole.operators[1], "h") == ("h", X // 2)  # gathered, of which each rank keeps its part


def combine() -> Block:
    """What 6 tokens of capacity become, 6 * 8 * 2 = 96 bytes, in the tokens' order; and an operator that keeps them."""
    builder = BlockBuilder("bf16", SIZES)
    routed, probabilities = (
        builder.add_tensor("routed", "capacity hidden"),
        builder.add_tensor("probabilities", "sequence"),
    )
    active, out = builder.add_tensor("active", "capacity hidden"), builder.add_tensor("out", TOKENS)
    builder.add_elementwise("activation", "capacity hidden", (routed,), (active,), saved=(routed,))
    names = (active, probabilities)
    builder.add_operator("combine", OperatorKind.PERMUTE, "sequence hidden", names, (out,), saved=names)
    return builder.build_block("block", (routed, probabilities), (out,), layer=True)


def test_results_of_experts_are_kept_or_copied_as_the_framework_does() -> None:
    routed, probabilities = 6 * 8 * 2, 4 * 2
    megatron, torch = live(combine(), MEGATRON), live(combine(), TORCH)
    assert [megatron.list_saved(each) for each in megatron.operators] == [("routed",), ("probabilities",)]
    assert [torch.list_saved(each) for each in torch.operators] == [("routed",), ("active", "probabilities")]
    # as it combines: all is there, and Megatron has 3 copies more of the experts' results
    assert of(torch).forward == 2 * routed + probabilities + X
    assert of(megatron).forward == 2 * routed + probabilities + X + 3 * routed


@pytest.mark.parametrize(("framework", "held"), [(MEGATRON, X // 2), (TORCH, X)])
def test_what_is_gathered_is_kept_or_gathered_in_each_pass(framework: Framework, held: int) -> None:
    # x arrives cut along tokens, and is read whole by a product cut along ffn
    found = live(product(), framework, TWO, along("up", "ffn"))
    found.layout.produced_layouts["x"] = ShardingSpec((("sequence", ("tensor",)),))
    again = 0 if framework is TORCH else X
    assert found.gathered_input_bytes(found.operators[0]) == found.regathered_bytes(found.operators[0]) == again
    memory = of(found)
    assert (memory.kept_bytes, memory.forward) == (held, held + again + WIDE // 2)
    # the gradient of wide is there; that of x is made whole, then each rank has its part; x is gathered for the weight,
    # also where there is a buffer, which is for logits
    assert memory.backward[0][0] == held + WIDE // 2 + X + X // 2 + again


def test_parameters_that_are_kept_cut_are_there_whole_while_they_are_read() -> None:
    # each rank has half of the tokens; forward reads weight and bias, backward the weight alone, and makes both
    # gradients whole, before it has its part of that of the weight
    up = OperatorSharding(
        "up",
        (("sequence", ("tensor",)),),
        (("up_weight", (("hidden", ("tensor",)),)), ("up_bias", (("ffn", ("tensor",)),))),
    )
    found = live(product(), TORCH, TWO, up)
    memory = of(found)
    assert memory.forward == (X + WIDE) // 2 + WEIGHT + 64
    ((backward, gradient),) = memory.backward
    assert backward == X // 2 + WIDE // 2 + X // 2 + WEIGHT
    assert gradient == (WEIGHT + 64) + (WEIGHT + 64) // 2
    assert of(live(product(), MEGATRON, TWO, up)).backward[0][1] == WEIGHT + 64  # shards are added at once


@pytest.mark.parametrize(
    ("cuts", "ways", "copies"),
    [
        ((), 1, 1),
        ((("vocab", ("tensor",)),), 2, 2),  # the vocabulary is cut: probabilities and their logarithms
        ((("sequence", ("tensor",)),), 2, 1),
        ((("vocab", ()),), 1, 1),  # cut by nothing
    ],
)
def test_a_loss_copies_the_logits(cuts: tuple[tuple[str, tuple[str, ...]], ...], ways: int, copies: int) -> None:
    shardings = [OperatorSharding(name, cuts) for name in ("words", "cross_entropy")]
    found = live(head(), TORCH, TWO, *shardings)
    tokens = 2 if cuts and cuts[0][0] == "sequence" else 1
    parts = 3 * 4 * 4 // tokens  # three numbers of 4 bytes a token
    logits = LOGITS // ways
    assert of(found).forward == X // tokens + logits + parts + copies * logits
    # backward: one gradient for the three numbers, whose terms are summed, that of the logits, and as many copies
    assert of(found).backward[1][0] == X // tokens + logits + parts // 3 + logits + copies * logits
    in_place = live(head(), replace(TORCH, loss_copies=None), TWO, *shardings)
    assert of(in_place).forward == X // tokens + logits + parts + 4  # and the sum of the numbers, in 4 bytes


def test_what_is_read_in_backward_by_an_earlier_operator_stays() -> None:
    # held from the second operator on: it is gone as the backward of the first runs, and there before
    found = live(head(), TORCH)
    first, second = KeptTensor(100, 0), KeptTensor(1000, 1)
    alone = found.list_backward_levels({}, {}, range(0))
    held = found.list_backward_levels({"one": first, "other": second}, {}, range(0))
    assert [each - bare for each, bare in zip(held, alone, strict=True)] == [100, 1100, 1100]
    again = found.list_backward_levels(
        {"one": first}, {"other": second}, range(1, 2)
    )  # made again for the second alone
    assert [each - bare for each, bare in zip(again, alone, strict=True)] == [100, 1100, 100]


def test_indices_have_no_gradient() -> None:
    builder = BlockBuilder("bf16", SIZES)
    tokens, table = builder.add_tensor("tokens", "batch sequence", "int64"), builder.add_tensor("table", "vocab hidden")
    x, kind = builder.add_tensor("x", TOKENS), OperatorKind.EMBEDDING
    names = {"parameters": (table,), "reduced": "vocab", "saved": (tokens,)}
    builder.add_operator("look", kind, f"{TOKENS} vocab", (tokens,), (x,), **names)  # type: ignore[arg-type]
    block = builder.build_block("block", (tokens,), (x,))
    assert of(live(block, MEGATRON)).kept_bytes == 4 * 8
    assert of(live(block, MEGATRON)).backward == ((4 * 8 + X, 16 * 8 * 2),)  # that of x, and that of the table
    # with the words cut, that of a rank's rows, or of all
    for framework, rows in ((MEGATRON, 8), (TORCH, 16)):
        assert of(live(block, framework, TWO, along("look", "vocab"))).backward[0][1] == rows * 8 * 2


def test_the_gradient_of_what_several_read_waits_from_the_last_to_the_first() -> None:
    # y comes from nowhere: read by the first and the last of three, its gradient is there until all are done
    builder = BlockBuilder("bf16", SIZES)
    x, y, out = (builder.add_tensor(name, TOKENS) for name in ("x", "y", "out"))
    one, two = (builder.add_tensor(name, "batch sequence ffn") for name in ("one", "two"))
    dims = "batch sequence hidden ffn"
    builder.add_elementwise("first", dims, (x, y), (one,), saved=(x,))
    builder.add_elementwise("second", dims, (one,), (two,), saved=(one,))
    builder.add_elementwise("third", dims, (two, y), (out,), saved=(two,))
    found = live(builder.build_block("block", (x,), (out,), layer=True), MEGATRON).list_backward_levels(
        {}, {}, range(0)
    )
    # each makes the gradients of what it reads, and has that of what it made
    assert found == [(X + X) + WIDE + X, WIDE + WIDE + X, (WIDE + X) + X]


@pytest.mark.parametrize(("dtype", "whole"), [("bf16", X), ("int64", 0)])
def test_the_gradient_of_what_readers_have_cut_is_gathered_for_what_makes_it(dtype: str, whole: int) -> None:
    # h is made whole of x; one operator reads it and another does not. Indices have no gradient
    builder = BlockBuilder("bf16", SIZES)
    x, one, two = (builder.add_tensor(name, TOKENS) for name in ("x", "one", "two"))
    h = builder.add_tensor("h", TOKENS, dtype)
    builder.add_elementwise("makes", TOKENS, (x,), (h,), saved=(x,))
    builder.add_elementwise("reads", TOKENS, (h,), (one,), saved=(h,))
    builder.add_elementwise("other", TOKENS, (one,), (two,), saved=(one,))
    block = builder.build_block("block", (x,), (two,), layer=True)
    bare, read, unread = (
        live(block, MEGATRON, TWO, *cut).list_backward_levels({}, {}, range(0))[0]
        for cut in ((), (along("reads", "sequence"),), (along("other", "sequence"),))
    )
    assert bare == unread == whole + X  # the gradient of h waits, and that of x is made
    assert read == whole // 2 + X + whole  # half of it waits, and all is gathered


def test_what_logits_are_made_of_is_gathered_into_the_buffer_of_the_framework() -> None:
    # x arrives cut along tokens, and is read whole by a product cut along words
    for framework, apart in ((MEGATRON, 0), (replace(MEGATRON, gather_buffer=False), X)):
        found = live(head(), framework, TWO, along("words", "vocab"))
        found.layout.produced_layouts["x"] = ShardingSpec((("sequence", ("tensor",)),))
        words = found.operators[0]
        assert (found.gathered_input_bytes(words), found.regathered_bytes(words)) == (X, apart)


@pytest.mark.parametrize("first", ["part", "whole"])
def test_what_one_reader_has_cut_and_another_whole_is_there_whole(first: str) -> None:
    # x arrives whole; the one reads half of the tokens and the other all: fullest while that makes as many
    builder = BlockBuilder("bf16", SIZES)
    x, part, whole = (builder.add_tensor(each, TOKENS) for each in ("x", "part", "whole"))
    for made in (part, whole) if first == "part" else (whole, part):
        builder.add_elementwise(f"make_{made}", TOKENS, (x,), (made,))
    found = live(
        builder.build_block("block", (x,), (part, whole), layer=True), TORCH, TWO, along("make_part", "sequence")
    )
    found.layout.produced_layouts["x"] = ShardingSpec()
    assert of(found).forward == X + X
