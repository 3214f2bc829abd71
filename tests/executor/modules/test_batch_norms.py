"""Batch normalisation by running statistics is torch's own, in bf16 parameters too, which torch refuses."""

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

from meshwise.executor.modules.batch_norms import normalise_globally


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_running_statistics_normalise_as_torch_does(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm, x = nn.BatchNorm2d(3), torch.randn(4, 3, 2, 2)
    norm(x * 2 + 1)
    nn.init.uniform_(norm.weight)
    expected = norm.eval()(x.to(dtype).float())
    assert norm.running_mean.abs().sum() > 0 and normalise_globally(norm) == 1
    norm.weight, norm.bias = (nn.Parameter(item.detach().to(dtype)) for item in (norm.weight, norm.bias))
    found = norm(x.to(dtype))
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, atol=1e-6 if dtype == torch.float32 else 2e-2, rtol=1e-2)
