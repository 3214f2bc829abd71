"""Sizes of networks that do not fit together are refused, with what holds and what was met."""

from typing import Any

import pytest

from meshwise.simulator.models.dlrm import Dlrm
from meshwise.simulator.models.transformer import Transformer
from meshwise.simulator.models.unet import UNet
from meshwise.simulator.models.vision import ResNet

DLRM = {"rows": (10,), "hots": (1,), "embedding": 16, "dense": 4, "bottom": (16,), "top": (1,)}
UNET = {
    "widths": (32, 64),
    "attends": (False, True),
    "depth": 1,
    "heads": 4,
    "image": 8,
    "text": 5,
    "text_width": 48,
}


@pytest.mark.parametrize(
    ("model", "sizes", "message"),
    [
        (Dlrm, DLRM | {"hots": (1, 2)}, r"hots are one number a table\(1\), met 2"),
        (Dlrm, DLRM | {"rows": (), "hots": ()}, r"hots are one number a table\(0\), met 0"),
        (Dlrm, DLRM | {"dense": 0}, "sizes of DLRM are at least 1"),
        (Dlrm, DLRM | {"bottom": (16, 8)}, r"bottom ends with embedding\(16\), met \(16, 8\)"),
        (Dlrm, DLRM | {"top": (4, 2)}, r"top ends with 1, met \(4, 2\)"),
        (Dlrm, DLRM | {"interaction": "sum"}, "interaction is one of .*dot.*, met sum"),
        (ResNet, {"depths": ()}, "sizes of ResNet are at least 1"),
        # 4 stages halve an image of 224 twice before the first, and 3 times from one to the next: 32
        (ResNet, {"depths": (1, 1, 1, 1), "image": 240}, r"4 stages halve the image to 1 / 32, met image\(240\)"),
        (UNet, UNET | {"attends": (True,)}, r"attends is one word a level\(2\), met 1"),
        (UNet, UNET | {"heads": 5}, r"heads divide widths\(32\), met 5"),
        (UNet, UNET | {"depth": 0}, "sizes of the U-Net are at least 1"),
        (UNet, UNET | {"image": 63}, r"2 levels halve the image to 1 / 2, met image\(63\)"),
        (Transformer, {"ffn_kind": "relu"}, "ffn_kind is one of .*gelu.*swiglu.*, met relu"),
        (Transformer, {"heads": 3}, r"heads divide hidden\(64\), met 3"),
        (Transformer, {"kv_heads": 3}, r"kv_heads divide heads\(4\), met 3"),
        (Transformer, {"window": 0}, "transformer sizes are at least 1"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(model: Any, sizes: dict[str, Any], message: str) -> None:
    if model is Transformer:
        sizes = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 256, "vocab": 128} | sizes
    with pytest.raises(ValueError, match=message):
        model(**sizes)
