"""Attention: windows, options of decoders, and both ways to compute the core."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.simulator.models.attention import visible_share
from meshwise.simulator.models.encoders import T5
from meshwise.simulator.models.model import build
from meshwise.simulator.models.presets import PRESETS
from meshwise.simulator.models.transformer import Transformer

SPEC = Transformer(2, 64, 4, 2, 128, 256, ffn_kind="swiglu", positions="rotary", tied_embeddings=False)


@given(st.integers(1, 60), st.integers(1, 80))
def test_a_window_leaves_the_area_that_one_counts(sequence: int, window: int) -> None:
    # row i of the triangle below the diagonal is i + 1/2 wide, and the window cuts that to what is within it: the
    # corner beyond it is a triangle of sequence - window
    corner = sum(i + 0.5 for i in range(max(sequence - window, 0)))
    triangle = sum(i + 0.5 for i in range(sequence))
    assert visible_share(sequence, window) == pytest.approx(1 - corner / triangle)


def test_a_window_shorter_than_the_sample_makes_attention_cheaper() -> None:
    long, short = (build(replace(SPEC, window=window), 128, "fp32").flops for window in (None, 32))
    # 4 heads of 16: 4 * 16 FLOP a pair, 128^2 pairs in 2 layers, of which 1 - 32 * (256 - 32) / 128^2 fall away
    assert long - short == pytest.approx(2 * 4 * 4 * 16 * (128**2 - 32 * (256 - 32)))


def test_options_add_their_parameters() -> None:
    base = build(SPEC, 16, "fp32").num_parameters
    heads, group = 2, 2
    added = {
        # the bias of 2 heads of keys, values and 2 queries each, 16 wide, in 2 layers
        "biases": ("qkv", 2 * heads * (group + 2) * 16),
        # one weight of 16 for queries and one for keys
        "qk_norm": (True, 2 * 2 * 16),
        # 5 norms of 64 get a bias
        "norm": ("layer", 5 * 64),
        # heads of 32: twice the four projections 64 x 64 + 2 * 64 x 32 + 64 x 64
        "kv_channels": (32, 2 * (2 * 64 * 64 + 2 * 64 * 32)),
    }
    for field, (value, more) in added.items():
        changed = replace(SPEC, **{field: value})  # type: ignore[arg-type]
        assert build(changed, 16, "fp32").num_parameters == base + more, field


def test_a_table_of_positions_has_the_rows_that_are_stated() -> None:
    spec = replace(SPEC, positions="learned", max_positions=1000)
    assert build(spec, 16, "fp32").num_parameters == build(SPEC, 16, "fp32").num_parameters + 1000 * 64
    with pytest.raises(ValueError, match="has 1000 positions, met a sequence of 1001 tokens"):
        build(spec, 1001, "fp32")


def test_parallel_branches_read_one_input() -> None:
    # one sum of three in the place of two sums of two; products are the same
    serial, parallel = (build(replace(SPEC, parallel_residual=on), 16, "fp32").blocks[1] for on in (False, True))
    assert parallel.flops == serial.flops and parallel.num_parameters == serial.num_parameters
    norms = [operator.inputs for operator in parallel.operators if operator.name.endswith("norm")]
    assert norms == [("x",), ("x",)]
    assert parallel.operators[-1].inputs == ("projected", "narrow", "x")


@given(st.sampled_from([16, 48]), st.sampled_from(["mistral-7b", "gpt3-125m", "deepseek-v2-lite"]))
def test_the_core_costs_the_same_flop_fused_or_not(sequence: int, name: str) -> None:
    spec = PRESETS[name]
    assert build(spec, sequence, "bf16").flops == build(replace(spec, attention="unfused"), sequence, "bf16").flops


def test_the_decoder_attends_to_tokens_of_the_encoder() -> None:
    # 1 layer, hidden 8, 2 heads of 3: scores and contexts 2 * 2 * 2 * 3 FLOP a pair of target and source
    spec = T5(1, 8, 2, 3, 16, 32, target_sequence=5)
    layer = build(spec, 7, "fp32").blocks[2]
    flops = {operator.name: operator.flops for operator in layer.operators}
    assert flops["cross_scores"] + flops["cross_context"] == 2 * 5 * 7 * 2 * 2 * 3
    assert flops["scores"] == 5 * 5 * 2 * 2 * 3
    assert flops["cross_key_value"] == 2 * 7 * 8 * 2 * (2 * 3)
