"""What frameworks add to operators: hosts that wait, experts one by one, softmax and casts in several kernels."""

from dataclasses import replace

import pytest

from meshwise.simulator.collective import Collective
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.compute import Pass
from meshwise.simulator.models.experts import Experts
from meshwise.simulator.models.transformer import Transformer
from meshwise.simulator.operator_graph import OperatorKind
from meshwise.simulator.units import to_ticks
from meshwise.strategies.lowering.costs.layout import BlockLayout, BlockTraining
from meshwise.strategies.lowering.costs.operator import EAGER_SOFTMAX_LAUNCHES, build_block_segments
from meshwise.strategies.lowering.costs.segments import Segment
from meshwise.strategies.lowering.rank_classes.machine import RankProfile
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.lowering.timing import RankClock, time_kernels
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.mesh import Axis, Mesh
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.problem import Training

from ...problems import find_block_cost, problem

ONE = Mesh((Axis("pipeline", 1), Axis("data", 1), Axis("tensor", 1)))
LAYER = Transformer(1, 64, 4, 4, 256, 512)
DEVICE = Accelerator("ideal", (("bf16", 1e15), ("fp8", 2e15)), 1e12, 1e9, launch=2**-20)


def list_segments(spec: Transformer, training: BlockTraining) -> dict[tuple[str, str], Segment]:
    """Return the segments of a layer by direction and operator."""
    layout = BlockLayout(spec.graph(32, "bf16").blocks[1], ONE, {}, 1, training)
    segments = build_block_segments(layout)
    pairs = ((Pass.FORWARD, segments.forward), (Pass.BACKWARD, segments.backward))
    return {(direction, segment.label): segment for direction, row in pairs for segment in row}


def test_where_the_host_waits_in_attention_the_device_stands_still_for_a_launch() -> None:
    launch, label = 2**-10, (Pass.FORWARD, "attention")
    plain, waiting = (list_segments(LAYER, BlockTraining(waits_in_attention=waits)) for waits in (False, True))
    assert {key for key, segment in waiting.items() if segment.host_waits} == {label}
    assert {key for key in plain if plain[key].num_launches != waiting[key].num_launches} == {label}
    assert (waiting[label].host_waits, waiting[label].num_launches) == (1, plain[label].num_launches + 1)
    clock, replayed = (RankClock(RankProfile(DEVICE, seconds, {})) for seconds in (launch, 0.0))
    assert clock.count_ticks(waiting[label]) - clock.count_ticks(plain[label]) == to_ticks(launch)
    assert replayed.count_ticks(waiting[label]) == replayed.count_ticks(plain[label])


def test_experts_one_by_one_are_launched_one_by_one() -> None:
    spec = replace(LAYER, experts=Experts(count=8, top_k=2, ffn=64))
    grouped, looped = (list_segments(spec, BlockTraining(loops_experts=loops)) for loops in (False, True))
    changed = {key for key in grouped if grouped[key].num_launches != looped[key].num_launches}
    assert changed and all(
        (grouped[key].num_launches, looped[key].num_launches) == (1, 8)
        and looped[key].work.operator.kind is OperatorKind.GROUPED_MATMUL  # type: ignore[union-attr]
        for key in changed
    )


def test_a_softmax_of_torch_is_several_kernels() -> None:
    spec = replace(LAYER, attention="unfused")
    fused, composed = (list_segments(spec, BlockTraining(composed=kinds)) for kinds in ((), (OperatorKind.SOFTMAX,)))
    # bytes a score: 6 + 8 + 8 + 6 forward in 4 kernels, and 6 + 12 + 8 + 8 + 6 backward in 5
    for direction, num_bytes, num_kernels in ((Pass.FORWARD, 28, 4), (Pass.BACKWARD, 40, 5)):
        segment = composed[direction, "softmax"]
        assert (fused[direction, "softmax"].num_launches, segment.num_launches) == (1, EAGER_SOFTMAX_LAUNCHES)
        # 4 heads of 32 x 32 scores at 1e9 byte/s
        expected = num_kernels * DEVICE.launch + 4 * 32 * 32 * num_bytes / 1e9
        assert time_kernels(DEVICE, segment.work).ticks == pytest.approx(to_ticks(expected), rel=1e-6)  # type: ignore[arg-type]


