"""Ranks begin with parts of the values that one process has, bit for bit, or all of them with the whole."""

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch
from start_ranks import PLANS, SEED, STARTS, Language, build_whole

from meshwise.executor.launch.launcher import launch_ranks, log_file
from meshwise.executor.recording.weight_files import read_weights
from meshwise.executor.starting.construction import DeferredModule, WholeModule, start_module
from meshwise.executor.starting.shards import WHOLE_START, find_obstacle, move_present

HERE = Path(__file__).parent


def test_ranks_begin_with_the_values_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    launch_ranks("start_ranks", [str(tmp_path)], tmp_path, 4, timeout=120)
    ranks = [json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(4)]
    expected = {kind: start_module(build, SEED).build().state_dict() for kind, build in STARTS.items()}
    expected["whole"] = build_whole().state_dict()
    for words, kinds in PLANS.items():
        for kind in kinds:
            weights = read_weights(tmp_path / words / kind)
            assert {"words.weight", "layers.3.scale", "positions"} <= weights.keys()
            for name, tensor in weights.items():
                assert torch.equal(tensor, expected[kind][name]), (words, kind, name)
            rows = [rank[words][kind] for rank in ranks]
            assert all(row == rows[0] for row in rows)
            assert len(set(rows[0]["losses"])) == 1
            assert rows[0]["is_deferred"] == (words != "data=4" and kind in ("recorded", "routed"))
    lines = [line for line in log_file(tmp_path, 0).read_text().splitlines() if WHOLE_START in line]
    assert lines == [
        f"{WHOLE_START}: rank 1: draws from a generator of its own",
        f"{WHOLE_START}: ranks build different modules",
        f"{WHOLE_START}: its forward on the first batch needs values to know what it runs",
    ]
    assert all(WHOLE_START not in log_file(tmp_path, rank).read_text() for rank in (1, 2, 3))


def test_one_process_agrees_with_itself() -> None:
    start = start_module(Language, 0)
    assert isinstance(start, DeferredModule) and find_obstacle(start) is None
    assert find_obstacle(WholeModule(Language())) == ""
    assert find_obstacle(WholeModule(Language(), "reads")) == "rank 0: reads"


def test_what_is_present_moves_alone() -> None:
    module = start_module(Language, 0).module
    module = move_present(module, torch.device("meta"))
    assert module.positions.is_meta
    module = move_present(start_module(Language, 0).module.double(), torch.device("cpu"))
    assert module.words.weight.is_meta and not module.positions.is_meta
