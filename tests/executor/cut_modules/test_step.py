"""A user's module with cut operators is trained as a loop of torch trains it; faults on ranks show in its results."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from meshwise.executor.modules.layout import ModuleLayout
from meshwise.executor.modules.optimizers import make_adamw
from meshwise.executor.modules.step import TrainingStep
from meshwise.executor.recording.weight_files import read_weights
from meshwise.executor.user_training.job import TrainJob
from meshwise.executor.user_training.run import train

from .cut_runs import NETWORKS, find_layout, run_ranks

FAULTS = {
    "gradients are not summed": "packed",
    "gradients of values do not go back": "packed",
    "a bias is added on every rank": "perceptron",
    "sums are of one rank": "perceptron",
    "all ranks have the first part": "perceptron",
    "buffers are not renewed": "perceptron",
}


def test_ranks_compute_what_a_loop_of_torch_does_and_faults_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ("packed", "gated", "regrouped", "perceptron", "dropout")
    layouts = {kind: find_layout(kind, "tensor=2", monkeypatch).to_json() for kind in kinds}
    right: list[dict[str, Any]] = [{"kind": kind, "layout": layouts[kind], "max_norm": 0.5} for kind in kinds]
    right.insert(0, {"kind": "perceptron", "words": "tensor=2"})
    wrong = [{"kind": kind, "layout": layouts[kind], "fault": fault} for fault, kind in FAULTS.items()]
    for found in run_ranks(right + wrong, 2, tmp_path / "two", monkeypatch):
        for case, result in zip(right[:-1], found, strict=False):
            assert result["losses"] <= 1e-12 and result["weights"] <= 1e-9 and not result["names"], (case, result)
            assert result["share"] < 0.65, case  # norms and positions are whole on both ranks
        first, again, other = found[len(right) - 1]
        assert first == again and first[0] != first[1] and first[0] != other[0]
        faulty = zip(FAULTS, found[len(right) :], strict=True)
        shown = {fault for fault, result in faulty if result["losses"] > 1e-9 or result["weights"] > 1e-9}
        assert shown == set(FAULTS)


def test_operators_are_cut_beside_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = {
        "packed": "data=2,tensor=2,num_microbatches=2",
        "gated": "data=2,tensor=2",
        "regrouped": "data=2,tensor=2",
        "perceptron": "data=2,tensor=2",
    }
    cases = [
        {"kind": kind, "layout": find_layout(kind, text, monkeypatch).to_json(), "max_norm": 0.5}
        for kind, text in words.items()
    ]
    for found in run_ranks(cases, 4, tmp_path / "four", monkeypatch):
        for case, result in zip(cases, found, strict=True):
            assert result["losses"] <= 1e-12 and result["weights"] <= 1e-9 and not result["names"], (case, result)


STAGED = (
    ("packed", "pipeline=2,tensor=2,num_microbatches=2"),
    ("packed", "data=2,tensor=2,zero=1,num_microbatches=2"),
    ("gated", "data=2,tensor=2,zero=3,recompute=full"),
    ("gated", "data=2,tensor=2,zero=2,recompute=selective"),
    ("gated", "data=2,tensor=2,offload=optimizer+activations"),
    ("gated", "pipeline=2,tensor=2,num_microbatches=4,schedule=zb1p"),
    ("packed", "pipeline=2,tensor=2,num_microbatches=2,recompute=1,chunks=2,schedule=interleaved"),
    ("packed", "pipeline=2,tensor=2,num_microbatches=4,chunks=2,schedule=zbv"),
    ("packed", "pipeline=2,tensor=2,num_microbatches=4,chunks=2,schedule=dualpipev"),
    ("packed", "pipeline=2,tensor=2,num_microbatches=4,chunks=2,schedule=looped_bfs"),
)
"""Networks with their plans."""
STAGED_FAULTS = ("gradients of parts are not summed", "norms count copies", "sums are of one rank")


def test_cut_operators_run_in_stages_with_shards_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = [find_layout(kind, words, monkeypatch).to_json() for kind, words in STAGED]
    right: list[dict[str, Any]] = [
        {"kind": kind, "layout": layout, "max_norm": 0.05} for (kind, _), layout in zip(STAGED, layouts, strict=True)
    ]
    right.append({"kind": "gated", "words": STAGED[0][1], "max_norm": 0.05})
    wrong = [right[2] | {"fault": fault} for fault in STAGED_FAULTS]
    dropout = [find_layout("dropout", f"data=2,tensor=2,zero=2{more}", monkeypatch) for more in ("", ",recompute=full")]
    drawn = [{"kind": "dropout", "layout": layout.to_json()} for layout in dropout]
    for found in run_ranks(right + wrong + drawn, 4, tmp_path / "four", monkeypatch):
        for case, result in zip(right, found, strict=False):
            assert result["losses"] <= 1e-12 and result["weights"] <= 1e-9 and not result["names"], (case, result)
            assert result["share"] < 0.65, case
        faulty = zip(STAGED_FAULTS, found[len(right) :], strict=False)
        shown = {fault for fault, result in faulty if result["losses"] > 1e-9 or result["weights"] > 1e-9}
        assert shown == set(STAGED_FAULTS)
        kept, recomputed = found[-2:]
        first, again, other = kept
        assert first == again and first[0] != first[1] and first[0] != other[0]
        assert recomputed == kept


def test_a_run_goes_on_whole_and_cut_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = find_layout("gated", "tensor=2", monkeypatch)
    options: dict[str, Any] = {"precision": "fp64", "max_norm": 0.5}
    again = find_layout("gated", "tensor=2,data=2,zero=3", monkeypatch)
    whole = train(TrainJob(str(NETWORKS), ModuleLayout(), 10, **options), tmp_path / "whole")
    losses: list[float] = []
    for layout, steps in ((cut, 2), (ModuleLayout(2, zero=3), 4), (cut, 6), (again, 8), (cut, 10)):
        job = TrainJob(str(NETWORKS), layout, steps, resume=bool(losses), **options)
        losses += train(job, tmp_path / "parts").losses
    assert losses == pytest.approx(whole.losses, rel=1e-12)
    first, second = (read_weights(tmp_path / name / "weights") for name in ("whole", "parts"))
    assert first.keys() == second.keys()
    assert all(torch.allclose(first[name], second[name], rtol=1e-9, atol=1e-12) for name in first)


@pytest.mark.parametrize(
    ("kind", "words", "text"),
    [
        ("hooked", "tensor=2", r"networks.py:\d+: .* a hook of a gradient.* or data=2, which captures nothing"),
        ("packed", "tensor=7", r"tensor\(7\) divides a dim of some parameter, .*, met 7"),
    ],
)
def test_what_cannot_be_cut_is_refused(kind: str, words: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=text):
        find_layout(kind, words, monkeypatch)


def test_a_step_of_whole_modules_refuses_cuts() -> None:
    with pytest.raises(ValueError, match="tensor: this step has the module whole on every rank, met 2"):
        TrainingStep(torch.nn.Linear(2, 2), ModuleLayout(tensor=2), optimizer=make_adamw(0.1))
