"""The fastest plan that fits is chosen, and the reasons name the next one; what cannot be predicted is told."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from meshwise.executor.modules.layout import ModuleLayout
from meshwise.executor.recording.rank_files import UserError
from meshwise.executor.user_training.job import TrainJob
from meshwise.scenarios.module_plans.choosing import choose, predict_layout
from meshwise.scenarios.module_plans.layouts import find_choices, list_layouts
from meshwise.scenarios.module_plans.plan_files import read_layout, write_plan
from meshwise.scenarios.module_plans.planning import list_numbers, plan_run
from meshwise.scenarios.module_plans.prediction import ModuleModel, StepPredictor, build_model
from tests.scenarios.module_plans.modules import build_figures


def build(**changes: object) -> ModuleModel:
    return build_model(build_figures(**changes), None, 8, "fp32", "cpu", "no graph")


def test_no_plan_is_faster_than_the_one_chosen() -> None:
    model = build()
    planned = choose(model, [1, 2])
    assert planned.prediction is not None and planned.runner_up is not None
    times = [
        StepPredictor(model).predict(layout).step_time
        for layout in list_layouts(8, find_choices([1, 2], model.figures, 2))
    ]
    assert planned.num_plans == len(times)
    assert [planned.prediction.step_time, planned.runner_up.step_time] == sorted(times)[:2]
    # 2 ms and 4 samples on two ranks against 2 ms and 8 samples on one: 6.35 against 7.3 ms
    assert planned.layout == ModuleLayout(2)
    assert planned.list_reasons() == [f"fastest of {len(times)} plans; next data 1, 1 microbatch, 15 % slower"]


def test_slow_messages_leave_one_rank() -> None:
    slow = tuple((name, 2, size, 9e-3) for name in ("all_reduce", "send") for size in (1024, 4096))
    assert choose(build(collectives=slow), [1, 2]).layout == ModuleLayout()


def test_what_is_not_tried_is_told_with_its_reason() -> None:
    planned = choose(build(whole_batch="samples are compared"), [1, 2])
    assert planned.layout.data == 1 and planned.num_plans == 2  # with and without recomputation
    assert planned.assumptions[1:] == (
        "not tried: ranks and microbatches that divide the batch, as samples are compared",
    )
    statistics, states = choose(build(whole_microbatch="a norm", whole_states="two dtypes"), [1, 2]).assumptions[1:]
    assert statistics == "not tried: microbatches, as a norm" and states == "not tried: ZeRO, as two dtypes"


def test_a_plan_that_does_not_fit_is_not_chosen() -> None:
    model = build()
    whole = StepPredictor(model).predict(ModuleLayout()).peak_memory
    predictor = StepPredictor(model, memory=whole - 1)
    assert not predictor.predict(ModuleLayout()).fits
    assert predictor.predict(ModuleLayout(num_microbatches=2)).fits


def test_a_given_plan_is_kept_and_predicted() -> None:
    layout = ModuleLayout(2, zero=1)
    planned = predict_layout(build(), layout)
    assert planned.layout == layout and planned.num_plans == 1 and not planned.list_reasons()


def test_ranks_are_those_asked_for_or_divide_the_batch() -> None:
    assert list_numbers(10, None, 4) == [1, 2]
    assert list_numbers(10, 4, 2) == [4]


def test_plan_files_are_read_again(tmp_path: Path) -> None:
    planned = choose(build(), [1, 2])
    assert read_layout(write_plan(planned, tmp_path)) == planned.layout
    (tmp_path / "plan.json").write_text('{"module_layout": {"data": 0}}')
    with pytest.raises(ValueError, match="as `meshwise train --out` writes it"):
        read_layout(tmp_path / "plan.json")


MINE = """import torch
BATCH = 4
class Mean(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).mean()
def model(): return Mean(2, 1)
"""


@pytest.mark.parametrize(
    ("data", "layout", "text"),
    [
        ("def data(): return open('none.bin')", ModuleLayout(2), r"mine.py:7: data\(\): FileNotFoundError"),
        (
            "def data(): return torch.utils.data.TensorDataset(torch.ones(8, 2))",
            ModuleLayout(3),
            r"data ranks\(3\) divide .* met 4; nearest: 3",
        ),
        (
            "def data(): return torch.utils.data.TensorDataset(torch.ones(8, 2))",
            ModuleLayout(2, num_microbatches=4),
            r"microbatches\(4\) divide the batch, met 2 samples; nearest: microbatches\(2\)",
        ),
    ],
)
def test_a_batch_that_no_rank_could_train_on_ends_the_run(
    data: str, layout: ModuleLayout, text: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(f"{MINE}{data}\n")
    with pytest.raises(UserError, match=text):
        plan_run(TrainJob(str(tmp_path / "mine.py"), layout, 3), layout=layout, processes=None, calibrates=False)


def test_data_of_ranks_that_one_process_cannot_read_are_told_and_end_nothing(tmp_path: Path) -> None:
    divided = "def data(rank, world): return [torch.ones(4, 2)] * 8 if world == 2 else open('none.bin')\n"
    (tmp_path / "mine.py").write_text(MINE + divided)
    planned = plan_run(
        TrainJob(str(tmp_path / "mine.py"), ModuleLayout(2), 3), layout=None, processes=2, calibrates=False
    )
    assert planned.layout == ModuleLayout(2) and planned.prediction is None
    assert "none.bin" in planned.failure
    assert planned.list_assumptions() == [f"not predicted: {planned.failure}"]


def test_a_module_that_is_not_captured_needs_figures(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nBATCH = 4\n"
        "class Branch(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x).mean() if x.sum() > 0 else super().forward(-x).mean()\n"
        "def model(): return Branch(2, 1)\n"
        "def data(): return torch.utils.data.TensorDataset(torch.ones(8, 2))\n"
    )
    job = TrainJob(str(tmp_path / "mine.py"), ModuleLayout(2), 3)
    planned = plan_run(job, layout=None, processes=2, calibrates=False)
    assert planned.layout == ModuleLayout(2)
    assert "a prediction without a calibration needs a captured module" in planned.failure


def test_a_captured_module_is_predicted_without_a_calibration(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nBATCH = 4\n"
        "def model(): return torch.nn.Linear(2, 1)\n"
        "def data(): return [(torch.ones(4, 2),)]\n"
        "def loss(outputs, batch): return outputs.square().mean()\n"
    )
    job = TrainJob(str(tmp_path / "mine.py"), ModuleLayout(1), 3)
    planned = plan_run(job, layout=None, processes=None, calibrates=False)
    assert planned.prediction is not None and planned.num_plans > 1 and planned.tokens is None
    assert replace(planned.layout, data=1, num_microbatches=1) == ModuleLayout()
