"""Checkpoints of another module are known by the names of their states, before anything is made of them."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from meshwise.executor.modules.layout import ModuleLayout  # noqa: E402
from meshwise.executor.modules.states import StatesError, find_newest, require_own_names  # noqa: E402
from meshwise.executor.modules.step import TrainingStep  # noqa: E402


def build(*sizes: int) -> "torch.nn.Sequential":
    return torch.nn.Sequential(*(torch.nn.Linear(size, size) for size in sizes), torch.nn.BatchNorm1d(sizes[-1]))


def test_a_module_goes_on_from_its_own_states_alone(tmp_path: Path) -> None:
    step = TrainingStep(
        build(3, 3),
        ModuleLayout(),
        optimizer=lambda module: torch.optim.SGD(module.parameters(), 0.1),
        loss=lambda outputs, batch: outputs.square().mean(),
    )
    step(torch.ones(4, 3))
    step.save(tmp_path)
    checkpoint = find_newest(tmp_path)
    require_own_names(checkpoint, build(3, 3))
    require_own_names(checkpoint, torch.compile(build(3, 3)))
    with pytest.raises(StatesError, match=r"step-00000001: it is of another module, met 0\.bias, which this one has"):
        require_own_names(checkpoint, torch.nn.Linear(3, 3))
    with pytest.raises(StatesError, match=r"met no 3\.bias, which this one has"):
        require_own_names(checkpoint, build(3, 3).append(torch.nn.BatchNorm1d(3)))


def test_states_of_a_module_with_a_compiled_part_are_its_own(tmp_path: Path) -> None:
    def make_step(*, compiles: bool) -> TrainingStep:
        torch.manual_seed(0)
        module = build(3, 3)
        if compiles:
            module[0] = torch.compile(module[0], backend="eager")
        return TrainingStep(
            module,
            ModuleLayout(),
            optimizer=lambda module: torch.optim.Adam(module.parameters(), 0.1),
            loss=lambda outputs, batch: outputs.square().mean(),
        )

    samples, losses = torch.arange(12.0).view(4, 3), {}
    for compiles in (False, True):
        step = make_step(compiles=compiles)
        step(samples)
        step.save(tmp_path / str(compiles))
        losses[compiles] = [step(samples) for _ in range(2)]
        step = make_step(compiles=not compiles)
        assert step.load(tmp_path / str(compiles)) == 1
        assert [step(samples) for _ in range(2)] == losses[compiles]
    assert losses[True] == losses[False]
