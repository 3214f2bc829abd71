"""Runs with tied ends of a pipeline, cut sequences and spread experts go on from checkpoints like any other."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from meshwise.executor.check.reference import train
from meshwise.executor.check.verification import distance
from meshwise.executor.launch.run import read_losses, run_jobs
from meshwise.simulator.models.experts import Experts

from .test_continuation import LLAMA, SAVED, STEPS, TIED, resumed, trained

MIXED = replace(LLAMA, experts=Experts(count=4, top_k=2, ffn=16))
RUNS = {
    "tied": trained(TIED, pipeline=2, microbatch=2, stages=(3, 1)),
    "tied zbv": trained(TIED, pipeline=2, chunks=2, schedule="zbv"),
    "context": trained(TIED, context=2, microbatch=4),
    "spread": trained(MIXED, data=2, expert=2, microbatch=2),
    "whole": trained(MIXED, data=2, zero=3),
}
ON = {
    ("tied", "tied zbv"): RUNS["tied zbv"],
    ("tied zbv", "context"): RUNS["context"],
    ("context", "tied zero-3"): trained(TIED, data=2, zero=3),
    ("spread", "whole"): RUNS["whole"],
    ("whole", "spread"): trained(MIXED, data=2, expert=2, zero=1, overlap_gradients=False),
    ("spread", "spread"): RUNS["spread"],
    ("tied", "tied"): RUNS["tied"],
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("resume")
    jobs = [(each, top / name) for name, each in RUNS.items()]
    run_jobs(jobs + [(resumed(top / a, each), top / f"{a} on {b}") for (a, b), each in ON.items()])
    return top


@pytest.mark.parametrize("pair", ON, ids="-".join)
def test_a_plan_goes_on_as_one_process_would(ran: Path, pair: tuple[str, str]) -> None:
    plan, folder = ON[pair].plan, ran / f"{pair[0]} on {pair[1]}"
    found = read_losses(plan, STEPS - SAVED, folder)
    if pair[0] == pair[1]:
        assert found == read_losses(plan, STEPS, ran / pair[0])[SAVED:]
    expected_losses, expected = train(replace(ON[pair], checkpoint_every=0))
    error = distance(2, folder, found, expected_losses[SAVED:], expected)
    assert error.loss_error < 1e-12 and error.gradient_error < 1e-12 and error.equal, error
