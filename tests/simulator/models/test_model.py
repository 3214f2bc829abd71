"""Blocks that are written down by named dims: tensors have the sizes of their dims, operators those of their space."""

from meshwise.simulator.models.model import BlockBuilder, build
from meshwise.simulator.models.transformer import Transformer
from meshwise.simulator.operator_graph import OperatorKind


def test_sizes_follow_from_the_names_of_dims() -> None:
    builder = BlockBuilder("bf16", {"tokens": 4, "hidden": 8, "wide": 16})
    x, weight = builder.add_tensor("x", "batch tokens hidden"), builder.add_tensor("w", "hidden wide", "fp32")
    y = builder.add_tensor("y", "batch tokens wide")
    dims = "batch tokens hidden wide"
    builder.add_operator(
        "up", OperatorKind.MATMUL, dims, (x,), (y,), parameters=(weight,), reduced="hidden", flops_per_point=2
    )
    builder.add_elementwise("act", builder.tensor_dims(y), (y,), (y,), saved=(y,))
    block = builder.build_block("mlp", (x,), (y,), repeat=3, layer=True)
    assert block.tensor["x"].nbytes == 1 * 4 * 8 * 2 and block.tensor["w"].nbytes == 8 * 16 * 4
    assert [operator.flops for operator in block.operators] == [2 * 4 * 8 * 16, 0]
    assert block.operators[1].dims == (("batch", 1), ("tokens", 4), ("wide", 16))
    assert (block.repeat, block.layer, block.num_parameters) == (3, True, 8 * 16)


def test_equal_sizes_have_one_graph_and_others_another() -> None:
    spec = Transformer(2, 16, 2, 2, 32, 64)
    assert build(spec, 8, "bf16") is build(Transformer(2, 16, 2, 2, 32, 64), 8, "bf16")
    assert build(spec, 16, "bf16").flops > 2 * build(spec, 8, "bf16").flops - 1  # attention grows with the square
    assert build(spec, 8, "fp32").blocks[1].tensor != build(spec, 8, "bf16").blocks[1].tensor
