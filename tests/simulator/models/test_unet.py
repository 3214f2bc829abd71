"""A block of the U-Net against the layers of torch."""

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from meshwise.simulator.models.unet import UNet  # noqa: E402

from .graphs import count, graph_of  # noqa: E402


def test_a_residual_block_of_the_unet_is_two_convolutions_with_the_time_between() -> None:
    spec = UNet(widths=(32, 64), attends=(False, True), depth=1, heads=4, image=8, text=5, text_width=48)
    with torch.device("meta"):
        residual = [
            nn.GroupNorm(8, 32),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.Linear(128, 64),
            nn.GroupNorm(8, 64),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.Conv2d(32, 64, 1),
        ]
        attention = [
            nn.GroupNorm(8, 64),
            nn.Conv2d(64, 64, 1),
            *(nn.LayerNorm(64) for _ in range(3)),
            *(nn.Linear(64, 64, bias=False) for _ in range(3)),
            nn.Linear(64, 64),
            nn.Linear(64, 64, bias=False),
            *(nn.Linear(48, 64, bias=False) for _ in range(2)),
            nn.Linear(64, 64),
            nn.Linear(64, 2 * 256),
            nn.Linear(256, 64),
            nn.Conv2d(64, 64, 1),
        ]
    block = next(block for block in graph_of(spec).blocks if block.name == "down_2_1")
    assert block.num_parameters == count(*residual, *attention)
