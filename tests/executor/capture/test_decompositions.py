"""Operators that are written out compute what they did, as sums over the batch."""

import pytest

pytest.importorskip("torch")
import torch
from cutting import arguments, operators
from torch import Tensor, nn
from torch.nn import functional

from meshwise.executor.capture.capture import capture
from meshwise.simulator.operator_graph import BATCH

from .test_capture import captured


def test_statistics_of_a_batch_norm_are_sums_over_the_batch() -> None:
    found = captured("convnet")[0]
    (first, *_) = [each for name, each in operators(found).items() if "norm_sum" in name]
    assert BATCH in first.reduced


LOSSES = {
    "mse": functional.mse_loss,
    "l1": functional.l1_loss,
    "huber": lambda x, y: functional.huber_loss(x, y, delta=0.7),
    "smooth_l1": lambda x, y: functional.smooth_l1_loss(x, y, beta=0.3),
    "bce": lambda x, y: functional.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=y[0].exp()),
    "cross entropy": lambda x, y: functional.cross_entropy(x, y.argmax(1)),
    "ignored": lambda x, y: functional.cross_entropy(x, y.argmax(1), ignore_index=1),
    "weighted": lambda x, y: functional.cross_entropy(x, y.argmax(1), weight=y[0].exp().detach()),
    "smoothed": lambda x, y: functional.cross_entropy(x, y.argmax(1), label_smoothing=0.2, weight=y[1].exp()),
    "probabilities": lambda x, y: functional.cross_entropy(x, y.softmax(1), label_smoothing=0.1),
    "nll": lambda x, y: functional.nll_loss(x.log_softmax(1), y.argmax(1)),
    "mean": lambda x, y: (x * y).mean() + (x.mean(0) * y.mean(1)[:1]).mean(),
    "batch norm": lambda x, y: (functional.batch_norm(x, None, None, training=True) * y).mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_written_out_are_the_losses_and_none_is_a_mean(name: str) -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.linspace(0.5, 2, 6, dtype=torch.float64))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            result: Tensor = LOSSES[name](x * self.scale, y)
            return result

    torch.manual_seed(1)
    module, inputs = Loss(), tuple(torch.randn(4, 6, dtype=torch.float64) for _ in range(2))
    found = capture(module, inputs)
    (loss,) = found.module(*arguments(found, module, inputs))
    expected = module(*inputs)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, [module.scale]), torch.autograd.grad(expected, [module.scale]))
    targets = {str(node.target) for node in found.module.graph.nodes}
    assert not [each for each in targets if "loss" in each or "mean" in each or "batch_norm" in each]
