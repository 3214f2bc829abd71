"""Mixture of experts: capacity, FLOP, and what is refused."""

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.simulator.models.experts import Experts
from meshwise.simulator.models.model import build
from meshwise.simulator.models.presets import PRESETS
from meshwise.simulator.models.transformer import Transformer

SPEC = Transformer(2, 64, 4, 2, 128, 256, ffn_kind="swiglu", positions="rotary", experts=Experts(8, 2, 32))


def with_experts(**changes: object) -> Transformer:
    return replace(SPEC, experts=replace(Experts(8, 2, 32), **changes))  # type: ignore[arg-type]


@given(st.integers(1, 64), st.integers(1, 4096), st.data())
def test_experts_have_room_for_every_token_and_less_than_one_slot_each_to_spare(
    count: int, sequence: int, data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, count))
    room = count * Experts(count, top_k, 1).sizes(sequence)["capacity"]
    assert sequence * top_k <= room < sequence * top_k + count


def test_a_token_costs_its_experts_and_no_others() -> None:
    # 8 experts of width 32 with 3 matrices of 64 x 32 each; 16 tokens to 2 of them, 4 an expert
    layer = build(SPEC, 16, "fp32").blocks[1]
    flops = {operator.name: operator.flops for operator in layer.operators}
    assert flops["expert_up"] == 16 * 2 * 2 * 2 * 64 * 32
    assert flops["expert_down"] == 16 * 2 * 2 * 64 * 32
    assert flops["router"] == 16 * 2 * 64 * 8


def test_experts_are_gated_where_the_model_is() -> None:
    # two matrices of 64 x 32 in the place of three, in 8 experts
    gated, plain = (
        build(replace(SPEC, ffn_kind=kind, norm="rms", biases="none"), 16, "fp32").blocks[1]
        for kind in ("swiglu", "gelu")
    )
    assert gated.num_parameters - plain.num_parameters == 8 * 64 * 32
    assert gated.flops - plain.flops == 2 * 16 * 2 * 64 * 32


def test_shared_experts_are_a_dense_layer_of_their_own() -> None:
    plain, shared = build(SPEC, 16, "fp32").blocks[1], build(with_experts(shared=2), 16, "fp32").blocks[1]
    assert shared.num_parameters - plain.num_parameters == 3 * 64 * (2 * 32)
    assert shared.flops - plain.flops == 2 * 16 * 3 * 64 * (2 * 32)


@given(st.integers(1, 512), st.sampled_from([1.0, 1.25, 2.0]))
def test_slots_grow_with_the_capacity_factor(sequence: int, factor: float) -> None:
    assert Experts(8, 2, 32, capacity_factor=factor).sizes(sequence)["capacity"] == ceil(sequence * 2 * factor / 8)


def test_all_experts_that_take_every_token_cost_as_much_as_a_dense_layer() -> None:
    # 8 experts of 32, all chosen, are one dense feed-forward layer of 256, and a router
    dense = build(replace(SPEC, ffn=256, experts=None), 16, "fp32").blocks[1]
    all_of_them = build(with_experts(top_k=8), 16, "fp32").blocks[1]
    assert all_of_them.flops == dense.flops + 2 * 16 * 64 * 8
    assert all_of_them.num_parameters == dense.num_parameters + 64 * 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 9}, r"top_k is at most count\(8\), met 9; nearest: 8"),
        ({"count": 0}, "at least 1"),
        ({"shared": -1}, "shared and dense_layers 0"),
        ({"capacity_factor": 0.5}, r"capacity_factor is 1 to count\(8\), met 0.5"),
        ({"imbalance": 5.0}, r"imbalance is 1 to count\(8\) / top_k\(2\) = 4, met 5.0"),
        ({"dense_layers": 2}, r"dense_layers are fewer than layers\(2\), met 2"),
    ],
)
def test_nonsense_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_experts(**change)


def test_latent_attention_has_its_own_heads() -> None:
    with pytest.raises(ValueError, match="latent: attention has kv_heads equal to heads"):
        replace(PRESETS["deepseek-v2-lite"], kv_heads=8)


def test_latent_attention_multiplies_queries_and_values_of_their_own_widths() -> None:
    # a pair of tokens costs each of 16 heads 2 * (128 + 64) FLOP for the score and 2 * 128 for the value
    layer = build(PRESETS["deepseek-v2-lite"], 64, "bf16").blocks[2]
    attention = next(operator for operator in layer.operators if operator.name == "attention")
    assert attention.flops == 16 * 64 * 64 * (2 * 192 + 2 * 128)
