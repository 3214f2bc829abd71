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
    failure_model_source,
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
_CONSTANT_ASSUMPTIONS = (
    "run: failures strike independently at constant rates, in recovery too; spare hosts do not fail",
    "run: nothing but failures and checkpoints takes time from training",
)


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The settings of a long run, for any training step on any cluster; all times are in seconds."""

    table: RunTable

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Defaults and figures of the catalogue that the result rests on."""
        return _list_assumptions(self.table)

    def to_long_run(self, cluster: Cluster, devices: Sequence[int], step_time: float) -> LongRun:
        """Return the run on ``devices`` of a cluster; with a checkpoint every step where the interval is None."""
        table, checkpoint = self.table, self.table.checkpoint
        save = checkpoint.blocking if checkpoint.save is None else checkpoint.save
        return LongRun(
            step_time=step_time,
            devices=len(devices),
            hosts=count_hosts(cluster, devices),
            failures=_build_failures(table.failures),
            checkpoint=Checkpoint(checkpoint.interval or step_time, checkpoint.blocking, save, checkpoint.load),
            recovery=Recovery(**table.recovery.model_dump()),
            duration=table.duration,
            steps=table.steps,
            spares=table.spares,
            seed=table.seed,
        )

    def find_goodput(
        self, cluster: Cluster, devices: Sequence[int], step_time: float, more_rates: tuple[FailureRate, ...] = ()
    ) -> Goodput:
        """Return the goodput of the run, at the best checkpoint interval where the settings have none.

        ``more_rates`` are failures beside those of the settings.
        """
        run, runs = self.to_long_run(cluster, devices, step_time), self.table.runs
        if more_rates:
            run = replace(run, failures=replace(run.failures, rates=(*run.failures.rates, *more_rates)))
        return best_interval(run, runs).goodput if self.table.checkpoint.interval is None else goodput(run, runs)

    def extend_simulation(self, simulation: "Simulation", cluster: Cluster) -> "Simulation":
        """Return a simulated step with the goodput of its long run added; unchanged where the plan does not fit."""
        if not simulation.fits:
            return simulation
        devices = simulation.plan.placement or range(simulation.plan.mesh.num_ranks)
        result = self.find_goodput(cluster, devices, simulation.step_time)
        return replace(simulation, goodput=result, assumptions=(*simulation.assumptions, *self.assumptions))


def count_hosts(cluster: Cluster, devices: Iterable[int]) -> int:
    """Return the number of hosts of some devices of a cluster."""
    hosts = set()
    for device in devices:
        place, kind = cluster.node_of(device), cluster.node_kind(device)
        index = device - int(cluster.first_devices[place])
        hosts.add((place, index * kind.hosts // kind.devices))
    return len(hosts)


def _build_failures(value: str | FailuresTable) -> FailureModel:
    if isinstance(value, str):
        return failure_model(value)
    mtbf_items = ((name, mtbf) for name, mtbf in value if mtbf is not None)
    rates = ((mtbf, *_RATES[name]) for name, mtbf in mtbf_items)
    return FailureModel("written", tuple(FailureRate(kind, mtbf, unit, restart) for mtbf, kind, unit, restart in rates))


def _list_assumptions(table: RunTable) -> tuple[str, ...]:
    lines = list(_CONSTANT_ASSUMPTIONS)
    if isinstance(table.failures, str):
        lines.append(f"run.failures {table.failures} has the figures of {failure_model_source(table.failures)}")
    if table.checkpoint.save is None:
        lines.append("run.checkpoint.save is that of blocking (default)")
    default_names = (name for name in ("spares", "seed", "runs") if name not in table.model_fields_set)
    lines += [f"run.{name} is {getattr(table, name)} (default)" for name in default_names]
    return tuple(lines)
