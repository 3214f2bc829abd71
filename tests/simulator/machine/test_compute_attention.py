"""Kernels of fused attention: what the field's older ones take beside the device's best."""

import pytest

from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.compute import Pass, operator_time
from meshwise.simulator.machine.kernels import KERNEL_SLOWDOWNS, AttentionModel
from meshwise.simulator.models.attention import ATTENTION_KERNELS
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.simulator.operator_graph import OperatorKind

IDEAL = Accelerator("ideal", (("bf16", 1e12),), 1e9, 1e18, attention=AttentionModel(1.0, 1.0, second=1.5))


def seconds(attention: str, direction: Pass) -> float:
    """Return the time of the core of one layer: 2 heads of 8, 64 tokens."""
    graph = build(Transformer(1, 16, 2, 2, 64, 100, attention=attention), 64, "bf16")
    block = next(block for block in graph.blocks if block.layer)
    cores = [each for each in block.operators if each.kind is OperatorKind.ATTENTION]
    return sum(operator_time(IDEAL, block, each, dict(each.dims), direction) for each in cores)


def test_the_best_kernel_takes_what_its_products_take() -> None:
    """4 * 2 heads * 64 queries * 32 keys seen * 8 wide = 131072 FLOP at 1e12 FLOP/s; backward 2.5 times."""
    assert seconds("flash", Pass.FORWARD) == pytest.approx(131072e-12)
    assert seconds("flash", Pass.BACKWARD) == pytest.approx(2.5 * 131072e-12)


@pytest.mark.parametrize(
    ("kernel", "times"), [("flash_2", (1.0, 1.0)), ("flash_1", (2.0, 2.0)), ("flash_triton", (1.4, 2.0))]
)
def test_an_older_kernel_takes_its_times_as_long(kernel: str, times: tuple[float, float]) -> None:
    """Dao 2023, section 4.1: FlashAttention-2 is twice as fast as the first, and 1.3 to 1.5 and 2 times as Triton."""
    assert kernel in KERNEL_SLOWDOWNS
    for direction, slower in zip(Pass, times, strict=True):
        assert seconds(kernel, direction) == pytest.approx(1.5 * slower * seconds("flash", direction))


def test_every_kernel_but_unfused_is_one_operator() -> None:
    assert [kernel for kernel in ATTENTION_KERNELS if not seconds(kernel, Pass.FORWARD)] == ["unfused"]


def test_no_kernel_is_faster_than_the_best() -> None:
    with pytest.raises(ValueError, match="second is at least 1"):
        AttentionModel(second=0.5)
