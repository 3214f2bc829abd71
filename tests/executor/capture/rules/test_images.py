"""Convolutions and pooling: FLOP by hand, and space that no axis cuts."""

import pytest

pytest.importorskip("torch")
from torch.nn import functional

from meshwise.simulator.operator_graph import OperatorKind

from .single import operators_of, random

IMAGE = random(4, 6, 8, 8)


def test_a_convolution_multiplies_its_window_at_every_point() -> None:
    found = operators_of(lambda x, w: functional.conv2d(x, w, padding=1), IMAGE, (5, 6, 3, 3))["conv2d"]
    assert found.kind is OperatorKind.CONVOLUTION
    assert found.flops == 2 * 5 * 6 * 3 * 3 * 8 * 8
    assert set(found.reduced) == {"channels_2", "kernel_height", "kernel_width"}
    assert {"height", "width"} <= set(found.uncut) and not {"batch", "channels", "channels_2"} & set(found.uncut)


def test_channels_of_groups_are_not_cut() -> None:
    found = operators_of(lambda x, w: functional.conv2d(x, w, groups=2), IMAGE, (4, 3, 1, 1))["conv2d"]
    assert found.flops == 2 * 4 * 3 * 8 * 8
    assert any("channels" in dim for dim in found.uncut)


def test_pooling_reads_space_and_sums_nothing() -> None:
    found = operators_of(lambda x, w: functional.max_pool2d(x * w, 2), IMAGE, (8,))["max_pool2d"]
    assert found.kind is OperatorKind.POOLING and found.reduced == () and found.flops == 0
    assert [size for dim, size in found.dims if dim in ("height_2", "width_2")] == [4, 4]
