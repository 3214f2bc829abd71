"""A user's file in stages is what a plain loop of torch on the whole batch is, or is refused with the line."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch

from meshwise.executor.modules.layout import ModuleLayout, parse_layout
from meshwise.executor.recording.rank_files import UserError
from meshwise.executor.recording.weight_files import read_weights
from meshwise.executor.user_training.job import TrainJob
from meshwise.executor.user_training.run import train, verify_job

ZOO = Path(__file__).parents[1] / "user_training" / "zoo.py"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("tied", "pipeline=2,num_microbatches=2"),
        ("tied", "pipeline=2,num_microbatches=2,data=2,zero=3,recompute=full"),
        ("tied", "pipeline=2,num_microbatches=2,data=2,zero=1,recompute=selective:1"),
        ("tied", "pipeline=2,num_microbatches=2,recompute=1+selective"),
        ("tied", "pipeline=2,num_microbatches=4,recompute=1,offload=optimizer+activations"),
        ("tied", "pipeline=2,num_microbatches=2,data=2,zero=2,offload=optimizer+activations"),
        ("tied", "pipeline=2,num_microbatches=4,data=2,cuts=layers.2"),
        ("tied", "pipeline=2,num_microbatches=4,schedule=zbv,chunks=2"),
        ("woven", "pipeline=3,num_microbatches=4"),
        ("woven", "pipeline=2,num_microbatches=4,schedule=interleaved,chunks=3"),
        ("woven", "pipeline=2,num_microbatches=2,data=2,zero=2"),
        ("recurrent", "pipeline=2,num_microbatches=2,schedule=zb1p"),
        ("translated", "pipeline=2,num_microbatches=2,schedule=zb1p,cuts=new_words"),
        ("translated", "pipeline=2,num_microbatches=2,schedule=interleaved_zero_bubble,chunks=3"),
        ("weighted", "pipeline=2,num_microbatches=2,data=2"),
        ("residual", "pipeline=2,recompute=full"),
    ],
)
def test_stages_compute_what_one_process_does(
    kind: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIND", kind)
    job = TrainJob(str(ZOO), parse_layout(words, ModuleLayout()), steps=3, max_norm=0.5)
    difference = verify_job(job, tmp_path)
    assert difference.is_equal, difference


@pytest.mark.parametrize(
    ("kind", "words", "text"),
    [
        ("routed", "pipeline=2", r"zoo.py:\d+: torch cannot export .* branch or a size that does"),
        ("convolutions", "pipeline=2,num_microbatches=2", "statistics over a batch, which stages divide"),
        ("tied", "pipeline=2,num_microbatches=2,cuts=layer.1", "names of modules that run, met layer.1; .*layers.1"),
        ("tied", "pipeline=3,num_microbatches=4,cuts=head+layers.1", "in the order in which they run"),
        ("tied", "pipeline=2,num_microbatches=2,recompute=4", "a stage of the module has at most 2 blocks, met 4"),
        ("weighted", "pipeline=3,num_microbatches=4", "every stage has parameters that are trained"),
    ],
)
def test_what_has_no_stages_is_refused(
    kind: str, words: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIND", kind)
    with pytest.raises(UserError, match=text):
        train(TrainJob(str(ZOO), parse_layout(words, ModuleLayout()), steps=1), tmp_path)


def test_a_run_goes_on_in_and_out_of_stages_as_if_it_had_never_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIND", "tied")
    job = TrainJob(str(ZOO), ModuleLayout(), steps=6, precision="fp64", without_dropout=True, max_norm=0.5)
    whole = train(job, tmp_path / "whole")
    words = ("pipeline=2,num_microbatches=2,data=2,zero=3", "data=2,zero=1", "pipeline=2,num_microbatches=4")
    for part, text in enumerate(words):
        layout = parse_layout(text, ModuleLayout())
        last = train(replace(job, layout=layout, steps=2 * (part + 1), resume=part > 0), tmp_path / "parts")
    rows = [json.loads(line) for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == pytest.approx(whole.losses, rel=1e-12)
    first, second = (read_weights(run.weights) for run in (whole, last))
    assert first.keys() == second.keys()
    assert all(torch.allclose(first[name], second[name], rtol=1e-9, atol=1e-12) for name in first)
