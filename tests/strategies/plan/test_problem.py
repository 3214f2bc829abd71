"""Bytes of one parameter as papers count them, and the memory that a plan may use."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.strategies.plan.problem import OPTIMIZERS, PRECISIONS, Training

from ..problems import problem


@pytest.mark.parametrize(
    ("precision", "optimizer", "parameter", "gradient", "states"),
    [
        ("bf16", "adamw", 2, 4, 12),  # ZeRO, section 3.1: K = 12; Megatron-LM accumulates in fp32
        ("fp16", "adamw", 2, 2, 12),
        ("fp32", "adamw", 4, 4, 8),
        ("bf16", "sgd", 2, 4, 8),
        ("fp32", "lion", 4, 4, 4),
        ("fp64", "adamw", 8, 8, 16),
        ("bf16", "adafactor", 2, 4, 4),
    ],
)
def test_bytes_of_a_parameter(precision: str, optimizer: str, parameter: int, gradient: int, states: int) -> None:
    training = Training(8, 32, precision, optimizer)
    assert (training.parameter_bytes, training.gradient_bytes, training.optimizer_bytes) == (
        parameter,
        gradient,
        states,
    )


@given(st.sampled_from(PRECISIONS), st.sampled_from(sorted(OPTIMIZERS)))
def test_frozen_weights_have_no_gradients_and_no_states(precision: str, optimizer: str) -> None:
    training = Training(8, 32, precision, optimizer, frozen=True)
    kept = training.gradient_bytes, training.updated_bytes, training.optimizer_bytes, training.factored_bytes
    assert kept == (0, 0, 0, 0)
    assert training.parameter_bytes == Training(8, 32, precision, optimizer).parameter_bytes


@given(st.floats(1, 2), st.floats(0, 100))
def test_what_is_needed_for_what_is_usable_is_the_memory(margin: float, reserved: float) -> None:
    from dataclasses import replace

    device = Accelerator("any", (("bf16", 1e12),), memory=200.0, memory_bandwidth=1.0, reserved=reserved)
    small = replace(problem(), memory_margin=margin)
    assert small.needed_memory(device, small.usable_memory(device)) == pytest.approx(200.0)
    assert small.usable_memory(device) <= 200.0 + 1e-9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_batch": 0}, "global_batch and sequence are at least 1, met 0, 32"),
        ({"precision": "int8"}, "precision is one of .*, met int8"),
        ({"optimizer": "adam"}, "optimizer is one of .*, met adam"),
        ({"gradient_precision": "bf16"}, "gradient_precision is one of fp32, same, met bf16"),
        ({"framework": "jax"}, "framework is one of .*, met jax"),
    ],
)
def test_what_is_not_known_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Training(**{"global_batch": 8, "sequence": 32} | change)  # type: ignore[arg-type]
