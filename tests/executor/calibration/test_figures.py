"""Rows of measurements: one JSON object a line, six digits a number, counted as they come."""

import json
from pathlib import Path

from meshwise.executor.calibration.figures import append_row, calibration_file, count_rows, describe_row


def test_rows_come_one_behind_the_other_with_six_digits(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert count_rows(path) == 0
    append_row(path, {"kernel": "gemm", "m": 123456789, "time_us": 1.23456789, "note": "a\nb"})
    append_row(path, {"time_us": 0.000123456789})
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == [{"kernel": "gemm", "m": 123456789, "time_us": 1.23457, "note": "a\nb"}, {"time_us": 0.000123457}]
    assert count_rows(path) == 2


def test_a_row_is_told_by_its_kernel_and_sizes(tmp_path: Path) -> None:
    row = {"m": 8, "pass": "fwd", "note": "slow", "kernel": "gemm"}
    assert describe_row(row) == "gemm fwd m=8"
    assert calibration_file(tmp_path, 3) != calibration_file(tmp_path, 4)
