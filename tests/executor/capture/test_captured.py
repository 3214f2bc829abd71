"""What a captured module keeps of its buffers."""

import pytest

pytest.importorskip("torch")
import torch
from cutting import Values, arguments
from torch import Tensor, nn

from meshwise.executor.capture.capture import capture

from .test_capture import captured


class Renewing(nn.Module):
    """A layer that keeps something of what it has seen."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(4, 4), how
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        old = self.seen.clone()
        mean = y.mean(0)
        y = y if self.how == "of a value of its own" else y - mean
        if self.how in ("by points", "of a value of its own"):
            self.seen.mul_(0.5).add_(mean.detach())
        elif self.how == "sorted":
            self.seen.copy_(mean.detach().sort().values)
        elif self.how == "of two values":
            self.seen.copy_((mean + self.linear.bias).detach())
        elif self.how == "read by the loss":
            self.seen.add_(mean.detach())
            y = y * old
        return y.square().sum()


def test_how_forward_renews_buffers_is_kept() -> None:
    found, module, inputs = captured("convnet")
    assert not found.warnings and not found.skipped_buffers
    expected = {name: each.clone() for name, each in module.named_buffers()}
    assert {update.buffer for update in found.updates} == set(expected)
    values = Values(found, arguments(found, module, inputs)).values
    by_name = {node.name: value for node, value in values.items()}
    module.train()(*inputs)
    for update in found.updates:
        read = [by_name[update.source]] if update.source else []
        new = update.program(expected[update.buffer], *read)
        torch.testing.assert_close(new, module.get_buffer(update.buffer), rtol=0, atol=1e-12)
        assert not torch.equal(new, expected[update.buffer])


@pytest.mark.parametrize("how", ["by points", "of a value of its own", "sorted", "of two values", "read by the loss"])
def test_a_buffer_that_ranks_could_not_renew_in_parts_is_left(how: str) -> None:
    found = capture(Renewing(how), (torch.randn(4, 4),))
    renewed = how == "by points"
    assert [update.buffer for update in found.updates] == ["seen"] * renewed
    assert found.skipped_buffers == ("seen",) * (not renewed)
    assert any("stay as they are: seen" in line for line in found.warnings) is not renewed
