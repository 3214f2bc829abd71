"""An order of one's own in a scenario: simulated, carried by its plan document, and blamed line by line."""

import json
from pathlib import Path

import pytest

from meshwise import load
from meshwise.reports.pictures.timeline import summarize_step
from meshwise.scenarios.commands.main import run
from meshwise.scenarios.files.reader import parse_document
from meshwise.strategies.schedules.schedule import build_schedule

HEAD = """\
model: {transformer: {layers: 8, hidden: 64, heads: 4, ffn: 256, vocab: 512}}
training: {global_batch: 4, sequence: 32}
cluster: {preset: dgx-a100-80gb, nodes: 1, devices_per_node: 2}
plan:
  pipeline: 2
"""
ORDER = "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3\n1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"


def block(order: str) -> str:
    return "  schedule: |\n" + "".join(f"    {line}\n" for line in order.splitlines())


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("s.yaml")


def test_a_block_of_text_is_the_schedule_that_prints_so(file: Path) -> None:
    assert str(build_schedule("1f1b", 2, 4)) == ORDER
    file.write_text(HEAD + block(ORDER))
    written = load(file).simulate()
    file.write_text(HEAD + "  schedule: 1f1b\n")
    named = load(file).simulate()
    assert (written.step_time, written.peak_memory) == (named.step_time, named.peak_memory)
    file.write_text(HEAD + block(ORDER.replace(" ", "   ")))  # words may stand apart
    assert load(file).simulate().step_time == named.step_time


def test_chunks_come_from_the_text(file: Path) -> None:
    file.write_text(HEAD + block(str(build_schedule("zbv", 2, 4, 2))))
    written = load(file)
    assert written.plan is not None and written.plan.chunks == 2
    file.write_text(HEAD + "  schedule: zbv\n  chunks: 2\n")
    assert written.simulate().step_time == load(file).simulate().step_time


def test_a_plan_document_carries_the_order_and_reads_back(file: Path) -> None:
    file.write_text(HEAD + block(ORDER))
    plan = load(file).plan
    assert plan is not None
    Path("plan.json").write_text(json.dumps(plan.to_json()))
    file.write_text(HEAD)
    assert load(file, "plan.json").plan == plan


@pytest.mark.parametrize(
    ("order", "place", "message"),
    [
        (ORDER.replace("1B3", "1X3"), "8:5: plan.schedule.1: ", "an action is a stage, F, B, I or W"),
        (ORDER.replace("0B0 ", ""), "7:5: plan.schedule.0: ", "met none of them"),
        (ORDER.replace("1F0 1B0", "1B0 1F0"), "8:5: plan.schedule.1: ", "waits for 1F0 of its own order"),
        ("0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3\n1F0 1F1 1B0 1B1 1F2 1B2 1F3 1B3", "7:5: plan.schedule.0: ", "rank 1 at 1F1"),
        (
            str(build_schedule("1f1b", 2, 2)),
            "6:3: plan.schedule: ",
            "= 4 microbatches, the order has 2; nearest microbatch: 2",
        ),
        (
            str(build_schedule("1f1b", 3, 4)),
            "5:3: plan.pipeline: ",
            "custom: pipeline(2) = 3 does not hold; nearest: 3",
        ),
    ],
    ids=["word", "missing", "late", "deadlock", "microbatches", "ranks"],
)
def test_what_is_wrong_is_said_with_its_line(
    order: str, place: str, message: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(HEAD + block(order))
    assert run(["simulate", str(file)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"s.yaml:{place}") and message in told
    assert "Traceback" not in told


def test_a_name_that_is_none_is_still_a_name(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("1F1B", "1f1", "[1]"):
        file.write_text(HEAD + f"  schedule: {wrong}\n")
        assert run(["validate", str(file)]) == 2
        assert capsys.readouterr().err.startswith("s.yaml:6:3: plan.schedule: holds")


def test_lines_of_a_block_have_places() -> None:
    places = parse_document(b"a:\n  b: |\n\n      one\n       two\n  c: 1\n").places
    assert (places["a", "b", 0], places["a", "b", 1]) == ((4, 7), (5, 8))
    assert ("a", "b", 2) not in places and places["a", "c"] == (6, 3)


def test_a_pipeline_without_a_flush_says_what_its_step_is(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(HEAD + "  schedule: pipedream_2bw\n")
    assert run(["simulate", str(file), "--json", "--timeline", "t.svg", "--memory", "m.svg"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert any("no flush" in line for line in result["assumptions"])
    assert Path("t.svg").stat().st_size and Path("m.svg").stat().st_size
    timeline = load(file).simulate().timeline
    assert "in the steady state" in summarize_step(timeline)
    assert timeline.begin > timeline.step_time  # after the filling
