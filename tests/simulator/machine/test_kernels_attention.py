"""Fused attention by hand, and laws that hold for any shape."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.simulator.catalog import accelerator
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.compute import Pass, attention_time, operator_time
from meshwise.simulator.machine.kernels import AttentionModel, AttentionShape, MatmulModel, attention_compute_time
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer

RATE = 1e6
SHAPE = AttentionShape(heads=6, queries=100, keys=100, width=50.0, mean_keys=50.0, padded_width=50.0)
FITTED = ("a100-80gb", "h100-80gb", "h200-141gb", "b200-180gb")


def seconds(model: AttentionModel, shape: AttentionShape = SHAPE, units: int = 0, backward: bool = False) -> float:
    return attention_compute_time(model, RATE, units, shape, backward=backward)


def test_two_products_forward_and_five_backward() -> None:
    # 4 * 6 heads * 100 queries * 50 keys * 50 = 6 MFLOP
    assert SHAPE.flops == 6e6
    assert seconds(AttentionModel(forward=0.5, backward=0.25)) == pytest.approx(12.0)
    assert seconds(AttentionModel(forward=0.5, backward=0.25), backward=True) == pytest.approx(2.5 * 24.0)


def test_short_sequences_and_narrow_heads_run_at_half() -> None:
    whole = AttentionModel(forward=1.0, backward=1.0)
    assert seconds(replace(whole, half_sequence=50)) == pytest.approx(2 * 6.0)
    assert seconds(replace(whole, half_head=50)) == pytest.approx(2 * 6.0)
    # backward has the same exponentials to 5 products in place of 2: 50 + 50 / 2.5 = 70 of 50
    assert seconds(replace(whole, half_head=50), backward=True) == pytest.approx(2.5 * 6.0 * 70 / 50)


def test_blocks_round_up_and_compute_the_whole_diagonal() -> None:
    # 100 queries in blocks of 64 are 128; a causal block computes (64 - 1) / 2 keys more a query
    model = AttentionModel(forward=1.0, block=64)
    assert seconds(model) == pytest.approx(4 * 6 * 128 * (50 + 31.5) * 50 / RATE)
    full = replace(SHAPE, mean_keys=100.0)
    assert seconds(model, full) == pytest.approx(4 * 6 * 128 * 100 * 50 / RATE)


def test_the_longest_block_ends_alone() -> None:
    # 5 processors; the last block of 10 queries sees 100 keys while the others wait
    model = AttentionModel(forward=1.0, block=10, tail=1.0)
    alone = 4 * 10 * 100 * 50 * 5 / RATE
    assert seconds(model, units=5) - seconds(replace(model, tail=0.0), units=5) == pytest.approx(alone)
    assert seconds(model, units=5, backward=True) == seconds(replace(model, tail=0.0), units=5, backward=True)


def test_the_longest_block_of_backward_has_a_tail_of_its_own() -> None:
    # backward is 2.5 times forward: 10 queries of 100 keys, head dim 50, on 5 processors, and a quarter of it alone
    model = AttentionModel(backward=1.0, block=10, backward_tail=0.25)
    alone = 2.5 * 4 * 10 * 100 * 50 * 5 / RATE * 0.25
    found = seconds(model, units=5, backward=True) - seconds(replace(model, backward_tail=0.0), units=5, backward=True)
    assert found == pytest.approx(alone)
    assert seconds(AttentionModel(backward=1.0), units=5, backward=True) == pytest.approx(2.5 * 6.0)  # by default none


def test_backward_pads_the_narrower_of_both_head_dims() -> None:
    # queries of 75 and values of 25: 50 in the mean forward, 75 backward
    wide = replace(SHAPE, padded_width=75.0)
    assert seconds(AttentionModel(forward=1.0), wide) == pytest.approx(6.0)
    assert seconds(AttentionModel(backward=1.0), wide, backward=True) == pytest.approx(2.5 * 6.0 * 75 / 50)


def test_fused_attention_waits_for_its_traffic_and_for_the_kernels_around_it() -> None:
    # 6 MFLOP at 1 MFLOP/s, or 12 MB at half of 2 MB/s; and 3 s of kernels around the main one
    device = Accelerator(
        "d", (("fp32", 2e6),), 1e9, 2e6, matmul=MatmulModel(fraction=0.5), kernel_bandwidth=(("attention", 0.5),)
    )
    device = replace(device, attention=AttentionModel(forward=1.0, launch=3.0))
    assert attention_time(device, "fp32", SHAPE, Pass.FORWARD) == pytest.approx(3 + 6)
    assert attention_time(device, "fp32", SHAPE, Pass.FORWARD, traffic=12e6) == pytest.approx(3 + 12)


def test_an_operator_has_the_shape_of_its_tensors() -> None:
    # 4 query heads over 2 of keys and values, head dim 16, 32 tokens, causal: half of 4 * 4 * 32 * 32 * 16 FLOP
    spec = Transformer(2, 64, 4, 2, 256, 128)
    layer = next(block for block in build(spec, 32, "fp32").blocks if block.layer)
    found = next(operator for operator in layer.operators if operator.name == "attention")
    device = Accelerator("d", (("fp32", RATE),), 1e9, 1e30, launch=0.5, matmul=MatmulModel(fraction=0.5))
    for sizes, factor in (({}, 1.0), ({"batch": 3}, 3.0), ({"heads": 1}, 0.5)):
        time = operator_time(device, layer, found, dict(found.dims) | sizes, Pass.FORWARD)
        assert time == pytest.approx(0.5 + factor * 4 * 4 * 32 * 32 * 16 / 2 / (RATE * 0.5 * 0.75))
    long = replace(device, attention=AttentionModel(half_sequence=16.0))
    times = [operator_time(each, layer, found, dict(found.dims), Pass.BACKWARD) - 0.5 for each in (device, long)]
    assert times[1] / times[0] == pytest.approx(2.0)  # a query sees 16 keys in the mean


@pytest.mark.parametrize("name", FITTED)
@given(st.integers(1, 64), st.integers(1, 16384), st.sampled_from((64, 128, 256)), st.booleans(), st.sampled_from(Pass))
def test_nothing_beats_the_peak_and_longer_takes_longer(
    name: str, heads: int, tokens: int, width: int, causal: bool, direction: Pass
) -> None:
    device = accelerator(name)

    def time(length: int) -> float:
        shape = AttentionShape(heads, length, length, width, length / (1 + causal), width)
        found = attention_time(device, "fp16", shape, direction)
        assert found >= shape.flops * (2.5 if direction is Pass.BACKWARD else 1.0) / device.peak("fp16")
        return found

    assert time(tokens) <= time(tokens + 1) <= time(2 * tokens)


@pytest.mark.parametrize("name", ["a100-80gb", "b200-180gb"])
def test_backward_takes_two_to_three_and_a_half_times_forward(name: str) -> None:
    """Published: 2.9 on the A100, 2.3 at 4k and 3.0 at 32k tokens on the B200."""
    for tokens in (4096, 32768):
        shape = AttentionShape(32, tokens, tokens, 128, tokens / 2, 128)
        forward, backward = (attention_time(accelerator(name), "bf16", shape, each) for each in Pass)
        assert 2.0 < backward / forward < 3.7


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="forward and backward are positive"):
        AttentionModel(forward=0.0)
    for name in ("half_sequence", "half_head", "tail", "backward_tail", "launch"):
        with pytest.raises(ValueError, match="not negative"):
            AttentionModel(**{name: -1e-9})
    with pytest.raises(ValueError, match="not negative"):
        AttentionModel(block=0)
    with pytest.raises(ValueError, match="forward and backward are positive"):
        AttentionModel(backward=0.0)
    with pytest.raises(ValueError, match="at most as fast as the peak"):
        Accelerator("d", (("fp32", 1.0),), 1.0, 1.0, attention=AttentionModel(forward=1.1))
    with pytest.raises(ValueError, match="sustained is at least 1"):
        Accelerator("d", (("fp32", 1.0),), 1.0, 1.0, sustained=0.9)
