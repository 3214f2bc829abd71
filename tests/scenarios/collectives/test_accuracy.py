"""Predicted against measured collectives."""

import json
from pathlib import Path

import pytest

from meshwise.scenarios.collectives.accuracy import (
    COLUMNS,
    find_category,
    find_factors,
    format_collectives_csv,
    predict_messages,
    summarize_collectives,
)
from meshwise.scenarios.collectives.rows import is_collective_file, parse_messages
from meshwise.scenarios.collectives.text_fit import find_cluster, fit_links_to_text
from meshwise.simulator.catalog import cluster

HEAD = "# size count type redop root time algbw busbw #wrong time algbw busbw #wrong"


def write_text(nodes: int, times: dict[int, float]) -> str:
    """Return a run of eight H100 a node with an all-reduce of each size in bytes that took so many us."""
    devices = [
        f"#  Rank {rank} Group  0 Pid {rank} on host{rank // 8} device {rank % 8} [0x1b] NVIDIA H100 80GB HBM3"
        for rank in range(8 * nodes)
    ]
    rows = [f"{size} {size // 4} float sum -1 {time} 1 1 0 {time} 1 1 N/A" for size, time in times.items()]
    return "\n".join(["# Collective test starting: all_reduce_perf", *devices, HEAD, *rows])


TIMES = {2**20: 93.0, 2**24: 202.0, 2**28: 1296.0, 2**33: 34508.0}


def test_groups_by_place_and_size() -> None:
    messages, _ = parse_messages(write_text(1, {2**20: 30.0}) + "\n" + write_text(2, TIMES), "text")
    predictions = predict_messages(messages)
    result = summarize_collectives(predictions)
    counts = {name: entry["count"] for name, entry in result["groups"].items()}
    assert counts == {
        "inside a node, >= 16 MiB": 0,
        "inside a node, all sizes": 1,
        "between nodes, >= 16 MiB": 3,
        "between nodes, all sizes": 4,
    }
    assert result["all"]["count"] == 5 and 0 <= result["all"]["inside"] <= 1
    assert all(row.low <= row.seconds <= row.high for row in predictions)


def test_what_is_not_known_has_a_wider_interval() -> None:
    (known,), _ = parse_messages(write_text(1, {2**24: 200.0}), "text")
    (unknown,), _ = parse_messages(write_text(1, {2**24: 200.0}).replace("H100 80GB HBM3", "Graphics Device"), "text")
    assert find_category(known) == find_category(unknown) == "inside a node, large"
    assert find_factors(unknown)[0] < find_factors(known)[0] < 1 < find_factors(known)[1] < find_factors(unknown)[1]


def test_a_csv_line_a_message() -> None:
    messages, _ = parse_messages(write_text(2, TIMES), "text")
    header, *lines = format_collectives_csv(predict_messages(messages)).splitlines()
    assert header.split(",") == list(COLUMNS) and len(lines) == 4
    assert lines[0].startswith("all_reduce,16,2,1048576,")


def test_a_fit_to_a_text_meets_it_better() -> None:
    fit = fit_links_to_text(write_text(2, TIMES))
    assert fit.machine.first_node.devices == 8 and fit.between == 4
    assert fit.error < fit.prior_error
    # the same on a machine that the caller names
    assert fit_links_to_text(write_text(2, TIMES), cluster("dgx-h100")).error == pytest.approx(fit.error, rel=0.2)


def test_texts_and_machines_without_use_are_told() -> None:
    with pytest.raises(ValueError, match="can be used, met none"):
        fit_links_to_text("hello")
    with pytest.raises(ValueError, match=r"met 'dgx-h10'; nearest: dgx-h100"):
        find_cluster("dgx-h10")


def test_files_are_told_apart(tmp_path: Path) -> None:
    text, rows, training = (tmp_path / name for name in ("a.txt", "b.jsonl", "c.jsonl"))
    text.write_text(write_text(2, TIMES))
    rows.write_text(json.dumps({"collective": "all_reduce"}) + "\n")
    training.write_text(json.dumps({"model": "gpt"}) + "\n")
    assert [is_collective_file(path) for path in (text, rows, training, tmp_path)] == [True, True, False, False]
