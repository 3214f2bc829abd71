"""The pace of a machine is found from the steps it would take, and scales what it says it scales."""

from collections.abc import Sequence
from dataclasses import astuple, replace

import pytest

pytest.importorskip("torch")

from tiny_jobs import cluster

from meshwise.executor.job import Job
from meshwise.scenarios.calibration import calibrate as module
from meshwise.scenarios.calibration.calibrate import Slowdown, drift, measure_slowdown, slow_down, with_slowdown
from meshwise.simulator.collective import Collective, CollectiveCurve
from meshwise.simulator.engine import simulate
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.machine.kernels import AttentionModel
from meshwise.simulator.models.model import build
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.plan.problem import Problem


def machine() -> Cluster:
    """Two cores whose kernels and messages all cost something."""
    found = cluster(2)
    points = ((2.0**10, 1e-3), (2.0**24, 2e-2))
    curves = tuple(CollectiveCurve(each, 2, points) for each in Collective if each is not Collective.PUSH_PULL)
    node, count = found.nodes[0]
    device = replace(
        node.accelerator,
        launch=1e-5,
        optimizer_launch=5e-5,
        sharded_launch=2e-4,
        unit_launch=4e-4,
        recompute_launch=6e-4,
        matmul=replace(node.accelerator.matmul, sharpness=1.0),
        attention=AttentionModel(launch=3e-5),
    )
    return replace(found, nodes=((replace(node, accelerator=device), count),), collectives=curves)


def steps_of(there: Cluster) -> object:
    """Return what measures jobs as a machine would run them, exactly."""

    def measured(jobs: Sequence[Job]) -> list[float]:
        found = []
        for job in jobs:
            problem = Problem(build(job.spec, job.training.sequence, "fp32"), there, job.training)
            found.append(simulate(lower(problem, job.plan), "longest_path").step_time)
        return found

    return measured


def test_the_pace_of_the_machine_that_ran_the_steps_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    meant = Slowdown(
        compute=1.2,
        memory=2.0,
        launch=1.4,
        sharded_launch=1.5,
        unit_launch=3.0,
        recompute_launch=1.3,
        latency=1.7,
        transfer=2.5,
    )
    monkeypatch.setattr(module, "_measured", steps_of(with_slowdown(machine(), meant)))
    # a factor of 1 has a small weight beside the plans, which draws every figure a little towards it
    assert astuple(measure_slowdown(machine())) == pytest.approx(astuple(meant), rel=0.05)


def test_drift_is_what_the_minute_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_measured", steps_of(slow_down(machine(), 1.5)))
    assert drift(machine()) == pytest.approx(1.5, rel=1e-3)


def test_a_machine_at_pace_takes_as_much_longer() -> None:
    before, after = machine(), with_slowdown(machine(), Slowdown(2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0))
    device, slow = before.accelerator, after.accelerator
    assert device.peak("fp32") / slow.peak("fp32") == pytest.approx(2)
    assert device.memory_bandwidth / slow.memory_bandwidth == pytest.approx(3)
    assert slow.launch / device.launch == pytest.approx(4)
    assert slow.optimizer_launch / device.optimizer_launch == pytest.approx(4)
    assert slow.attention.launch / device.attention.launch == pytest.approx(4)
    assert slow.sharded_launch / device.sharded_launch == pytest.approx(5)
    assert slow.unit_launch / device.unit_launch == pytest.approx(6)
    assert slow.recompute_launch / device.recompute_launch == pytest.approx(7)
    # messages of 1 KiB take 1 ms, and those of 16 MiB 20 ms: 8 times 1 ms, and 9 times the 19 ms besides
    times = [(curve.time(2**10), curve.time(2**24)) for curve in (before.collectives[0], after.collectives[0])]
    assert times == [pytest.approx((1e-3, 2e-2)), pytest.approx((8e-3, 8e-3 + 9 * 19e-3))]


def test_on_a_slower_machine_everything_takes_as_much_longer() -> None:
    before, after = machine(), slow_down(machine(), 1.5)
    assert after.collectives[0].time(2**20) / before.collectives[0].time(2**20) == pytest.approx(1.5)
    assert after.accelerator.launch / before.accelerator.launch == pytest.approx(1.5)
