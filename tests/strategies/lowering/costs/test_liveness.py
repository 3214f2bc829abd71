"""Live tensors of small blocks, by hand, and what frameworks keep besides."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.simulator.models.experts import Experts
from meshwise.simulator.models.layers import cross_entropy, linear, norm, residual
from meshwise.simulator.models.model import BlockBuilder, build
from meshwise.simulator.models.transformer import Transformer
from meshwise.simulator.operator_graph import Block, OperatorKind
from meshwise.strategies.lowering.costs.layout import BlockLayout
from meshwise.strategies.lowering.costs.liveness import Liveness
from meshwise.strategies.lowering.costs.memory import Boundary
from meshwise.strategies.lowering.costs.recompute import BlockMemory, Moments, compute_moments
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.framework import FRAMEWORKS, MEGATRON, TORCH, Framework
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.mesh import Axis, Mesh
from meshwise.strategies.plan.recomputation import LayerRecompute, Recompute, SomeOperators
from meshwise.strategies.plan.sharding import OperatorSharding

from ...problems import problem

ONE = Mesh((Axis("pipeline", 1), Axis("data", 1), Axis("tensor", 1)))
TWO = Mesh((Axis("pipeline", 1), Axis("data", 1), Axis("tensor", 2)))

# one sequence of 4 tokens, hidden 8, wide 32, in bf16: x and narrow have 4 * 8 * 2 = 64 bytes, wide and active
# 4 * 32 * 2 = 256; each weight has 8 * 32 * 2 = 512
X, WIDE, WEIGHT = 64, 256, 512


def layer() -> Block:
    """Two products around an activation, and the sum with the input."""
    builder = BlockBuilder("bf16", {"sequence": 4, "hidden": 8, "ffn": 32})
    x = builder.add_tensor("x", "batch sequence hidden")
    wide, active = (builder.add_tensor(name, "batch sequence ffn") for name in ("wide", "active"))
    narrow = builder.add_tensor("narrow", "batch sequence hidden")
    linear(builder, "up", x, (wide,), "ffn")
    builder.add_elementwise("activation", "batch sequence ffn", (wide,), (active,), saved=(wide,))
    linear(builder, "down", active, (narrow,), "hidden", "ffn")
    return builder.build_block("layer", (x,), (residual(builder, "sum", (narrow,), x),), layer=True)


def head() -> Block:
    """The product with 16 words and its loss: 4 * 16 = 64 logits, and a weight of 8 * 16 * 2 = 256 bytes."""
    builder = BlockBuilder("bf16", {"sequence": 4, "hidden": 8, "vocab": 16})
    x, logits = (
        builder.add_tensor("x", "batch sequence hidden"),
        builder.add_tensor("logits", "batch sequence vocab", "fp32"),
    )
    linear(builder, "logits", x, (logits,), "vocab")
    return builder.build_block("head", (x,), (cross_entropy(builder, logits, "batch sequence", "vocab", "sequence"),))


def of(block: Block, framework: Framework, how: LayerRecompute = Recompute.NONE) -> Moments:
    return compute_moments(Liveness(BlockLayout(block, ONE, {}, 1), framework), how)


def test_a_layer_by_hand() -> None:
    found = of(layer(), MEGATRON)
    assert found.kept_bytes == X + WIDE + WIDE
    # as the sum runs: x, wide and active are kept, narrow is read, out is made
    assert found.forward == X + WIDE + WIDE + X + X
    # the gradient of out is also that of narrow and of x, and waits through all of backward
    up = X + X + WIDE + X  # x is kept; the gradients of out and wide; it makes that of x
    activation = X + WIDE + X + WIDE + WIDE  # x and wide are kept, active is not any more; two gradients as wide
    down = X + WIDE + WIDE + X + WIDE  # all is kept; it makes the gradient of active
    total = X + WIDE + WIDE + X  # the sum makes nothing
    assert [live for live, _ in found.backward] == [up, activation, down, total]
    assert [gradient for _, gradient in found.backward] == [0, 0, 0, 0]  # added where the gradients are
    assert [gradient for _, gradient in of(layer(), TORCH).backward] == [WEIGHT, 0, WEIGHT, 0]


def gated() -> Block:
    """A product into 16 gates and 16 values a token, together as wide, and the activation: 4 * 16 * 2 = 128 bytes."""
    builder = BlockBuilder("bf16", {"sequence": 4, "hidden": 8, "ffn": 16, "gate": 2})
    x, wide = builder.add_tensor("x", "batch sequence hidden"), builder.add_tensor("wide", "batch sequence ffn gate")
    active = builder.add_tensor("active", "batch sequence ffn")
    dims = "batch sequence ffn gate"
    linear(builder, "up", x, (wide,), "ffn gate")
    builder.add_elementwise("activation", dims, (wide,), (active,), saved=(wide,))
    return builder.build_block("gated", (x,), (active,), layer=True)


def test_a_gated_activation_keeps_its_gates_where_two_operators_make_it() -> None:
    one, two = of(gated(), MEGATRON), of(gated(), TORCH)
    assert one.kept_bytes == X + WIDE and two.kept_bytes == X + WIDE + WIDE // 2
    # the activation reads its gradient and makes that of wide, while all is kept
    assert one.backward[1][0] == X + WIDE + WIDE // 2 + WIDE
    assert two.backward[1][0] == one.backward[1][0] + WIDE // 2
    assert two.backward[0][0] == one.backward[0][0]  # it has gone then
    assert of(gated(), TORCH, Recompute.FULL).kept_bytes == X
    assert of(gated(), TORCH, SomeOperators(("activation",))).kept_bytes == X + WIDE


def test_half_of_a_product_is_kept_and_half_made_again() -> None:
    names = SomeOperators(("up/2", "activation"))
    whole, half = of(gated(), MEGATRON, SomeOperators(("up", "activation"))), of(gated(), MEGATRON, names)
    # the gates or the values of wide are kept, the others made again as backward of the activation begins
    assert (whole.kept_bytes, whole.remade_bytes) == (X, WIDE)
    assert (half.kept_bytes, half.remade_bytes) == (X + WIDE // 2, WIDE // 2)
    assert half.backward == whole.backward
    # as the activation runs in forward, all of wide is there
    assert half.forward == whole.forward == of(gated(), MEGATRON).forward


def test_a_norm_composed_of_operators_keeps_a_wide_input_and_the_scaled_one() -> None:
    builder = BlockBuilder("bf16", {"sequence": 4, "hidden": 8})
    x = builder.add_tensor("x", "batch sequence hidden")  # 4 * 8 * 2 = 64 bytes
    out = norm(builder, "norm", x, bias=False)
    block = builder.build_block("normed", (x,), (out,), layer=True)
    composed = replace(TORCH, composed=("rms_norm",))
    # one kernel keeps x; composed, x.float() of 128 bytes and x * rsqrt in bf16, of 64, are kept, and x is not
    assert of(block, TORCH).kept_bytes == X
    assert of(block, composed).kept_bytes == 2 * X + X
    assert of(block, composed, Recompute.FULL).kept_bytes == X


def test_full_recompute_keeps_the_input_alone() -> None:
    plain, again = of(layer(), TORCH), of(layer(), TORCH, Recompute.FULL)
    assert (again.kept_bytes, again.remade_bytes) == (X, WIDE + WIDE)
    assert again.backward == plain.backward  # all is there again
    # the fullest moment of forward: x, wide and active as the activation runs
    assert again.forward == X + WIDE + WIDE


@pytest.mark.parametrize("framework", [MEGATRON, TORCH], ids=["megatron", "torch"])
def test_sequence_parallel_keeps_shards_or_what_was_gathered(framework: Framework) -> None:
    # the sum is cut along the sequence, the products along the wide dim: x arrives cut, and up reads it gathered
    cuts = {"up": "ffn", "activation": "ffn", "down": "ffn", "sum": "sequence"}
    block = layer()
    shardings = {f"layer.{name}": OperatorSharding(name, ((dim, ("tensor",)),)) for name, dim in cuts.items()}
    layout = BlockLayout(block, TWO, shardings, 1)
    layout.produced_layouts["x"] = layout.shardings["sum"].find_input_spec(block.tensor["x"])
    found = compute_moments(Liveness(layout, framework), Recompute.NONE)
    kept = (X if framework.keeps_gathered else X // 2) + WIDE // 2 + WIDE // 2
    assert found.kept_bytes == kept
    # forward is fullest as down runs: all is kept, and its result is there whole before each rank has its share of it
    assert found.forward == kept + X + X // 2


def test_an_input_that_a_plan_keeps_cut_is_gathered_for_each_pass_whatever_the_framework_does() -> None:
    block, along = layer(), (("sequence", ("tensor",)),)
    for kept, size in (((), X), ((("x", along),), X // 2)):
        shardings = {"layer.up": OperatorSharding("up", (("ffn", ("tensor",)),), kept)}
        layout = BlockLayout(block, TWO, shardings, 1)
        layout.produced_layouts["x"] = OperatorSharding("x", along).find_input_spec(block.tensor["x"])
        assert Liveness(layout, TORCH).describe_kept(block.operators[0], "x") == (
            "x",
            size,
        )  # torch keeps what it gathered


def test_gradients_that_count_from_the_start_on_are_taken_off() -> None:
    # wide and narrow are what products put out: their gradients, WIDE + X, count all the time
    live = Liveness(BlockLayout(layer(), ONE, {}, 1), TORCH)
    up, activation, down, total = X + WIDE + X, X + WIDE + WIDE, X + WIDE, X  # as in the layer by hand, without kept
    assert live.list_captured_levels() == [each - (WIDE + X) for each in (up, activation, down, total)]


def test_what_an_exchange_brought_is_a_copy() -> None:
    # h is made cut along the sequence; one reader takes it so, the other cut along ffn: an all-to-all brings it
    builder = BlockBuilder("bf16", {"sequence": 4, "ffn": 32})
    x, h, same, other = (builder.add_tensor(name, "batch sequence ffn") for name in ("x", "h", "same", "other"))
    for name, source, target in (("first", x, h), ("keeps", h, same), ("moves", h, other)):
        builder.add_elementwise(name, "batch sequence ffn", (source,), (target,), saved=(source,))
    block = builder.build_block("layer", (x,), (same, other), layer=True)
    cuts = {"first": "sequence", "keeps": "sequence", "moves": "ffn"}
    shardings = {f"layer.{name}": OperatorSharding(name, ((dim, ("tensor",)),)) for name, dim in cuts.items()}
    live = Liveness(BlockLayout(block, TWO, shardings, 1), MEGATRON)
    _, keeps, moves = block.operators
    assert live.describe_kept(keeps, "h") == ("h", WIDE // 2)
    assert live.describe_kept(moves, "h") == ("h exchanged", WIDE // 2)


def test_routing_keeps_maps_of_every_token_and_expert() -> None:
    spec = Transformer(1, 16, 2, 2, 32, 64, ffn_kind="swiglu", positions="rotary", experts=Experts(8, 2, 32))
    block = next(each for each in build(spec, 32, "bf16").blocks if each.layer)
    routing = [each for each in block.operators if each.kind is OperatorKind.TOP_K]
    assert len(routing) == 1
    for operator in block.operators:
        # 18 bytes for each of 32 tokens and 8 experts, 3 sequences of them; torch keeps none
        known = {f"{operator.name} maps": 18 * 3 * 32 * 8} if operator in routing else {}
        assert Liveness(BlockLayout(block, ONE, {}, 3), MEGATRON).list_unnamed(operator) == known
        assert f"{operator.name} maps" not in Liveness(BlockLayout(block, ONE, {}, 3), TORCH).list_unnamed(operator)


def test_a_buffer_that_is_always_there_takes_the_gathered_input_of_the_logits() -> None:
    # x arrives cut along the sequence and is read whole by a product cut along words: backward makes the whole
    # gradient of x, then its share, and gathers x again, which is in the buffer
    block = head()
    shardings = {"head.logits": OperatorSharding("logits", (("vocab", ("tensor",)),))}
    layout = BlockLayout(block, TWO, shardings, 1)
    layout.produced_layouts["x"] = OperatorSharding("x", (("sequence", ("tensor",)),)).find_input_spec(
        block.tensor["x"]
    )
    buffered, apart = (
        Liveness(layout, replace(MEGATRON, gather_buffer=has)).list_backward_levels({}, {}, range(0))[0]
        for has in (True, False)
    )
    logits = 4 * 16 // 2 * 2  # of half of the words, in bf16
    assert buffered == logits + X + X // 2
    assert apart == buffered + X


def test_logits_by_hand() -> None:
    megatron, torch = of(head(), MEGATRON), of(head(), TORCH)
    logits, weight = 64, 256
    assert megatron.kept_bytes == X + 2 * logits and torch.kept_bytes == X + 4 * logits
    # at the loss Megatron has the logits, whose gradient takes their place; torch their logarithms and two gradients;
    # largest logit, sum and target are 4 tokens * 4 bytes each, and the gradient of the loss is theirs
    assert megatron.backward[1] == (X + 2 * logits + 16, 0)
    assert torch.backward[1] == (X + 3 * 4 * logits + 16, 0)
    # at the product the logits are gone, and their gradient is there
    assert megatron.backward[0] == (X + 2 * logits + X, 0)
    assert torch.backward[0] == (X + 4 * logits + X, weight)


def test_a_fused_loss_needs_no_more_than_the_logits() -> None:
    # as Megatron's at the loss, and as torch's at the product, whose gradient of the weight is one of its own
    fused, megatron, torch = (of(head(), FRAMEWORKS[name]) for name in ("torch_fused_loss", "megatron", "torch"))
    assert fused.kept_bytes == megatron.kept_bytes < torch.kept_bytes
    assert fused.backward[1:] == megatron.backward[1:]
    assert fused.backward[0] == (megatron.backward[0][0], torch.backward[0][1])


@given(st.integers(1, 9))
def test_more_sequences_hold_more_and_weights_the_same(times: int) -> None:
    found = of(layer(), TORCH)
    memory = found.scale_memory(times)
    assert memory.kept_bytes == times * found.kept_bytes
    assert memory.kept_bytes + memory.recomputed_bytes + memory.backward == max(
        times * live + gradient for live, gradient in found.backward
    )


def test_products_of_one_shape_share_a_gradient_that_nothing_reads() -> None:
    small = problem(layers=8, devices=1, batch=4)  # fp32; hidden 64, 8 heads of 8, ffn 256, vocab 128
    plan = complete(small, Layout())
    shapes = 192 * 64 + 64 * 64 + 256 * 64 + 64 * 256 + 128 * 64  # qkv, projection, up, down and the logits
    workspaces = 32 * 2**20 + 2 * 8320 * 1024
    assert StageCosts(small).buffers(plan) == (4 * shapes + workspaces,)


def test_torch_receives_every_microbatch_in_a_buffer_of_its_own() -> None:
    small = problem(layers=8, devices=4, batch=12)
    small = replace(small, training=replace(small.training, framework="torch"))
    boundary = 32 * 64 * 4  # tokens * hidden * fp32
    plan = complete(small, Layout(pipeline=4))
    assert StageCosts(small).buffers(plan) == tuple(12 * boundary * ends for ends in (1, 2, 2, 1))


@given(st.lists(st.tuples(st.builds(BlockMemory, *[st.integers(9, 99)] * 8), st.integers(1, 3)), max_size=3))
def test_buffers_at_both_ends_change_the_first_and_the_last_block(runs: list[tuple[BlockMemory, int]]) -> None:
    blocks = [memory for memory, count in runs for _ in range(count)]
    changed = [memory for memory, count in Boundary(3, 5).apply_buffers(runs) for _ in range(count)]
    assert len(changed) == len(blocks)
    if blocks:
        assert sum(each.kept_bytes for each in changed) == sum(each.kept_bytes for each in blocks) - 3 + 5
        assert changed[-1].backward == blocks[-1].backward - 5
        assert changed[1:-1] == blocks[1:-1]


def test_frameworks_by_name() -> None:
    assert {"megatron", "nemo", "torch", "torchtitan", "maxtext", "execute", "eager", "compiled"} <= set(FRAMEWORKS)
    with pytest.raises(
        ValueError,
        match="framework is one of megatron, megatron_2021, megatron_deepspeed, nemo, torch, torchtitan,",
    ):
        replace(problem().training, framework="jax")


def test_a_loss_that_is_not_fused_holds_logits_in_two_dtypes() -> None:
    """Of 6 bytes a logit, 4 in fp32 and 2 in the product's 16 bits, the fused loss of Transformer Engine has 2."""
    block = Transformer(1, 64, 4, 4, 256, 2048).graph(32, "bf16").blocks[-1]
    logits = 32 * 2048
    fused, plain = (of(block, FRAMEWORKS[name]) for name in ("megatron", "megatron_plain_loss"))
    loss_levels = [max(level for level, _ in row.backward[-2:]) for row in (fused, plain)]
    assert (loss_levels[1] - loss_levels[0], plain.kept_bytes - fused.kept_bytes) == (4 * logits, 2 * logits)
    compiled = of(block, FRAMEWORKS["megatron_compiled_loss"])  # it copies the probabilities, 4 bytes each
    assert max(level for level, _ in compiled.backward[-2:]) == loss_levels[1] + 4 * logits
