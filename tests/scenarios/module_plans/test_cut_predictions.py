"""What ranks with parts of operators are predicted to hold is what the profiler of torch counts in a run."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from meshwise.executor.module_measures.first_batch import FirstBatch
from meshwise.executor.modules.layout import ModuleLayout, parse_layout
from meshwise.executor.user_training.job import TrainJob
from meshwise.executor.user_training.run import train
from meshwise.scenarios.module_plans.cut_plans import choose_cut_plans
from meshwise.scenarios.module_plans.planning import RankStarter
from meshwise.scenarios.module_plans.prediction import StepPredictor, build_model
from tests.scenarios.module_plans.token_file import FILE

COMBINATIONS = (
    "tensor=2",
    "tensor=2,num_microbatches=4",
    "tensor=2,recompute=full",
    "tensor=2,recompute=full,num_microbatches=4",
    "data=2,tensor=2,zero=3",
)


def test_memory_is_what_a_run_holds(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    job = TrainJob(str(tmp_path / "mine.py"), ModuleLayout(2), 5)
    first = FirstBatch(job)
    graph = first.capture()
    plans = choose_cut_plans(graph, first.samples, [2])
    with RankStarter(job, lambda text: None, 0.5) as starter:
        starter.start(2)
        figures = starter.measure(plans.values())
    (cut,) = figures.cuts
    assert cut.axes == (("tensor", 2),) and cut.samples[0] < cut.samples[1] and 0 < cut.messages[1] < cut.passes[1]
    predictor = StepPredictor(replace(build_model(figures, graph, first.samples, "fp32", "cpu"), cut_plans=plans))
    for words in COMBINATIONS:
        layout = replace(parse_layout(words, ModuleLayout()), plan=plans[cut.axes])
        run = train(replace(job, layout=layout), tmp_path / words)
        assert run.peak_memory is not None
        assert predictor.predict(layout).peak_memory == pytest.approx(run.peak_memory, rel=0.05), words
