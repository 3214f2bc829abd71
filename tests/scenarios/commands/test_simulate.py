"""``meshwise simulate --check``: what it prints, and its exit codes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from meshwise.scenarios.commands.main import run

SCENARIO = Path(__file__).parents[3] / "scenarios" / "local" / "dp2-tp2-pp2.yaml"


def test_equal_is_0_and_the_document_has_both_sides(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "local/dp2-tp2-pp2", "--check", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["check"]
    assert found["equal"] and [rank["stages"] for rank in found["ranks"]] == [[0], [1]]
    for rank in found["ranks"]:
        assert [line["category"] for line in rank["memory"]] == ["parameters", "gradients", "optimizer", "peak"]
        groups = {(line["kind"], *line["axes"]) for line in rank["collectives"]}
        assert groups == {("all_reduce", "data"), ("all_reduce", "tensor"), ("send", "pipeline")}


def test_different_is_1_and_says_where(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from meshwise.scenarios import oracle_check

    told = oracle_check.communications
    zero = lambda problem, plan, ranks: told(problem, replace(plan, zero=0), ranks)  # noqa: E731
    monkeypatch.setattr(oracle_check, "communications", zero)
    assert run(["simulate", "local/zero1", "--check"]) == 1
    said = capsys.readouterr()
    assert "the simulator and the executor's model differ" in said.err
    line = next(line for line in said.out.splitlines() if line.startswith("reduce_scatter along data"))
    assert line.endswith("DIFFERENT")


def test_zero_1_is_0() -> None:
    assert run(["simulate", "local/zero1", "--check"]) == 0


def test_a_plan_that_cannot_be_built_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lion.yaml").write_text(SCENARIO.read_text().replace("optimizer: adamw", "optimizer: lion"))
    assert run(["simulate", str(tmp_path / "lion.yaml"), "--check"]) == 2
    assert "cannot build this plan: optimizer: the executor steps with" in capsys.readouterr().err


def test_without_torch_is_2_and_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("meshwise.scenarios.oracle_check.find_spec", lambda name: None)
    assert run(["simulate", "local/dp2", "--check"]) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert message == "a check needs torch, which is not installed; pip install 'meshwise[exec]'"
