"""What is measured of a module in a loop of the user's own are copies, which leave it as it is."""

import pytest

torch = pytest.importorskip("torch")

from meshwise.executor.module_measures.source import copy_source  # noqa: E402


def test_copies_leave_module_and_optimizer_as_they_are() -> None:
    module = torch.nn.Linear(2, 1)
    before = module.weight.detach().clone()
    optimizer = torch.optim.AdamW(module.parameters())
    source = copy_source(module, optimizer, None, "fp32", torch.device("cpu"), torch.ones(4, 2))
    copy = source.build()
    own_optimizer = source.build_optimizer(copy)
    copy(source.batch).sum().backward()
    own_optimizer.step()
    assert not torch.equal(copy.weight, before)
    assert torch.equal(module.weight, before) and module.weight.grad is None and not optimizer.state
