"""``search`` with an objective, terms of a run or numbers of nodes, and its progress as JSON lines."""

import json
from pathlib import Path

import pytest

from meshwise.scenarios.commands.main import run

SCENARIO = """
name: small
model: {transformer: {layers: 4, hidden: 512, heads: 8, ffn: 2048, vocab: 1024}}
training: {global_batch: 16, sequence: 256, precision: bf16}
cluster: {preset: dgx-a100-80gb, nodes: 1, devices_per_node: 2}
search: {space: {core: true}}
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(SCENARIO)


def test_the_document_has_the_best_setup_and_all_others(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--minimize", "cost", "--price", "2.00", "--tokens", "1B", "--nodes", "1,2", "--out", "plan.json"]
    assert run(["search", "s.yaml", *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [setup["nodes"] for setup in found["setups"]] == [1, 2] and found["gap"] == 0
    best = found["best"]
    bill, steps = best["bill"], 1e9 / (16 * 256)
    assert bill["cost"] == pytest.approx(2.0 * best["devices"] * steps * best["step_time"] / 3600)
    assert json.loads(Path("plan.json").read_text()) == best["plan"]


def test_a_deadline_that_nothing_keeps_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--minimize", "devices", "--tokens", "1B", "--deadline", "1 s", "--nodes", "1..2"]
    assert run(["search", "s.yaml", *options]) == 3
    assert capsys.readouterr().err.startswith("no plan of 2 setups keeps the deadline of 1 s; nearest: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--minimize", "money"], "--minimize is one of time, cost, devices, energy, met money"),
        (["--minimize", "cost"], "--price: minimize cost needs the price of a device-hour, met none; as in 2.50"),
        (["--spot", "0.80"], "--reclaim-every: spot machines are reclaimed, and their bill needs the mean time"),
        (["--reclaim-every", "8h"], "--spot: reclaims are of spot machines and need their price, met none"),
        (["--spot", "0.80", "--reclaim-every", "8"], "--reclaim-every is a time with its unit, as in 30d"),
        (["--tokens", "1T", "--deadline", "30d", "--budget-usd", "much"], "--budget-usd is in US dollars, as in 5000"),
        (["--nodes", "1", "--plot", "front.gif"], "front.gif: a name ends in .png, .svg, met '.gif'"),
        (["--nodes", "4..2"], "--nodes holds numbers or ranges, at most 1000, as in 8 or 1,2,4..8; met 4..2"),
        (["--nodes", "900000"], "nodes: 900,000 of 2 devices are more than 1,000,000; nearest: 500,000"),
        (["--tokens", "15X"], "--tokens is a number of tokens, as in 15T, 300B or 4e6; met 15X"),
        (["--tokens", "1T", "--deadline", "30"], "--deadline is a time with its unit, as in 30d or '12 h'; met 30"),
        (["--price", "cheap"], "--price is in US dollars for an hour of one device"),
        (["--nodes", "1..2", "--algorithm", "mcmc"], "--algorithm is for searches of the least time on one machine"),
        (["--progress", "xml"], "--progress is json, or left out for a line on a terminal; met xml"),
    ],
)
def test_bad_options_are_told(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["search", "s.yaml", *options]) == 2
    assert message in capsys.readouterr().err


def test_progress_is_one_document_a_line_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["search", "s.yaml", "--algorithm", "best_first", "--progress", "json", "--json"]) == 0
    captured = capsys.readouterr()
    lines = [json.loads(line) for line in captured.err.splitlines()]
    assert lines[-1]["phase"] == "end" and lines[-1]["gap"] == json.loads(captured.out)["gap"] == 0
    assert all({"phase", "best", "bound", "gap", "share"} <= line.keys() for line in lines[:-1])
    best = [line["best"] for line in lines[:-1] if line["best"] is not None]
    assert best == sorted(best, reverse=True)


SPOT = ["--price", "2.00", "--spot", "0.50", "--reclaim-every", "4h", "--tokens", "1B"]


def test_both_bills_are_shown_and_the_better_one_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["search", "s.yaml", "--minimize", "cost", "--nodes", "1,2", *SPOT]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "run on demand  cost on demand" in lines[1] and "run spot  cost spot" in lines[1]
    assert sum(line.endswith("best, spot") for line in lines) == 1
    words = {line.split("  ")[0]: line for line in lines}
    assert words["on demand"].count("$") == 1 and "30 s to restart (MegaScale" in words["reclaims"]


def test_the_front_is_in_the_document_and_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["search", "s.yaml", "--nodes", "1,2", *SPOT, "--front", "--plot", "f.png", "--json"]) == 0
    front = json.loads(capsys.readouterr().out)["front"]
    assert {(point["nodes"], point["machines"]) for point in front} == {
        (nodes, machines) for nodes in (1, 2) for machines in ("on demand", "spot")
    }
    assert all(point["proven"] for point in front) and any(point["on_front"] for point in front)
    assert Path("f.png").read_bytes().startswith(b"\x89PNG")
    assert run(["search", "s.yaml", "--nodes", "1,2", *SPOT, "--front"]) == 0
    assert "place on the front" in capsys.readouterr().out


def test_a_plan_of_another_size_runs_with_the_scenario_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    """The command that is printed, word for word."""
    options = ["--minimize", "time", "--tokens", "1B", "--nodes", "2", "--batch", "32"]
    assert run(["search", "s.yaml", *options, "--out", "plan.json", "--json"]) == 0
    captured = capsys.readouterr()
    command = captured.err.strip().rpartition(": ")[2]
    assert command == "meshwise simulate plan.scenario.yaml --plan plan.json"
    assert run([*command.split()[1:], "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert simulated["step_time"] == pytest.approx(json.loads(captured.out)["best"]["step_time"], rel=1e-9)


def test_a_file_asks_and_options_override(capsys: pytest.CaptureFixture[str]) -> None:
    Path("q.yaml").write_text(
        SCENARIO.replace(
            "{space: {core: true}}", "{space: {core: true}, minimize: cost, price: 2, tokens: 1B, nodes: 1..2}"
        )
    )
    assert run(["search", "q.yaml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["objective"] == "cost" and found["terms"]["price"] == 2 and len(found["setups"]) == 2
    assert run(["search", "q.yaml", "--minimize", "time", "--nodes", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["objective"] == "time" and len(found["setups"]) == 1 and found["terms"]["tokens"] == 1e9
    assert run(["search", "q.yaml", "--algorithm", "mcmc"]) == 2
    assert "met mcmc beside minimize, nodes, tokens, price, which ask for" in capsys.readouterr().err


def test_a_target_that_the_space_excludes_names_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    Path("p.yaml").write_text(
        "model: {preset: llama3-8b}\ntraining: {global_batch: 32, sequence: 1024}\n"
        "cluster: {preset: dgx-h100, nodes: 1}\nsearch: {space: {pipeline: [2]}}\n"
    )
    assert run(["search", "p.yaml", "--for", "accelerate", "--nodes", "1,2"]) == 3
    captured = capsys.readouterr()
    assert captured.err.startswith("no plan is allowed on any of 2 setups: the search space is empty")
    assert "without search.space.pipeline there are some" in captured.err and "no plan allowed" in captured.out


RUNNABLE = """
name: none runs the best
model: {transformer: {layers: 8, hidden: 2048, heads: 16, ffn: 8192, vocab: 4096}}
training: {global_batch: 64, sequence: 1024}
cluster: {preset: dgx-a100-80gb, nodes: 1}
"""


def test_a_best_plan_that_no_trainer_runs_has_one_beside_it_with_its_bill(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if no trainer could say the best plan: a search for each finds the fastest that one can."""
    monkeypatch.setattr("meshwise.scenarios.commands.search_setups.list_launches", lambda scenario, plan: ())
    Path("r.yaml").write_text(RUNNABLE)
    options = ["--minimize", "cost", "--price", "2", "--tokens", "1B", "--nodes", "1", "--seconds", "20"]
    assert run(["search", "r.yaml", *options, "--out", "p.json", "--json"]) == 0
    runnable = json.loads(capsys.readouterr().out)["runnable"]
    steps = 1e9 / (64 * 1024)
    assert runnable["bill"]["cost"] == pytest.approx(8 * 2 * steps * runnable["step_time"] / 3600)
    assert json.loads(Path(f"p-{runnable['trainer']}.json").read_text()) == runnable["plan"]
