"""``meshwise execute`` on several hosts: the commands of every host, and the collected run."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshwise.executor.launch import several_hosts
from meshwise.executor.launch.processes import locked
from meshwise.executor.launch.several_hosts import Hosts, Rendezvous, read_run, require_processes
from meshwise.scenarios.console import emit
from meshwise.scenarios.scenario import Scenario
from meshwise.simulator.units import format_count

if TYPE_CHECKING:
    from meshwise.executor.job import Job
    from meshwise.executor.launch.run import Run

LISTED = 16
"""Largest number of hosts whose commands are printed."""


def spread(
    value: Scenario,
    processes: int | None,
    rendezvous: str | None,
    *,
    collect: bool,
    out: str | None,
    module: str | None,
) -> Hosts | None:
    """Return how the ranks of a scenario's plan are spread over hosts; None where all run on this host.

    Raises
    ------
    ValueError
        Where options contradict each other or the plan.
    """
    ranks = value.chosen().mesh.num_ranks
    if (rendezvous is not None or collect) and (out is None or module is not None):
        met = "no --out" if out is None else "--module"
        raise ValueError(f"--rendezvous and --collect go with --out, a folder of all hosts, and no --module; met {met}")
    if rendezvous is not None and collect:
        raise ValueError("--rendezvous comes before a run and --collect after it, met both")
    if rendezvous is not None:
        each = min(value.problem.cluster.first.devices, ranks) if processes is None else processes
        return Hosts.of(ranks, each, Rendezvous.parse(rendezvous))
    if processes is not None:
        require_processes(ranks, processes)
        if processes < ranks and not collect:
            raise ValueError(
                f"processes: all {ranks} ranks are here, met {processes}; nearest: {ranks}, or --rendezvous HOST:PORT "
                f"for {ranks // processes} hosts of {processes}"
            )
    return None


def prepare(jobs: "Sequence[tuple[Job, Path]]", hosts: Hosts, *, as_json: bool) -> None:
    """Write jobs into their folders and print the command of every host."""
    with locked(jobs[0][1]):
        script = several_hosts.prepare(jobs, hosts)
    commands = [f"sh {shlex.quote(str(script.resolve()))} {index}" for index in range(hosts.nodes)]
    if as_json:
        emit({"nodes": hosts.nodes, "processes": hosts.processes, "script": str(script), "commands": commands})
        return
    spread = f"{format_count(hosts.nodes, 'host')}, {format_count(hosts.processes, 'rank')} on each"
    print(f"{spread}; host 0 is {hosts.rendezvous.host}")
    for index, command in list(enumerate(commands))[:LISTED]:
        print(f"host {index}: {command}")
    if hosts.nodes > LISTED:
        print(f"... and so on to host {hosts.nodes - 1}")


def read(value: Scenario, folder: Path) -> "Run":
    """Return the run that the ranks of a scenario's plan have left in a folder.

    Raises
    ------
    ValueError
        Where the folder has no run, or a run of another plan.
    """
    job, run = read_run(folder)
    if job.plan != value.chosen():
        met = job.plan.describe()
        raise ValueError(f"{folder}: a run of this plan is collected: {value.chosen().describe()}; met {met}")
    return run
