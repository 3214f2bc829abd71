"""Figures of a machine are found again from the steps of plans that ran on a slower one."""

from dataclasses import replace

import pytest
from tiny_jobs import TINY, cluster

from meshwise.scenarios.calibration.recalibration import FIGURES, PlanRun, predict_step, refit_cluster, slow_cluster
from meshwise.simulator.collective import Collective, CollectiveCurve
from meshwise.simulator.engine import simulate
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.models.model import build
from meshwise.simulator.timeline import Timeline
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.plan.problem import Problem, Training

from ...studies.prediction_trials import list_plans

ALL_REDUCE = CollectiveCurve(Collective.ALL_REDUCE, 2, ((1024.0, 1e-4), (2.0**20, 1e-3)))
SPEC = replace(TINY, hidden=256, ffn=1024)
NODE, _ = cluster(2).nodes[0]
DEVICE = replace(NODE.accelerator, launch=1e-5, optimizer_launch=1e-5)
MACHINE = replace(cluster(2), nodes=((replace(NODE, accelerator=DEVICE), 1),), collectives=(ALL_REDUCE,))
PROBLEM = Problem(build(SPEC, 64, "fp32"), MACHINE, Training(16, 64, "fp32", framework="torch"))


def runs(machine: Cluster, count: int = 3) -> list[PlanRun]:
    """Return what plans would show on another machine."""
    found = []
    for plan in list_plans(PROBLEM, 2, count, SPEC):
        timeline = simulate(lower(replace(PROBLEM, cluster=machine), plan), "discrete_event")
        found.append(PlanRun(plan, timeline, timeline.step_time))
    return found


def test_a_machine_that_was_predicted_right_stays_as_it_is() -> None:
    found = refit_cluster(PROBLEM, runs(MACHINE))
    assert dict(found.device) == pytest.approx(dict.fromkeys(FIGURES, 1.0), abs=1e-3)
    assert dict(found.collectives) == pytest.approx({"all_reduce over 2 ranks": 1.0})


def test_a_slower_machine_is_found_again_and_predicts_a_plan_it_has_not_seen() -> None:
    slower = replace(ALL_REDUCE, points=tuple((size, 3 * seconds) for size, seconds in ALL_REDUCE.points))
    there = slow_cluster(replace(MACHINE, collectives=(slower,)), products=2.0, memory=1.5, launch=3.0, optimizer=0.7)
    *seen, other = runs(there, 4)
    found = refit_cluster(PROBLEM, seen)
    assert dict(found.collectives) == pytest.approx({"all_reduce over 2 ranks": 3.0})
    for run in (*seen, other):
        assert predict_step(PROBLEM, MACHINE, run.plan) < 0.8 * run.step_time
        assert predict_step(PROBLEM, found.cluster, run.plan) == pytest.approx(run.step_time, rel=0.05)


def test_a_profiler_that_slows_everything_alike_changes_nothing() -> None:
    def profiled(run: PlanRun) -> PlanRun:
        spans = tuple(span._replace(start=1.3 * span.start, end=1.3 * span.end) for span in run.timeline.spans)
        whole: Timeline = replace(run.timeline, spans=spans, step_time=1.3 * run.timeline.step_time)
        return replace(run, timeline=whole)

    there = slow_cluster(MACHINE, products=1.5, memory=1.0, launch=1.0, optimizer=1.0)
    plain, slow = (refit_cluster(PROBLEM, each) for each in (runs(there, 2), [profiled(run) for run in runs(there, 2)]))
    assert dict(slow.device) == pytest.approx(dict(plain.device), rel=1e-3)


def test_a_collective_without_a_curve_gets_what_was_measured() -> None:
    send = next(
        c for c in refit_cluster(PROBLEM, runs(MACHINE, 1)).cluster.collectives if c.collective is Collective.SEND
    )
    # one microbatch of 4 sequences of 64 tokens, 256 values of 4 bytes each, over a link of 1 GB/s and 1 us
    assert send.ranks == 2 and send.points == ((4 * 64 * 256 * 4, pytest.approx(1e-6 + 262144e-9, rel=1e-3)),)


def test_without_a_run_there_is_nothing_to_fit() -> None:
    with pytest.raises(ValueError, match="at least one run, met none"):
        refit_cluster(PROBLEM, [])
