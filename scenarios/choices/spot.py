"""Runs on spot machines: what reclaims of nodes leave to training.

A reclaim takes a node away, announced or not. The run restarts on another node of the kind, which is there by then,
from its last checkpoint; a longer wait is a part of ``run.recovery.restart``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from meshwise.scenarios.scenario import Scenario
from meshwise.simulator.reliability.failures import Component, FailureKind, FailureRate, Restart, published_figure
from meshwise.simulator.reliability.goodput import expected_goodput, optimal_interval
from meshwise.simulator.units import format_duration, format_time


@dataclass(frozen=True, slots=True)
class Reclaims:
    """Reclaims at a constant rate; ``mean_interval`` is the mean time in s between those of one node."""

    mean_interval: float

    def find_most_goodput(self, scenario: Scenario) -> float:
        """Return a goodput that no run of a scenario is above.

        That of a run without failures of its own, which is the same for every step time; else 1.
        """
        return self._find_expected_goodput(scenario) if scenario.run is None else 1.0

    def find_goodput(self, scenario: Scenario, devices: Sequence[int], step_time: float) -> float:
        """Return the goodput of a run on some devices of a scenario, with its own failures where it has some.

        Those are simulated together with the reclaims. Without them it is the expected goodput of Daly's model.
        """
        if scenario.run is None:
            return self._find_expected_goodput(scenario)
        cluster = scenario.problem.cluster
        # every node may be reclaimed, also one without a rank: the job restarts with all its machines
        mtbf = self.mean_interval / cluster.num_nodes
        rate = FailureRate(FailureKind.HOST, mtbf, Component.JOB, Restart.IN_PLACE)
        return scenario.run.find_goodput(cluster, devices, step_time, (rate,)).mean

    def _find_expected_goodput(self, scenario: Scenario) -> float:
        costs, mtbf = find_default_costs(), self.mean_interval / scenario.problem.cluster.num_nodes
        interval = costs.find_interval(mtbf)
        return expected_goodput(interval, costs.blocking, costs.recovery, mtbf)

    def describe_costs(self, scenario: Scenario) -> str:
        """Return in words what a reclaim costs, and where the figures are from."""
        cluster = scenario.problem.cluster
        often = f"a node is reclaimed every {format_duration(self.mean_interval / cluster.num_nodes)}"
        if scenario.run is not None:
            return f"{often}; restart and checkpoints as in run"
        costs = find_default_costs()
        interval = format_duration(costs.find_interval(self.mean_interval / cluster.num_nodes))
        return (
            f"{often}; assumed, as the scenario has no run: {costs.restart:.0f} s to restart ({costs.restart_source}), "
            f"{costs.load:.0f} s to load a checkpoint, {format_time(costs.blocking)} to take one every {interval}, "
            f"durable after {costs.save:.0f} s ({costs.checkpoint_source})"
        )


@dataclass(frozen=True, slots=True)
class DefaultCosts:
    """Published durations in s of a restart and of checkpoints, with their sources; those of large models.

    A reclaim is announced (by 2 minutes on EC2, 30 s on Google Cloud), so that nothing is lost to detect it.
    """

    restart: float
    blocking: float
    save: float
    load: float
    restart_source: str
    checkpoint_source: str

    @property
    def recovery(self) -> float:
        """Seconds that a reclaim costs beside the training since the last checkpoint began.

        What was trained until that one was durable is lost too.
        """
        return self.restart + self.load + self.save - self.blocking

    def find_interval(self, mtbf: float) -> float:
        """Return the best training time between checkpoints, in s: not less than one takes to be durable."""
        return max(optimal_interval(self.blocking, mtbf), self.save - self.blocking)


def find_default_costs() -> DefaultCosts:
    """Return the durations that are taken where a scenario says nothing of its run."""
    restart, restart_source = published_figure("megascale.initialisation")
    blocking, checkpoint_source = published_figure("bytecheckpoint-405b.blocking")
    save, load = (published_figure(f"bytecheckpoint-405b.{name}")[0] for name in ("save", "load"))
    # the paper, before the remarks on how it was read
    papers = [source.partition(")")[0] + ")" for source in (restart_source, checkpoint_source)]
    return DefaultCosts(restart, blocking, save, load, *papers)
