"""A scenario's long run: from the fields of its table to its goodput."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from meshwise.scenarios.schema.scenario import FailuresTable, RunTable
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.reliability.failures import (
    Component,
    FailureKind,
    FailureModel,
    FailureRate,
    Restart,
    failure_model,
    source,
)
from meshwise.simulator.reliability.goodput import Goodput, best_interval, goodput
from meshwise.simulator.reliability.long_run import Checkpoint, LongRun, Recovery

if TYPE_CHECKING:
    from meshwise.scenarios.simulation import Simulation

_RATES = {
    "device_mtbf": (FailureKind.DEVICE, Component.DEVICE, Restart.REPLACE_HOST),
    "host_mtbf": (FailureKind.HOST, Component.HOST, Restart.REPLACE_HOST),
    "network_mtbf": (FailureKind.NETWORK, Component.HOST, Restart.IN_PLACE),
    "software_mtbf": (FailureKind.SOFTWARE, Component.JOB, Restart.IN_PLACE),
}
_ALWAYS = (
    "run: failures strike independently at constant rates, in recovery too; spare hosts do not fail",
    "run: nothing but failures and checkpoints takes time from training",
)


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The settings of a long run, for any training step on any cluster; all times are in seconds.

    Parameters
    ----------
    interval
        Training time between two checkpoints; None to search for the best one.
    blocking, save, load
        As in `Checkpoint`.
    duration, steps
        The length of the run, by time or by steps; one of them is None.
    spares
        Number of spare hosts.
    runs
        Number of simulated runs, for the mean and its error.
    assumptions
        Defaults and figures of the catalogue that the result rests on.
    """

    failures: FailureModel
    interval: float | None
    blocking: float
    save: float
    load: float
    recovery: Recovery
    duration: float | None
    steps: int | None
    spares: int
    seed: int
    runs: int
    assumptions: tuple[str, ...]

    def on(self, cluster: Cluster, devices: Sequence[int], step_time: float) -> LongRun:
        """Return the run on ``devices`` of a cluster; with a checkpoint every step where the interval is None."""
        return LongRun(
            step_time=step_time,
            devices=len(devices),
            hosts=num_hosts(cluster, devices),
            failures=self.failures,
            checkpoint=Checkpoint(self.interval or step_time, self.blocking, self.save, self.load),
            recovery=self.recovery,
            duration=self.duration,
            steps=self.steps,
            spares=self.spares,
            seed=self.seed,
        )

    def goodput(self, cluster: Cluster, devices: Sequence[int], step_time: float) -> Goodput:
        """Return the goodput of the run, at the best checkpoint interval where the settings have none."""
        run = self.on(cluster, devices, step_time)
        return best_interval(run, self.runs).goodput if self.interval is None else goodput(run, self.runs)

    def extend(self, step: "Simulation", cluster: Cluster) -> "Simulation":
        """Return a simulated step with the goodput of its long run added; unchanged where the plan does not fit."""
        if not step.fits:
            return step
        devices = step.plan.placement or range(step.plan.mesh.num_ranks)
        result = self.goodput(cluster, devices, step.step_time)
        return replace(step, goodput=result, assumptions=(*step.assumptions, *self.assumptions))


def num_hosts(cluster: Cluster, devices: Iterable[int]) -> int:
    """Return the number of hosts of some devices of a cluster."""
    hosts = set()
    for device in devices:
        place, kind = cluster.node_of(device), cluster.node_kind(device)
        rank = device - int(cluster.first_devices[place])
        hosts.add((place, rank * kind.hosts // kind.devices))
    return len(hosts)


def to_run(table: RunTable) -> RunSettings:
    """Return the settings of a checked table."""
    checkpoint = table.checkpoint
    return RunSettings(
        failures=_failures(table.failures),
        interval=checkpoint.interval,
        blocking=checkpoint.blocking,
        save=checkpoint.blocking if checkpoint.save is None else checkpoint.save,
        load=checkpoint.load,
        recovery=Recovery(**table.recovery.model_dump()),
        duration=table.duration,
        steps=table.steps,
        spares=table.spares,
        seed=table.seed,
        runs=table.runs,
        assumptions=_assumptions(table),
    )


def _failures(value: str | FailuresTable) -> FailureModel:
    if isinstance(value, str):
        return failure_model(value)
    given = ((name, mtbf) for name, mtbf in value if mtbf is not None)
    rates = ((mtbf, *_RATES[name]) for name, mtbf in given)
    return FailureModel("written", tuple(FailureRate(kind, mtbf, unit, restart) for mtbf, kind, unit, restart in rates))


def _assumptions(table: RunTable) -> tuple[str, ...]:
    lines = list(_ALWAYS)
    if isinstance(table.failures, str):
        lines.append(f"run.failures {table.failures} has the figures of {source(table.failures)}")
    if table.checkpoint.save is None:
        lines.append("run.checkpoint.save is that of blocking (default)")
    left_out = (name for name in ("spares", "seed", "runs") if name not in table.model_fields_set)
    lines += [f"run.{name} is {getattr(table, name)} (default)" for name in left_out]
    return tuple(lines)
