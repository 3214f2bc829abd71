"""`meshwise.parallelize` returns the step of whole modules or of cut ones, as the plan says."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import meshwise  # noqa: E402
from meshwise.executor.modules.layout import ModuleLayout  # noqa: E402
from meshwise.executor.modules.step import TrainingStep  # noqa: E402
from meshwise.executor.stages.parallelize import read_layout  # noqa: E402
from meshwise.scenarios.module_plans.choosing import PlannedRun  # noqa: E402
from meshwise.scenarios.module_plans.own_loop import parallelize  # noqa: E402
from meshwise.scenarios.module_plans.plan_files import write_plan  # noqa: E402


def test_a_module_without_cuts_is_trained_whole() -> None:
    assert meshwise.parallelize is parallelize
    step = parallelize(torch.nn.Linear(2, 1), loss=lambda outputs, _: outputs.square().mean(), learning_rate=0.01)
    assert isinstance(step, TrainingStep) and step(torch.ones(4, 2)) > step(torch.ones(4, 2))


def test_words_without_data_leave_it_the_other_ranks() -> None:
    assert read_layout("num_microbatches=2") == ModuleLayout(num_microbatches=2)
    assert read_layout("tensor=2") == ModuleLayout(1, tensor=2)
    with pytest.raises(ValueError, match=r"data \* tensor = 2 ranks, and there are 1; nearest: data=1,tensor=1"):
        parallelize(torch.nn.Linear(2, 1), "tensor=2")


def test_the_plan_of_a_run_of_a_file_is_read(tmp_path: Path) -> None:
    file = write_plan(PlannedRun(ModuleLayout(num_microbatches=2)), tmp_path)
    assert parallelize(torch.nn.Linear(2, 1), str(file)).layout == ModuleLayout(num_microbatches=2)
    with pytest.raises(ValueError, match=r"a plan file as `meshwise search --out` writes it"):
        parallelize(torch.nn.Linear(2, 1), tmp_path / "none.json")
