"""Steps are read on from where reading was, whole ones of all ranks only."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.executor.user_training.job import metrics_file
from meshwise.executor.user_training.log import StepReader, StepRow, log_rows


def make_line(step: int, rank: int) -> str:
    row = {"step": step, "loss": 0.5 * step, "seconds": 1.0 + rank, "samples": 2 + rank, "tokens": None}
    return json.dumps(row | {"learning_rate": 0.1}) + "\n"


@given(st.integers(1, 3), st.integers(0, 6), st.lists(st.tuples(st.integers(0, 2), st.integers(1, 150)), max_size=30))
def test_rows_come_once_and_whole(
    tmp_path_factory: pytest.TempPathFactory, num_ranks: int, num_steps: int, writes: list[tuple[int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    rest = ["".join(make_line(step, rank) for step in range(num_steps)) for rank in range(num_ranks)]
    told: list[StepRow] = []
    reader = StepReader(folder, num_ranks, range(num_ranks), told.append)
    for rank, size in [*writes, *((rank, 10**6) for rank in range(num_ranks))]:
        rank %= num_ranks
        with metrics_file(folder, rank).open("a") as file:
            file.write(rest[rank][:size])
        rest[rank] = rest[rank][size:]
        reader.read_on()
    assert [row.step for row in told] == list(range(num_steps)) and reader.rows == told
    samples = sum(2 + rank for rank in range(num_ranks))
    assert all((row.seconds, row.samples) == (num_ranks, samples) for row in told)


def test_a_log_goes_on_where_a_run_does(tmp_path: Path) -> None:
    for first_step in (0, 2):
        log_row = log_rows(tmp_path, first_step, None, has_board=False)
        for step in range(first_step, first_step + 3):
            log_row(StepRow(step, 1.0, 0.5, 4, 40, 0.1, {"value": 2.0} if step == 2 else {}))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert (rows[0]["samples_per_second"], rows[0]["tokens_per_second"]) == (8.0, 80.0)
    assert ["evaluation" in row for row in rows] == [False, False, True, False, False]
