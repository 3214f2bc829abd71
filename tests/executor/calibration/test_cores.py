"""A calibration turns measurements into the figures that reproduce them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.executor.calibration.cores import (
    count_launches,
    count_traffic,
    find_best_rate,
    fit_attention,
    fit_matmul,
    measure_cores,
)
from meshwise.executor.calibration.figures import ATTENTIONS, MATMULS, TINY_MODEL
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.compute import Pass, matmul_time, operator_time
from meshwise.simulator.machine.kernels import AttentionModel, Matmul, MatmulModel
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.simulator.operator_graph import Block

PEAK = 1e11


@pytest.mark.parametrize(("fraction", "half_k"), [(0.9, 0.0), (0.8, 50.0), (1.0, 200.0)])
def test_fit_finds_the_model_that_made_the_times(fraction: float, half_k: float) -> None:
    rows = [(m, n, k, 2 * m * n * k / (PEAK * fraction * k / (k + half_k))) for m, n, k in MATMULS]
    found = fit_matmul(PEAK, rows)
    assert found.fraction == pytest.approx(fraction)
    assert found.half_k == pytest.approx(half_k, abs=1e-6)
    machine = Accelerator("fitted", (("fp32", PEAK),), memory=1e9, memory_bandwidth=1e15, matmul=found)
    for m, n, k, seconds in rows:
        assert matmul_time(machine, "fp32", Matmul(1, m, n, k)) == pytest.approx(seconds)


def test_fit_has_no_gain_from_a_short_k() -> None:
    rows = [(8, 8, k, 2 * 64 * k * (1.0 if k < 100 else 1.5) / PEAK) for k in (16, 64, 256)]
    found = fit_matmul(PEAK, rows)
    assert found.half_k == 0.0
    assert 1 / 1.5 < found.fraction < 1


@given(st.floats(0.1, 1.0), st.floats(0.1, 1.0), st.floats(1.0, 200.0), st.floats(1.0, 20.0))
def test_fit_finds_the_attention_that_was_measured(
    forward: float, backward: float, half_head: float, launches: float
) -> None:
    # seconds are the simulator's own for the attention of a model of these sizes, launches of 1 us among them
    model = AttentionModel(forward=forward, backward=backward, half_head=half_head, launch=launches * 1e-6)
    ideal = MatmulModel(fraction=1.0)
    machine = Accelerator("measured", (("fp32", PEAK),), 1e9, 1e15, launch=1e-6, matmul=ideal, attention=model)
    rows = []
    for heads, tokens, head_dim in ATTENTIONS:
        layer = _layer(heads, tokens, head_dim)
        (operator,) = (each for each in layer.operators if each.name == "attention")
        sizes = dict(operator.dims) | {"batch": 1}
        seconds = (operator_time(machine, layer, operator, sizes, direction) for direction in Pass)
        rows.append((heads, tokens, head_dim, *seconds))
    found = fit_attention(PEAK, 1e-6, rows)
    meant = forward, backward, half_head, launches * 1e-6
    assert (found.forward, found.backward, found.half_head, found.launch) == pytest.approx(meant, rel=1e-3)


def _layer(heads: int, tokens: int, head_dim: int) -> Block:
    width = heads * head_dim
    spec = Transformer(1, width, heads, heads, width, 256, tied_embeddings=False)
    return next(block for block in build(spec, tokens, "fp32").blocks if block.layer)


def test_best_rate_bounds_every_measured_product() -> None:
    rows = [(m, n, k, 1e-4 + 2 * m * n * k / PEAK) for m, n, k in MATMULS]
    assert find_best_rate(rows) == pytest.approx(PEAK / (1 + 1e-4 * PEAK / (2 * 1024**3)))


def test_launches_of_a_layer() -> None:
    # 4 products of 3 launches; 2 norms, attention, activation and 2 residuals of 2
    (layer,) = (block for block in build(TINY_MODEL, 2, "fp32").blocks if block.layer)
    assert count_launches(layer.operators) == 4 * 3 + 6 * 2


def test_traffic_of_a_norm() -> None:
    # (batch 4, sequence 128, hidden 256) fp32: forward reads and writes it; backward reads the
    # saved input and the gradient and writes a gradient
    assert count_traffic("norm") == 5 * 4 * 128 * 256 * 4


def test_nothing_to_measure() -> None:
    with pytest.raises(ValueError, match="processes is at least 1 and seconds positive, met 0 and 1"):
        measure_cores(processes=0, seconds=1.0)
