"""Recommenders whose tables are cut over ranks train as in one process, with sparse and dense gradients."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from meshwise.executor.launch.launcher import launch_ranks

HERE = Path(__file__).parent
TWO_RANKS: list[dict[str, Any]] = [
    {"kind": "ranker", "optimizer": "sgd", "plans": ["data=2,tables=rows"]},
    {"kind": "ranker", "optimizer": "adamw", "plans": ["data=2,tables=rows,num_microbatches=3", "data=2"]},
    {"kind": "ranker", "optimizer": "momentum", "plans": ["data=2,zero=3", "data=2,tables=columns"]},
    {"kind": "ranker", "optimizer": "adagrad", "plans": ["data=2,tables=rows"], "max_norm": 0.01, "is_live": True},
    {"kind": "sparse ranker", "optimizer": "sgd", "plans": ["data=2,tables=rows"], "max_norm": 0.01},
    {"kind": "sparse ranker", "optimizer": "adagrad", "plans": ["data=2,tables=rows", "data=2,tables=table"]},
    {"kind": "sparse factors", "optimizer": "sparse adam", "plans": ["data=2", "data=2,tables=rows"]},
    {"kind": "ranker", "optimizer": "rowwise", "plans": ["data=2,tables=rows", "data=2", "data=2,tables=table"]},
    {"kind": "factors", "optimizer": "adamw", "plans": ["data=2,tables=rows,num_microbatches=2"]},
]
THREE_RANKS: list[dict[str, Any]] = [
    {"kind": "ranker", "optimizer": "adamw", "plans": ["data=3,tables=rows", "data=3,tables=columns"]},
    {"kind": "sparse ranker", "optimizer": "adagrad", "plans": ["data=3,tables=rows,num_microbatches=2"]},
    {"kind": "sparse factors", "optimizer": "sparse adam", "plans": ["data=3,tables=table", "data=3,tables=rows"]},
]
FAULTS: list[dict[str, Any]] = [
    {"kind": "ranker", "optimizer": "sgd", "plans": ["data=2,tables=rows"], "fault": "gradients are a sum"},
    TWO_RANKS[3] | {"fault": "norms are of one rank"},
]
REFUSALS: list[dict[str, Any]] = [
    {"kind": "factors", "optimizer": "adafactor", "plans": ["data=2,tables=rows"], "is_refused": True},
    {"kind": "sparse factors", "optimizer": "momentum", "plans": ["data=2,tables=rows"], "is_refused": True},
]


def run_ranks(cases: list[dict[str, Any]], ranks: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return, by rank, what each found of every case."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    (folder / "cases.json").write_text(json.dumps(cases))
    launch_ranks("table_ranks", [str(folder)], folder, ranks, timeout=120)
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(ranks)]


def require_equal(rows: list[Any], cases: list[dict[str, Any]]) -> None:
    """Compare what all ranks found with one process: losses, weights, and evaluations with each other."""
    for case, *row in zip(cases, *rows, strict=True):
        for found in row:
            assert max(found["losses"], found["weights"]) < 1e-12, case
            assert found["evaluation"] == pytest.approx(row[0]["evaluation"])


def test_two_ranks_train_tables_as_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of a row follow each other, each from the checkpoint of the one before."""
    rows = run_ranks([*TWO_RANKS, *FAULTS, *REFUSALS], 2, tmp_path, monkeypatch)
    require_equal([row[: len(TWO_RANKS)] for row in rows], TWO_RANKS)
    first = [row[0] for row in rows]
    assert first[0]["words"] == "5 tables cut by rows (9,288 elements); 1 small or shared table whole on every rank"
    others = 5 * 16 + 16 + 16 * 8 + 8 + 7 * 8 + 8 * 7 + 1  # which both ranks have
    assert sum(found["share"] for found in first) == pytest.approx(1 + others / (9288 + others))
    sparse_adam = sum(row[6]["states"] for row in rows)
    assert sparse_adam == 2 * 8 * (301 + 177)  # two moments of every row, on one rank each
    faulty = [row[len(TWO_RANKS) : len(TWO_RANKS) + len(FAULTS)] for row in rows]
    assert all(found["weights"] > 1e-4 for row in faulty for found in row)
    for row in rows:
        whole, sparse = row[-2:]
        assert whole.endswith("met Adafactor of users; nearest: AdamW")
        assert sparse.endswith("met SGD with momentum of users, whose gradient is sparse; nearest: momentum=0")


def test_three_ranks_train_uneven_tables_as_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_equal(run_ranks(THREE_RANKS, 3, tmp_path, monkeypatch), THREE_RANKS)
