"""Ranks along an expert axis have some of the experts, all other parameters, and compute what a loop of torch does."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from .cut_runs import find_layout, run_ranks

KINDS = ("mixture", "grouped", *(("mixtral",) if find_spec("transformers") else ()))
FAULT = "all ranks have the rows of the first experts"
FOUR_RANKS = (
    ("mixture", "data=2,expert=2"),
    ("grouped", "data=2,expert=2,zero=2"),
    ("mixture", "expert=2,tensor=2"),
    ("grouped", "expert=2,context=2,recompute=full"),
    ("grouped", "pipeline=2,expert=2,num_microbatches=2"),
)


def list_runs(cases: tuple[tuple[str, str], ...], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    return [
        {"kind": kind, "layout": find_layout(kind, words, monkeypatch).to_json(), "max_norm": 0.5}
        for kind, words in cases
    ]


def test_ranks_with_some_of_the_experts_compute_what_a_loop_of_torch_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = list_runs(tuple((kind, "expert=2") for kind in KINDS), monkeypatch)
    wrong = [run | {"fault": FAULT} for run in runs[1:]]
    shares = {"mixture": 0.75, "grouped": 0.8, "mixtral": 0.85}
    for found in run_ranks(runs + wrong, 2, tmp_path / "two", monkeypatch):
        assert all(result["losses"] > 1e-9 for result in found[len(runs) :])
        for case, result in zip(runs, found, strict=False):
            assert result["losses"] <= 1e-12 and result["weights"] <= 1e-9 and not result["names"], (case, result)
            assert result["share"] < shares[case["kind"]], result  # half of the experts


def test_experts_are_cut_beside_other_axes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = list_runs(FOUR_RANKS, monkeypatch)
    for found in run_ranks(runs, 4, tmp_path / "four", monkeypatch):
        for case, result in zip(runs, found, strict=True):
            assert result["losses"] <= 1e-12 and result["weights"] <= 1e-9 and not result["names"], (case, result)


def test_experts_that_do_not_divide_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError,
        match=r"expert\(3\) divides the experts, .* each, 4, met 3; nearest: 2",
    ):
        find_layout("mixture", "expert=3", monkeypatch)
    with pytest.raises(
        ValueError,
        match=r"expert\(2\) divides the experts, .* each, met none; nearest: 1",
    ):
        find_layout("packed", "expert=2", monkeypatch)