def test_a_cast_in_three_kernels_moves_7_bytes_for_4() -> None:
    training = BlockTraining("fp8", keeps_quantised=True)
    fused, apart = (list_segments(LAYER, training._replace(scaling=scaling)) for scaling in ("delayed", "tensor"))
    for direction, name, elements in ((Pass.FORWARD, "up", 32 * 64), (Pass.BACKWARD, "up", 32 * 256)):
        ticks = [time_kernels(DEVICE, row[direction, name].work).ticks for row in (fused, apart)]  # type: ignore[arg-type]
        # what is cast is the input, 32 x 64, and in backward the gradient of the output, 32 x 256
        assert ticks[1] - ticks[0] == pytest.approx(to_ticks(2 * DEVICE.launch + elements * 3 / 1e9), abs=2)


def test_casts_of_rows_move_5_bytes_forward_and_22_of_both_operands_backward() -> None:
    training = BlockTraining("fp8", keeps_quantised=False)
    delayed, rows = (list_segments(LAYER, training._replace(scaling=scaling)) for scaling in ("delayed", "row"))
    # up: an input of 32 x 64, a weight of 64 x 256 and a result of 32 x 256; what is cast delayed moves 4 bytes
    image, weight, result = 32 * 64, 64 * 256, 32 * 256
    forward = 5 * (image + weight) - 4 * (image + weight)
    backward = 22 * (result + image + weight) - 4 * (result + weight)
    # a cast is two kernels instead of one: of the input and the weight, and of the gradient, the input and the weight
    for direction, num_bytes, num_launches in ((Pass.FORWARD, forward, 2), (Pass.BACKWARD, backward, 6 - 2)):
        ticks = [time_kernels(DEVICE, row[direction, "up"].work).ticks for row in (delayed, rows)]  # type: ignore[arg-type]
        assert ticks[1] - ticks[0] == pytest.approx(to_ticks(num_launches * DEVICE.launch + num_bytes / 1e9), abs=2)


def test_a_ring_of_torch_merges_parts_and_sends_keys_for_every_query_head() -> None:
    # 8 query heads of 16 share 2 heads of keys: 4 copies of tokens / 4 x 2 heads x 16 x 2 (keys and values) x 2 bytes
    context, small = 4, problem(hidden=128, heads=8, kv_heads=2, precision="bf16")
    segments = {}
    for name in ("torch", "torchtitan"):
        changed = replace(small, training=replace(small.training, framework=name))
        plan = complete(changed, Layout(data=8 // context, context=context, attention=Attention.RING))
        segments[name] = find_block_cost(StageCosts(changed), plan, "layers").work.segments
    tokens, itemsize = small.training.sequence // context, 2
    size = 2 * tokens * 2 * 16 * itemsize
    shift_sizes = {
        name: [
            [segment.size for segment in row if segment.collective is Collective.SHIFT]
            for row in (block.forward, block.backward)
        ]
        for name, block in segments.items()
    }
    assert shift_sizes["torch"] == [[size] * 3, [size, 2 * size, 2 * size, size, size]]
    # gradients of keys and values are in fp32, twice the bytes
    assert shift_sizes["torchtitan"] == [[4 * size] * 3, [4 * size, 12 * size, 12 * size, 8 * size, 8 * size]]
    labels = [[s.label for s in row] for row in (segments["torchtitan"].forward, segments["torchtitan"].backward)]
    assert labels[0].count("merge of parts") == 3 and labels[1].count("sums of gradients") == 4
    (merge, *_) = (s for s in segments["torchtitan"].forward if s.label == "merge of parts")
    assert merge.work.num_bytes == 51 * tokens * 128


def test_blocks_depend_on_what_the_framework_says() -> None:
    scaling, titan = (BlockTraining.of(Training(8, 8, framework=name)) for name in ("scaling", "torchtitan"))
    assert (scaling.waits_in_attention, titan.waits_in_attention) == (True, False)
    assert BlockTraining.of(Training(8, 8, framework="accelerate")).loops_experts
    assert (titan.scaling, BlockTraining.of(Training(8, 8)).scaling) == ("tensor", "delayed")
    assert BlockTraining.of(Training(8, 8, framework="torchtitan", fp8_scaling="row")).scaling == "row"
    assert titan.composes_ring and not scaling.composes_ring
