"""What torch cannot export is refused in one line."""

import pytest

pytest.importorskip("torch")
import torch
from torch import Tensor

from meshwise.executor.capture.capture import capture
from meshwise.executor.capture.captured import CaptureError

from .test_capture import Calls


def test_a_module_that_torch_cannot_export_is_refused_in_one_line() -> None:
    def decides(x: Tensor, w: Tensor) -> Tensor:
        return x @ w if x.sum() > 0 else x

    with pytest.raises(CaptureError, match="torch cannot export the module") as caught:
        capture(Calls(decides), (torch.randn(4, 6, dtype=torch.float64),))
    assert "\n" not in str(caught.value)
