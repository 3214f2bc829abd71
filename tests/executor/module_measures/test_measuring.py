"""What a measured batch shows: which parts of a batch a run would refuse."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from meshwise.executor.module_measures.measuring import measure_module
from meshwise.executor.module_measures.source import read_source
from meshwise.executor.modules.layout import ModuleLayout
from meshwise.executor.recording.rank_files import UserError
from meshwise.executor.user_training.job import TrainJob
from meshwise.executor.user_training.training import load_source

ZOO = Path(__file__).parents[1] / "user_training" / "zoo.py"


@pytest.mark.parametrize(
    ("kind", "whole_batch", "whole_microbatch"),
    [
        ("contrastive", "a loss is a mean over samples", ""),
        ("averaged", "", "met average, which each microbatch renews"),
        ("physical", "", ""),
        ("warm", "", ""),
        ("weighted", "", ""),
    ],
)
def test_parts_that_a_run_refuses_are_found(
    kind: str, whole_batch: str, whole_microbatch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIND", kind)
    job = TrainJob(str(ZOO), ModuleLayout(1), steps=2)
    source = read_source(job, load_source(job), torch.device("cpu"), 0, 1)
    figures = measure_module(source, 0.2)
    assert whole_batch in figures.whole_batch and bool(whole_batch) == bool(figures.whole_batch)
    assert whole_microbatch in figures.whole_microbatch and bool(whole_microbatch) == bool(figures.whole_microbatch)


def test_a_forward_that_sums_over_ranks_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank that runs it alone would wait for the others."""
    monkeypatch.setenv("KIND", "averaged together")
    job = TrainJob(str(ZOO), ModuleLayout(1), steps=2)
    source = read_source(job, load_source(job), torch.device("cpu"), 0, 1)
    with pytest.raises(UserError, match="met messages between ranks in its forward; nearest: --plan data=1"):
        measure_module(source, 0.2)
