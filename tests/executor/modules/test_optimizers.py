"""An optimizer of a user's module steps what a rank has of it."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from meshwise.executor.modules.optimizers import OptimizerError, build_optimizer  # noqa: E402


def test_an_optimizer_steps_the_parameters_that_a_rank_has() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    module[1] = nn.Identity()  # as a stage of a pipeline, which has none of the others' parameters
    found = build_optimizer(optimizer, module, names)
    assert found is optimizer
    assert list(map(id, found.param_groups[0]["params"])) == list(map(id, module.parameters()))


def test_an_optimizer_of_another_module_is_refused() -> None:
    module = nn.Linear(2, 3)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    with pytest.raises(OptimizerError, match="of the module that is parallelised, met others"):
        build_optimizer(torch.optim.SGD(nn.Linear(2, 3).parameters(), lr=0.1), module, names)
