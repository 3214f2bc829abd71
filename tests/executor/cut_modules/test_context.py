"""Ranks along a context axis have parts of sequences, all parameters, and compute what a loop of torch does."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from meshwise.executor.modules.layout import ModuleLayout
from meshwise.simulator.operator_graph import BATCH

from .cut_runs import find_layout, run_ranks

CASES = (
    ("packed", "context=2"),
    ("gated", "context=2"),
    ("attentive", "context=2"),
    ("gated", "context=2,recompute=full"),
)
FOUR_RANKS = (
    ("attentive", "data=2,context=2"),
    ("packed", "tensor=2,context=2,num_microbatches=2"),
    ("gated", "data=2,context=2,zero=3"),
    ("packed", "pipeline=2,context=2,num_microbatches=2"),
    ("attentive", "context=4"),
)


FAULT = "queries see the keys of the first ones"


@pytest.mark.parametrize(("ranks", "cases"), [(2, CASES), (4, FOUR_RANKS)])
def test_ranks_with_parts_of_sequences_compute_what_a_loop_of_torch_does(
    ranks: int, cases: tuple[tuple[str, str], ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[dict[str, Any]] = [
        {"kind": kind, "layout": find_layout(kind, words, monkeypatch).to_json(), "max_norm": 0.5}
        for kind, words in cases
    ]
    runs.append({"kind": cases[0][0], "words": cases[0][1], "max_norm": 0.5})  # as in a loop of the user's own
    wrong = {"kind": "attentive", "layout": find_layout("attentive", f"context={ranks}", monkeypatch).to_json()}
    wrong["fault"] = FAULT
    for found in run_ranks([*runs, wrong], ranks, tmp_path / "ranks", monkeypatch):
        assert found[-1]["losses"] > 1e-9
        for case, result in zip(runs, found, strict=False):
            assert result["losses"] <= 1e-12 and result["weights"] <= 1e-9 and not result["names"], (case, result)


@pytest.mark.parametrize("kind", ["packed", "attentive"])
def test_sequences_are_cut_and_samples_and_parameters_are_not(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = find_layout(kind, "context=2", monkeypatch)
    assert isinstance(layout, ModuleLayout) and layout.plan is not None
    cuts = {sharding.operator: {dim for dim, _ in sharding.cuts} for sharding in layout.plan.shardings}
    assert all(dims <= {"sequence", "heads"} or not dims for dims in cuts.values()), cuts
    assert not any(sharding.kept for sharding in layout.plan.shardings)
    assert BATCH not in set().union(*cuts.values())
    attention = {next(iter(dims)) for name, dims in cuts.items() if "attention" in name}
    assert attention == {"heads" if kind == "packed" else "sequence"}  # where heads divide they are cheaper
    assert layout.describe() == "data 1, context 2, 1 microbatch"
