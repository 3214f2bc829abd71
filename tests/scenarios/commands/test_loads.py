"""``simulate`` and ``search`` of scenarios whose loads vary."""

import json
from pathlib import Path

import pytest

from meshwise import load
from meshwise.reports.loads import list_loads_rows
from meshwise.scenarios.commands.main import run
from meshwise.simulator.units import format_time

SCENARIO = """\
name: small
model: {transformer: {layers: 8, hidden: 1024, heads: 8, ffn: 4096, vocab: 4096, positions: rotary,
  tied_embeddings: false, experts: {count: 8, top_k: 2, ffn: 1024, imbalance: {median: 1.2, p95: 2}}}}
training: {global_batch: 32, sequence: 1024, sequence_lengths: lengths.csv, packing: none}
cluster: {preset: dgx-a100-80gb, nodes: 1, devices_per_node: 4}
plan: {data: 4, expert: 4, microbatch: 2}
search: {space: {tensor: [1], pipeline: [1], context: [1], zero: [1], recompute: [none]}}
loads: {draws: 6, seed: 1}
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(SCENARIO)
    Path("lengths.csv").write_text("length\n" + "\n".join(["100", "200", "700", "3000"] * 5) + "\n")


def test_simulate_tells_the_steps_of_the_draws(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "s.yaml", "--json"]) == 0
    first = capsys.readouterr().out
    document = json.loads(first)
    loads = document["loads"]
    assert sorted(loads["step_times"])[2] == loads["median"] <= loads["high"] == max(loads["step_times"])
    assert loads["cut"] == 0.25  # one of four is longer than 1,024 tokens
    assert loads["median"] < document["step_time"]
    assert set(loads["waiting"]) == {"other ranks' longer sequences", "experts with more tokens"}
    assert run(["simulate", "s.yaml", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["loads"] == loads
    assert run(["simulate", "s.yaml"]) == 0
    rows = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith(("loads", "their", "wait", "samp"))
    ]
    assert [row.split("  ")[0] for row in rows] == [
        "loads vary",
        "their step time",
        "waiting at the median",
        "waiting at the quantile",
        "samples",
    ]
    assert rows[-1].endswith("25 % of samples are cut to the sequence")


def test_a_step_of_full_loads_is_as_without_loads(capsys: pytest.CaptureFixture[str]) -> None:
    even = SCENARIO.replace(
        "sequence_lengths: lengths.csv, packing: none", "sequence_lengths: [{length: 1024, share: 1}]"
    )
    even = even.replace("{median: 1.2, p95: 2}", "1.0")
    plain = even.replace(", sequence_lengths: [{length: 1024, share: 1}]", "").replace("loads: {draws: 6, seed: 1}", "")
    documents = []
    for text in (even, plain):
        Path("s.yaml").write_text(text)
        assert run(["simulate", "s.yaml", "--json"]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    loads = documents[0].pop("loads")
    for document in documents:
        del document["wall_time"]
    assert documents[0] == documents[1]
    assert set(loads["step_times"]) == {documents[1]["step_time"]}


def test_search_keeps_the_plan_that_is_best_under_loads(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["search", "s.yaml", "--out", "plan.json", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ranked = found["loads"]["ranked"]
    assert ranked[0]["plan"] == load("s.yaml", "plan.json").plan.describe()  # type: ignore[union-attr]
    assert found["best"]["evaluation"]["step_time"] == ranked[0]["step_time"]
    assert found["gap"] == pytest.approx(ranked[0]["step_time"] / found["lower_bound"] - 1, abs=1e-9)
    assert run(["simulate", "s.yaml", "--plan", "plan.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loads"] == ranked[0]["loads"]
    assert run(["search", "s.yaml", "--budget", "3"]) == 0
    out = capsys.readouterr().out
    assert "tokens of samples a second; " in out
    assert "with full sequences" in out and "loads vary   the best at the 95 % quantile of 6 drawn steps" in out


def test_packed_and_padded_steps_are_compared_by_tokens_of_samples(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "s.yaml", "--json"]) == 0
    loads = json.loads(capsys.readouterr().out)["loads"]
    rate = loads["tokens_per_second"]
    lines = dict(list_loads_rows(loads))
    assert f"{rate:,.0f} tokens of samples a second ({format_time(1e6 / rate)} a million)" in lines["samples"]
    assert lines["to compare"].startswith("tokens of samples a second, not seconds a step")
    assert "to compare" not in dict(list_loads_rows(loads | {"padding": None}))


@pytest.mark.parametrize("command", [["explain"], ["search", "--nodes", "1", "--tokens", "1M"]])
def test_other_commands_say_that_they_look_at_usual_loads(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command, "s.yaml", "--seconds", "5"]) == 0
    assert "loads that vary are for simulate and search: here sequences are full" in capsys.readouterr().err


def test_a_pipeline_without_a_flush_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    text = SCENARIO.replace(
        "data: 4, expert: 4, microbatch: 2", "data: 2, pipeline: 2, schedule: pipedream, microbatch: 2"
    )
    Path("s.yaml").write_text(text)
    assert run(["simulate", "s.yaml"]) == 2
    assert "lengths that vary need a schedule with a flush, met pipedream" in capsys.readouterr().err
