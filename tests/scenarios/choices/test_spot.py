"""What reclaims of spot nodes leave to training: by hand, and as simulated runs have it."""

from dataclasses import replace
from math import e, exp, expm1
from pathlib import Path

import pytest

from meshwise.scenarios.choices.question import Question
from meshwise.scenarios.choices.setup_choice import choose_setup
from meshwise.scenarios.choices.spot import Reclaims, find_default_costs
from meshwise.scenarios.loader import load
from meshwise.simulator.reliability.failures import Component, FailureKind, FailureModel, FailureRate, Restart
from meshwise.simulator.reliability.goodput import expected_goodput, goodput, optimal_interval, young_interval
from meshwise.simulator.reliability.long_run import Checkpoint, LongRun, Recovery
from meshwise.strategies.search.objective import Machines, Objective

SMALL = """
name: small
model: {transformer: {layers: 4, hidden: 2048, heads: 16, ffn: 8192, vocab: 4096}}
training: {global_batch: 32, sequence: 1024, precision: bf16, optimizer: adamw}
cluster: {preset: dgx-a100-80gb, nodes: 2, devices_per_node: 2}
search: {space: {core: true, recompute: [none], microbatch: [4]}}
"""
RUN = """
run:
  duration: 20 days
  failures: {software_mtbf: 1000 h}
  checkpoint: {interval: 10 min, blocking: 6 s, load: 60 s}
  recovery: {detection: 0 s, restart: 60 s, repair: 1 h}
  runs: 16
"""


def test_a_spot_bill_by_hand(tmp_path: Path) -> None:
    """2 nodes, each reclaimed every 2 hours, are a reclaim an hour.

    A reclaim costs 30 s to restart, 129.49 s to load and 51.06 - 0.59 s that no checkpoint had; at 65 s of training
    between checkpoints of 0.59 s an hour of 3600 s has M (exp((65 + 0.59) / M) - 1) exp(209.96 / M) s for 65 s.
    """
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    question = Question(Objective.COST, nodes=(2,), tokens=1e9, price=2.0, spot=0.5, reclaim_every=7200.0)
    best = choose_setup(load(str(path)), question, seconds=None).best
    assert best is not None and best.bill is not None
    on_demand, spot = best.bills
    hours = 1e9 / (32 * 1024) * best.evaluation.step_time / 3600
    assert on_demand.cost == pytest.approx(4 * 2.0 * hours) and on_demand.goodput == 1
    by_hand = 65 / (3600 * expm1(65.59 / 3600) * exp(209.96 / 3600))
    assert spot.goodput == pytest.approx(by_hand, rel=1e-4) and by_hand == pytest.approx(0.9263, abs=1e-3)
    assert (
        spot.cost == pytest.approx(4 * 0.5 * hours / spot.goodput) and spot.seconds == on_demand.seconds / spot.goodput
    )
    assert best.bill is spot and best.bill.machines is Machines.SPOT
    dear = replace(question, spot=1.9)  # more than 2.0 x 0.926
    best = choose_setup(load(str(path)), dear, seconds=None).best
    assert best is not None and best.bill is not None and best.bill.machines is Machines.ON_DEMAND


def test_the_best_interval_is_the_best_and_youngs_for_cheap_checkpoints() -> None:
    best = optimal_interval(20.0, 3000.0)
    values = [expected_goodput(interval, 20.0, 100.0, 3000.0) for interval in (0.99 * best, best, 1.01 * best)]
    assert max(values) == values[1]
    assert optimal_interval(1e-3, 1e6) == pytest.approx(young_interval(1e-3, 1e6), rel=1e-3)
    # by hand: M / (M e^0.1 (e^1.1 - 1)) for an interval and a cost of M and M / 10, and a restart of M / 10
    assert expected_goodput(10.0, 1.0, 1.0, 10.0) == pytest.approx(1 / (e**0.1 * (e**1.1 - 1)))
    assert expected_goodput(10.0, 1.0, 1e6, 1.0) == 0.0


@pytest.mark.parametrize("mtbf", [1800.0, 7200.0])
def test_the_expected_goodput_is_that_of_simulated_runs(mtbf: float) -> None:
    """With checkpoints that are durable later than training goes on, as the default ones are."""
    costs = find_default_costs()
    interval = costs.find_interval(mtbf)
    rate = FailureRate(FailureKind.HOST, mtbf, Component.JOB, Restart.IN_PLACE)
    run = LongRun(
        step_time=interval / 50, devices=8, hosts=1, failures=FailureModel("reclaims", (rate,)),
        checkpoint=Checkpoint(interval, costs.blocking, costs.save, costs.load),
        recovery=Recovery(0.0, costs.restart, 0.0), duration=1000 * mtbf,
    )  # fmt: skip
    simulated = goodput(run, runs=8)
    expected = expected_goodput(interval, costs.blocking, costs.recovery, mtbf)
    assert simulated.mean == pytest.approx(expected, abs=4 * simulated.standard_error + 0.01)


def test_reclaims_come_on_top_of_the_failures_of_a_run(tmp_path: Path) -> None:
    """Simulated with the run's own costs: near the expected goodput of both rates together."""
    path = tmp_path / "small.yaml"
    path.write_text(SMALL + RUN)
    scenario = load(str(path))
    reclaims = Reclaims(7200.0)
    assert reclaims.find_most_goodput(scenario) == 1.0
    mean = reclaims.find_goodput(scenario, range(4), 1.0)
    rate = 2 / 7200 + 1 / 3.6e6
    assert mean == pytest.approx(expected_goodput(600.0, 6.0, 120.0, 1 / rate), abs=0.015)
    assert scenario.run is not None
    without = scenario.run.find_goodput(scenario.problem.cluster, range(4), 1.0).mean
    assert mean < without - 0.05
    assert "restart and checkpoints as in run" in reclaims.describe_costs(scenario)


def test_what_is_assumed_has_its_source(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    words = Reclaims(8 * 3600.0).describe_costs(load(str(path)))
    assert words.startswith("a node is reclaimed every 4 h; assumed, as the scenario has no run: 30 s to restart")
    assert "arXiv:2402.15627" in words and "arXiv:2407.20143" in words
