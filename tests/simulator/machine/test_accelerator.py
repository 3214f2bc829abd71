"""Accelerators: a device at half the speed takes twice as long for everything, and what cannot be is refused."""

from dataclasses import replace

import pytest

from meshwise.simulator.catalog import accelerator
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.compute import Pass, operator_time
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer

DEVICE = Accelerator("any", (("bf16", 100.0), ("fp8", 200.0)), memory=80.0, memory_bandwidth=10.0, launch=1.0)


def test_bandwidth_is_that_of_the_kind_of_its_backward_or_of_all_others() -> None:
    device = replace(
        DEVICE,
        kernel_bandwidth=(("norm", 0.4), ("norm_backward", 0.2), ("elementwise", 0.8)),
        kernel_bandwidth_default=0.5,
    )
    assert device.bandwidth("norm") == 4.0 and device.bandwidth("norm", backward=True) == 2.0
    assert device.bandwidth("rms_norm") == 4.0  # that of norms, where it has none of its own
    assert device.bandwidth("elementwise", backward=True) == device.bandwidth("activation") == 8.0
    assert device.bandwidth("softmax") == 5.0


@pytest.mark.parametrize("name", ["a100-80gb", "h100-80gb"])
def test_a_straggler_takes_as_much_longer_for_every_operator(name: str) -> None:
    device = accelerator(name)
    slow = device.at_speed(0.5)
    for block in build(Transformer(1, 1024, 16, 16, 4096, 32000), 512, "bf16").blocks:
        for operator in block.operators:
            for way in Pass:
                one, two = (operator_time(each, block, operator, dict(operator.dims), way) for each in (device, slow))
                assert two == pytest.approx(2 * one)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peak_flops": ()}, "peak_flops are positive"),
        ({"memory": 0.0}, "memory and bandwidth are positive"),
        ({"launch": -1.0}, "launch and reserved are not negative"),
        ({"sustained": 0.9}, "sustained is at least 1, met 0.9"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(DEVICE, **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="any has no peak for fp32; known: bf16, fp8"):
        DEVICE.peak("fp32")
