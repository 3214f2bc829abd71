"""A loop runs the best plans, learns the machine from them, and keeps what is done when it is interrupted."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwise.executor.launch.run import Run
from meshwise.executor.options import RunOptions
from meshwise.scenarios.calibration.recalibration import slow_cluster
from meshwise.scenarios.closed_loop import ClosedLoop, close_loop, find_best_plans
from meshwise.scenarios.commands.main import run
from meshwise.scenarios.inputs.cluster_file import load_cluster
from meshwise.scenarios.loader import load
from meshwise.scenarios.scenario import Scenario
from meshwise.strategies.plan.plan import Plan

pytest.importorskip("torch")


def nothing(_: str) -> None:
    return None


Execute = Callable[..., Run]


def pretend(breaks_after: int) -> Execute:
    """Return what stands for executing: a machine a third as fast in products, that is interrupted after some plans."""
    done = 0

    def execute(self: Scenario, plan: Plan, options: RunOptions, **_: Any) -> Run:
        nonlocal done
        if done == breaks_after:
            raise KeyboardInterrupt
        done += 1
        machine = slow_cluster(self.problem.cluster, products=3.0, memory=1.0, launch=1.0, optimizer=1.0)
        there = replace(self, problem=replace(self.problem, cluster=machine))
        timeline = there.simulate(plan).timeline
        return Run(1, (5.0,), (timeline.step_time,), timeline.step_time, timeline.peak_memory, timeline, None)

    return execute


def loop(scenario: Scenario, most: int) -> ClosedLoop:
    return close_loop(scenario, most, RunOptions(1, verify=False), folder=None, note=nothing)


def test_the_best_plans_are_different_and_rise_in_time() -> None:
    scenario = load("local/dp2")
    found = find_best_plans(scenario, 3, nothing)
    times = [scenario.simulate(plan).step_time for plan in found]
    assert len(set(found)) == 3 and times == sorted(times)
    best = scenario.search().best
    assert best is not None and found[0] == best.plan


def test_plans_are_predicted_better_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scenario, "execute", pretend(3))
    found = loop(load("local/dp2"), 2)
    document = found.to_json()
    assert document["mean_error_before"] > 0.3
    assert document["mean_error_after"] < 0.05
    assert found.best_plan is not None and not found.interrupted


def test_an_interrupt_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(Scenario, "execute", pretend(1))
    assert run(["execute", "local/dp2", "--top", "3", "--out", str(tmp_path), "--json"]) == 130
    document = json.loads(capsys.readouterr().out)
    assert document["interrupted"] and len(document["plans"]) == 1 and document["best"] is None
    assert document["plans"][0]["predicted_after"] is None
    assert json.loads((tmp_path / "loop.json").read_text()) == document
    assert (tmp_path / "plan-1" / "difference.json").exists()
    fitted, before = load_cluster(tmp_path / "cluster.yaml"), load("local/dp2").problem.cluster
    assert fitted.accelerator.peak("fp32") < before.accelerator.peak("fp32") / 2


def test_an_interrupt_before_any_plan_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scenario, "execute", pretend(0))
    with pytest.raises(KeyboardInterrupt):
        loop(load("local/dp2"), 2)


def test_a_plan_of_the_users_own_is_refused(capsys) -> None:
    assert run(["execute", "local/dp2", "--top", "2", "--plan", "plan.json"]) == 2
    assert "plan.json" in capsys.readouterr().err
