"""Matrix products by hand, and laws that hold for any shape."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.simulator.catalog import accelerator, accelerator_names
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.compute import Pass, matmul_time, operator_time
from meshwise.simulator.machine.kernels import Matmul, MatmulModel, compute_time, soft_roofline
from meshwise.simulator.models.experts import Experts
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer

SIZES = st.integers(1, 8192)
FITTED = ("a100-80gb", "l40s-48gb", "h100-80gb", "h200-141gb", "b200-180gb", "gb200-186gb", "v100-16gb")
PEAK = 1e6


def seconds(model: MatmulModel, m: int, n: int, k: int, count: int = 1) -> float:
    return compute_time(model, PEAK, Matmul(count, m, n, k))


def test_an_ideal_device_computes_at_its_peak() -> None:
    # 2 * 10 * 20 * 30 = 12,000 FLOP at 1 MFLOP/s
    assert seconds(MatmulModel(), 10, 20, 30) == pytest.approx(0.012)
    assert seconds(MatmulModel(fraction=0.5), 10, 20, 30) == pytest.approx(0.024)
    # k of 30 and 30 more to begin and end
    assert seconds(MatmulModel(half_k=30), 10, 20, 30) == pytest.approx(0.024)


def test_tiles_are_single_elements_where_no_others_are_named() -> None:
    # 3 x 5 elements one after another on one processor: nothing is rounded up
    assert seconds(MatmulModel(units=1), 3, 5, 7) == pytest.approx(2 * 3 * 5 * 7 / PEAK)


def test_a_last_round_costs_a_full_one_or_its_part_or_between() -> None:
    # 5 tiles of 10 x 10 on 4 processors: 2 rounds of 4 tiles, or 5 / 4, or half way
    one = 2 * 4 * 100 * 30 / PEAK
    tiles = MatmulModel(tiles=((10, 10),), units=4)
    for waves, rounds in ((1.0, 2.0), (0.0, 1.25), (0.5, 1.625)):
        assert seconds(replace(tiles, waves=waves), 50, 10, 30) == pytest.approx(rounds * one)
    # fewer tiles than processors wait for no round to fill, but cost one: 3 of 4, with nothing to split (k of 1)
    assert seconds(replace(tiles, waves=0.0), 30, 10, 1) == pytest.approx(one / 30)


def test_few_tiles_are_cut_into_parts_which_begin_and_end_twice() -> None:
    # one tile on 4 processors: whole 30 + 5, halves 15 + 2 * 5, quarters 8 + 10, eighths in 2 rounds 2 * (4 + 10)
    model = MatmulModel(tiles=((10, 10),), units=4, half_k=5)
    assert seconds(model, 10, 10, 30) == pytest.approx(2 * 4 * 100 * (8 + 10) / PEAK)
    # of 5 tiles, whole: 2 rounds; cut in two they would fill 10 / 4 > 2 rounds
    assert seconds(model, 50, 10, 30) == pytest.approx(2 * 2 * 4 * 100 * (30 + 5) / PEAK)


def test_a_batch_fills_processors_with_the_tiles_of_all_its_products() -> None:
    # products of one tile of 10 x 10 on 4 processors, with nothing to split (k of 1): 4 in a round, 5 in two
    model = MatmulModel(tiles=((10, 10),), units=4)
    one = 2 * 4 * 100 * 1 / PEAK
    assert [seconds(model, 10, 10, 1, count) for count in (1, 4, 5)] == pytest.approx([one, one, 2 * one])


def test_halves_win_where_quarters_need_a_second_round() -> None:
    # 2 tiles on 4 processors: whole 30 + 5, halves in one round 15 + 2 * 5 = 25, quarters in two 2 * (8 + 10) = 36
    model = MatmulModel(tiles=((10, 10),), units=4, half_k=5)
    assert seconds(model, 20, 10, 30) == pytest.approx(2 * 4 * 100 * 25 / PEAK)


def test_a_multiplication_and_an_addition_are_two_flop() -> None:
    assert Matmul(2, 3, 4, 5).flops == 2 * 2 * 3 * 4 * 5


def test_the_best_tile_is_chosen_and_smaller_ones_load_more() -> None:
    # 20 x 20 has 0.1 loads a multiplication, 10 x 10 has 0.2: with edge 10 it runs at (1 + 1) / (1 + 2)
    model = MatmulModel(tiles=((20, 20), (10, 10)), units=1, edge=10)
    full, small = 2 * 400 * 30 / PEAK, 2 * 100 * 30 * 1.5 / PEAK
    assert seconds(model, 20, 20, 30) == pytest.approx(full)
    assert seconds(model, 10, 10, 30) == pytest.approx(small)
    assert seconds(model, 10, 20, 30) == pytest.approx(2 * small)
    assert seconds(model, 10, 30, 30) == pytest.approx(3 * small)
    assert seconds(model, 20, 30, 30) == pytest.approx(min(2 * full, 6 * small))


def test_dtypes_may_reach_another_part_of_their_peak() -> None:
    model = MatmulModel(fraction=0.8, fractions=(("fp8", 0.4),))
    product = Matmul(1, 10, 10, 10)
    assert compute_time(model, PEAK, product, "fp8") == pytest.approx(2 * compute_time(model, PEAK, product, "bf16"))


def test_experts_take_a_launch_each() -> None:
    device = Accelerator("d", (("fp32", 1e12),), 1e9, 1e15, matmul=MatmulModel(product_launch=3e-6))
    product = Matmul(8, 10, 10, 10)
    alone = matmul_time(device, "fp32", product)
    assert matmul_time(device, "fp32", product, grouped=True) == pytest.approx(alone + 8 * 3e-6)
    spec = Transformer(1, 16, 2, 2, 32, 64, ffn_kind="swiglu", positions="rotary", experts=Experts(8, 2, 32))
    layer = next(block for block in build(spec, 32, "fp32").blocks if block.layer)
    found = next(operator for operator in layer.operators if operator.name == "expert_up")
    plain = replace(device, matmul=MatmulModel())
    for direction, products in ((Pass.FORWARD, 1), (Pass.BACKWARD, 2)):
        more, less = (operator_time(each, layer, found, dict(found.dims), direction) for each in (device, plain))
        assert more - less == pytest.approx(products * 8 * 3e-6)


def test_both_gradients_may_be_given_one_rate() -> None:
    model = MatmulModel(fraction=0.5).with_gradient(0.75)
    assert (model.fraction, model.data_gradient, model.weight_gradient) == (0.5, 0.75, 0.75)


def test_sustained_work_slows_products_that_compute_and_not_those_that_wait_for_memory() -> None:
    device = Accelerator("d", (("fp32", 1e9),), 1e9, 1e12, sustained=1.25)
    assert matmul_time(device, "fp32", Matmul(1, 100, 100, 100)) == pytest.approx(1.25 * 2e6 / 1e9)
    slow = replace(device, memory_bandwidth=1.0)
    assert matmul_time(slow, "fp32", Matmul(1, 100, 100, 100)) == pytest.approx(4 * 3e4)


def test_products_of_8_bits_are_as_fast_in_training_as_in_a_burst() -> None:
    device = Accelerator("d", (("fp8", 1e9), ("bf16", 1e9)), 1e9, 1e12, sustained=1.25)
    wide, narrow = (matmul_time(device, dtype, Matmul(1, 100, 100, 100)) for dtype in ("bf16", "fp8"))
    assert wide == pytest.approx(1.25 * narrow)


def test_a_soft_roofline_is_the_fourth_root_of_fourth_powers() -> None:
    assert soft_roofline(1.0, 1.0, 4.0) == pytest.approx(2**0.25)
    assert soft_roofline(2.0, 0.0, 4.0) == 2.0
    assert soft_roofline(0.0, 0.0, 4.0) == 0.0
    assert soft_roofline(2.0, 3.0, inf) == 3.0


@pytest.mark.parametrize("name", FITTED)
@given(m=SIZES, n=SIZES, k=SIZES, more=st.integers(0, 4096))
def test_more_work_takes_longer_in_every_size(name: str, m: int, n: int, k: int, more: int) -> None:
    device = accelerator(name)
    one = matmul_time(device, "fp16", Matmul(1, m, n, k))
    for larger in (Matmul(1, m + more, n, k), Matmul(1, m, n + more, k), Matmul(1, m, n, k + more), Matmul(2, m, n, k)):
        assert matmul_time(device, "fp16", larger) >= one * (1 - 1e-12)


@pytest.mark.parametrize("name", accelerator_names())
@given(m=SIZES, n=SIZES, k=SIZES)
def test_nothing_beats_the_peak_or_the_memory_of_the_data_sheet(name: str, m: int, n: int, k: int) -> None:
    device = accelerator(name)
    dtype, peak = device.peak_flops[0]
    product = Matmul(1, m, n, k)
    wide = {"fp64": 8, "fp32": 4, "tf32": 4}.get(dtype, 2)
    traffic = wide * (m * k + k * n + m * n)
    found = matmul_time(device, dtype, product, traffic)
    assert found >= product.flops / peak * (1 - 1e-12)
    assert found >= traffic / device.memory_bandwidth * (1 - 1e-12)


def test_wave_steps_are_the_a100s() -> None:
    """Published, n = k = 4096: a row more than 768 takes the A100 from 112 to 218 us; the H100 steps by 1.22 at most.

    97 tiles of 128 x 256 or more begin a second round of 108 processors; 7 rows of tiles are 7 / 6 of 6.
    """
    steps = {}
    for name in ("a100-80gb", "h100-80gb"):
        before, after = (matmul_time(accelerator(name), "bf16", Matmul(1, m, 4096, 4096)) for m in (768, 769))
        steps[name] = after / before
    assert 1.2 < steps["a100-80gb"] < 2.0
    assert 1.0 < steps["h100-80gb"] <= 7 / 6


@pytest.mark.parametrize("name", FITTED)
def test_a_skinny_product_streams_its_weight(name: str) -> None:
    device = accelerator(name)
    weight = 2 * 16384 * 16384
    share = weight / matmul_time(device, "fp16", Matmul(1, 16, 16384, 16384)) / device.memory_bandwidth
    assert 0.5 < share < 0.9


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"fraction": 1.1}, r"fraction lies in \(0, 1\]"),
        ({"fractions": (("fp8", 0.0),)}, r"fraction lies in \(0, 1\]"),
        ({"half_k": -1}, "not negative"),
        ({"tiles": ()}, "not negative"),
        ({"tiles": ((0, 4),)}, "not negative"),
        ({"waves": 2.0}, "waves lie in"),
        ({"waves": -0.1}, "waves lie in"),
        ({"fraction": 0.0}, r"fraction lies in \(0, 1\]"),
        ({"batched": 2.1}, r"batched lies in \(0, 2\]"),
        ({"data_gradient": 2.1}, r"data_gradient lies in \(0, 2\]"),
        ({"product_launch": -1e-9}, "not negative"),
        ({"edge": -1e-9}, "not negative"),
        ({"sharpness": 0.5}, "sharpness is at least 1"),
        ({"weight_gradient": 0.0}, r"weight_gradient lies in \(0, 2\]"),
    ],
)
def test_nonsense_is_refused(figures: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MatmulModel(**figures)  # type: ignore[arg-type]
