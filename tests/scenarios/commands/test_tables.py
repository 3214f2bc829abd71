"""What users of the command line see of embedding tables."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwise.scenarios.commands.main import run

SCENARIO = """
name: small recommender
model: {dlrm: {rows: [300000, 20000], hots: [4, 1], embedding: 32, dense: 8, bottom: [32], top: [16, 1]}, POPULARITY}
training: {global_batch: 1024, sequence: 1, precision: fp32, optimizer: sgd}
cluster: {preset: dgx-h100, nodes: 1}
plan: {data: 8, microbatch: 128, embeddings: EMBEDDINGS}
"""


def write_scenario(folder: Path, embeddings: str, popularity: str = "popularity: 1.1") -> str:
    path = folder / "tables.yaml"
    path.write_text(SCENARIO.replace("EMBEDDINGS", embeddings).replace("POPULARITY", popularity))
    return str(path)


def print_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run([*arguments, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_simulate_says_how_tables_lie(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_scenario(tmp_path, "{table_0: {placement: host, cache: 0.1}, default: table}")
    assert run(["simulate", path]) == 0
    printed = capsys.readouterr().out
    assert "rows on hosts, 0.1 cached" in printed and "table on device 0" in printed
    assert "data rank 0 keeps most of the tables, and rank 0 reads and writes most" in printed
    document = print_json(capsys, "simulate", path)["embedding_tables"]
    assert [row["name"] for row in document["tables"]] == ["table_0", "table_1"]


def test_throughput_of_a_recommender_counts_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_scenario(tmp_path, "rows")
    assert run(["simulate", path]) == 0
    printed = capsys.readouterr().out
    assert "│ samples per second " in printed and "samples per second and device" in printed
    assert "tokens per second" not in printed
    document = print_json(capsys, "simulate", path)
    assert document["unit"] == "samples"
    assert document["tokens_per_second"] == pytest.approx(1024 / document["step_time"])


def test_verbose_shows_all_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "many.yaml"
    sizes, hots = [1000 * (n + 1) for n in range(11)], [1] * 11
    text = SCENARIO.replace("rows: [300000, 20000], hots: [4, 1]", f"rows: {sizes}, hots: {hots}")
    path.write_text(text.replace("EMBEDDINGS", "table").replace("POPULARITY", "popularity: 1.1"))
    assert run(["simulate", str(path)]) == 0
    few = capsys.readouterr().out
    assert (
        few.count("│ table_") == 8 and "... and 3 smaller tables, " in few and "(--verbose or --json shows all)" in few
    )
    assert run(["simulate", str(path), "--verbose"]) == 0
    every = capsys.readouterr().out
    assert every.count("│ table_") == 11 and "smaller table" not in every and "more data ranks" not in every


def test_without_shared_tables_nothing_is_said_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "embedding_tables" not in print_json(capsys, "simulate", write_scenario(tmp_path, "replicated"))


def test_a_plan_file_keeps_the_placement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, plan = write_scenario(tmp_path, "rows"), str(tmp_path / "plan.json")
    found = print_json(capsys, "search", path, "--out", plan)
    again = print_json(capsys, "simulate", path, "--plan", plan)
    assert again["step_time"] == found["best"]["evaluation"]["step_time"]
    assert json.loads(Path(plan).read_text())["embeddings"]


def test_explain_says_how_tables_lie(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", write_scenario(tmp_path, "rows"), "--seconds", "20"]) == 0
    assert "embedding tables, the largest first" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("embeddings", "popularity", "message"),
    [
        ("{table_7: rows}", "popularity: 1", "plan.embeddings.table_7: names a table, of table_0, table_1, or default"),
        ("row", "popularity: 1", "plan.embeddings: is one of replicated, sparse, table, rows"),
        ("{default: {cache: 0.5}}", "popularity: 1", "plan.embeddings.default.cache: is of a table with placement:"),
        ("node_rows", "popularity: 1", "plan.embeddings: node_rows needs ranks in order on all devices of several"),
        ("rows", "popularity: -1", "model.popularity: is at least 0.0, met -1; nearest: 0.0"),
    ],
)
def test_wrong_words_end_with_2_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], embeddings: str, popularity: str, message: str
) -> None:
    assert run(["validate", write_scenario(tmp_path, embeddings, popularity)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert any(message in line for line in lines), lines
    assert "Traceback" not in "".join(lines)


def test_all_faults_of_tables_are_told_at_their_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    embeddings = "{table_0: {cut: row, cache: 2}, table_1: {cut: rows, device: 1}, optimizer: adamw, pipelined: 7}"
    path = write_scenario(tmp_path, embeddings)
    assert run(["validate", path]) == 2
    lines = [line.removeprefix(f"{path}:") for line in capsys.readouterr().err.splitlines()]
    assert [line.split(": ")[:2] for line in lines] == [
        ["6:57", "plan.embeddings.table_0.cut"],
        ["6:67", "plan.embeddings.table_0.cache"],
        ["6:99", "plan.embeddings.table_1.device"],
        ["6:111", "plan.embeddings.optimizer"],
        ["6:129", "plan.embeddings.pipelined"],
    ]


def test_other_models_have_no_popularity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "vit.yaml"
    path.write_text(
        "name: images\nmodel: {preset: vit-b-16, popularity: 1.0}\n"
        "training: {global_batch: 64, sequence: 197}\ncluster: {preset: dgx-h100, nodes: 1}\n"
    )
    assert run(["validate", str(path)]) == 2
    assert "is that of rows of a recommender's tables, vit-b-16 has none" in capsys.readouterr().err
