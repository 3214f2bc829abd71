"""Which shardings of an operator are legal."""

from random import Random

import pytest

from meshwise.simulator.models.model import build
from meshwise.simulator.models.presets import MODELS
from meshwise.simulator.operator_graph import BATCH, Block, Operator, OperatorKind, Tensor
from meshwise.strategies.operators.choices import find_cut_violation, list_choices, list_cuttable_dims
from meshwise.strategies.plan.mesh import TENSOR, TENSOR_ROWS


def operator(model: str, name: str) -> tuple[Block, Operator]:
    graph = build(MODELS[model], 2048, "bf16")
    return next((b, o) for b in graph.blocks for o in b.operators if f"{b.name}.{o.name}" == name)


@pytest.mark.parametrize(
    ("model", "name", "dims"),
    [
        ("llama3-8b", "embedding.token", (BATCH, "sequence", "hidden", "vocab")),
        ("llama3-8b", "layers.input_norm", (BATCH, "sequence", "hidden")),  # statistics along hidden are summed
        ("llama3-8b", "layers.qkv", (BATCH, "sequence", "heads", "hidden")),  # not inside what is query, key and value
        ("llama3-8b", "layers.rotary", (BATCH, "sequence", "heads")),  # halves of a head are rotated together
        ("llama3-8b", "layers.attention", (BATCH, "heads", "group", "sequence")),  # queries, not keys
        ("llama3-8b", "layers.projection", (BATCH, "sequence", "hidden", "heads", "group", "head_dim")),
        ("llama3-8b", "head.cross_entropy", (BATCH, "sequence", "vocab")),
        ("mixtral-8x7b", "layers.top_k", (BATCH, "sequence")),  # the best of all experts
        ("mixtral-8x7b", "layers.dispatch", (BATCH, "experts", "capacity", "hidden")),
        ("resnet-50", "stage_1_first.convolution", (BATCH, "bottleneck_out", "bottleneck")),  # no windows
        ("resnet-50", "stage_1_first.reduce_norm", (BATCH, "bottleneck")),
        ("resnet-50", "stem.pooling", (BATCH, "channels_out")),
        ("t5-3b", "encoder_layers.softmax", (BATCH, "heads", "group", "sequence")),  # sums over keys
        ("dlrm-dcnv2", "embedding.bag_0", (BATCH, "hots_0", "embedding", "rows_0")),
    ],
)
def test_dims_that_may_be_cut(model: str, name: str, dims: tuple[str, ...]) -> None:
    assert list_cuttable_dims(*operator(model, name)) == dims


def test_what_an_operator_says_is_whole_stays_whole() -> None:
    tensors = (Tensor("x", (BATCH, "rows_in"), (1, 8), "fp32"), Tensor("y", (BATCH, "rows_in"), (1, 8), "fp32"))
    sizes = ((BATCH, 1), ("rows_in", 8))
    free = Operator("unknown", OperatorKind.ELEMENTWISE, sizes, ("x",), ("y",))
    bound = Operator("unknown", OperatorKind.ELEMENTWISE, sizes, ("x",), ("y",), uncut=(BATCH, "rows_in"))
    block = Block("block", (free,), tensors, ("x",), ("y",))
    assert list_cuttable_dims(block, free) == (BATCH, "rows_in")
    assert [each.cuts for each in list_choices("block", block, bound, {TENSOR: 2}, 4)] == [()]


def test_choices_of_one_axis_by_hand() -> None:
    # 5 divides neither 8 key heads nor 768 values of each nor 4096; a batch of 10 it does, and no other dim
    block, qkv = operator("llama3-8b", "layers.qkv")
    found = list_choices("layers", block, qkv, {TENSOR: 5}, 10)
    assert [(each.cuts, bool(each.kept)) for each in found] == [((), False), (((BATCH, (TENSOR,)),), False)]
    cut = list_choices("layers", block, qkv, {TENSOR: 8}, 8)
    tokens = (("sequence", (TENSOR,)), ("key", (TENSOR,)))  # keys are tokens too
    whole_or_kept = (
        [
            (BATCH, (TENSOR,)),
        ],
        tokens,
    )
    assert [each.cuts for each in cut] == [
        (),
        tuple(whole_or_kept[0]),
        tuple(whole_or_kept[0]),
        tokens,
        tokens,
        (("heads", (TENSOR,)),),
        (("hidden", (TENSOR,)),),
    ]
    # where the axis cuts only what the weight lacks it may be kept cut: along its first dim that 8 divides
    assert [each.kept for each in cut if each.kept] == [(("qkv_weight", (("hidden", (TENSOR,)),)),)] * 2


@pytest.mark.parametrize("seed", range(10))
def test_every_choice_divides_and_uses_an_axis_once(seed: int) -> None:
    random = Random(seed)
    graph = build(MODELS[random.choice(("mixtral-8x7b", "resnet-50", "t5-small"))], 512, "bf16")
    degrees = {TENSOR_ROWS: random.choice((2, 3, 4)), TENSOR: random.choice((2, 5, 8))}
    block = random.choice(graph.blocks)
    each = random.choice(block.operators)
    found = list_choices(block.name, block, each, degrees, 12)
    assert len(set(found)) == len(found)
    for sharding in found:
        own = dict(each.dims)
        used = [axis for dim, axes in sharding.cuts if dim in own for axis in axes]
        assert len(used) == len(set(used))
        for dim, axes in sharding.cuts:
            ways = 1
            for axis in axes:
                ways *= degrees[axis]
            assert own.get(dim, ways) * (12 if dim == BATCH else 1) % ways == 0
            assert list(axes) == [axis for axis in degrees if axis in axes]  # the outer axis outside
        for name, cuts in sharding.kept:
            for dim, axes in cuts:
                ways = 1
                for axis in axes:
                    ways *= degrees[axis]
                tensor = block.tensor[name]
                assert tensor.shape[tensor.dims.index(dim)] % ways == 0


def test_a_cut_that_does_not_divide_is_an_equation() -> None:
    block, qkv = operator("llama3-8b", "layers.qkv")
    degrees = {TENSOR_ROWS: 2, TENSOR: 3}
    message = find_cut_violation(block, qkv, "heads", (TENSOR_ROWS, TENSOR), degrees, 1)
    assert message == "tensor_rows(2) * tensor(3) divides heads(8), met 6; nearest: 4"
    assert find_cut_violation(block, qkv, "heads", (TENSOR_ROWS,), degrees, 1) == ""
