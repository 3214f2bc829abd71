"""A run that torchrun starts on several hosts: its folder is prepared on one of them, and read when all have ended."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from executor.heartbeat import operation, read_beat
from executor.hosts import first_failure
from executor.job import Job, metrics_file, result_file
from executor.launcher import ExecutionError, clear
from executor.rank_error import read_errors
from executor.rendezvous import Rendezvous
from executor.run import VERIFY, Run, collect
from executor.torchrun import ENVIRONMENT, Expanded, shell, torchrun

SCRIPT = "host.sh"


@dataclass(frozen=True, slots=True)
class Hosts:
    """How a run is spread: ``nodes`` hosts with ``processes`` ranks each, which meet at ``rendezvous``."""

    nodes: int
    processes: int
    rendezvous: Rendezvous

    @classmethod
    def of(cls, ranks: int, processes: int, rendezvous: Rendezvous) -> "Hosts":
        """Return how ``ranks`` ranks are spread over hosts; `require_processes` says where they are not."""
        require_processes(ranks, processes)
        return cls(ranks // processes, processes, rendezvous)


def require_processes(ranks: int, processes: int) -> None:
    """Return where a number of processes on each host is one that a plan of ``ranks`` ranks can have.

    Raises
    ------
    ValueError
        Where they are more than the ranks, or leave some over; names the nearest number.
    """
    if processes < 1 or ranks % processes:
        nearest = max(size for size in range(1, ranks + 1) if ranks % size == 0 and size <= max(processes, 1))
        met = f"met {processes} processes of {ranks} ranks"
        what = "a plan has at least as many ranks" if processes > ranks else "the ranks divide into hosts"
        raise ValueError(f"processes: {what}, {met}; nearest: {nearest}")


def prepare(jobs: Sequence[tuple[Job, Path]], hosts: Hosts) -> Path:
    """Write jobs and the script that each host runs with its number, from 0, and return the script.

    Raises
    ------
    ValueError
        Where the port of the rendezvous is busy.
    """
    hosts.rendezvous.require_free()
    (jobs[0][1] / VERIFY / "job.json").unlink(missing_ok=True)
    for _, folder in jobs:
        folder.mkdir(parents=True, exist_ok=True)
        clear(folder)
    paths = [str(job.write(folder).resolve()) for job, folder in jobs]
    script = jobs[0][1] / SCRIPT
    meeting = hosts.rendezvous
    line = shell(torchrun(hosts.nodes, hosts.processes, Expanded('"$1"'), meeting.host, meeting.port, paths))
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in ENVIRONMENT.items())
    script.write_text(
        f'#!/bin/sh\n: "${{1:?the number of this host, from 0 to {hosts.nodes - 1}}}"\n{exports}exec {line}\n'
    )
    return script


def read_run(folder: Path) -> tuple[Job, Run]:
    """Return the job in a folder and what its ranks have left there.

    Raises
    ------
    ValueError
        Where the folder has no job.
    ExecutionError
        Where a rank failed or has not finished, or none has begun.
    """
    path = folder / "job.json"
    if not path.exists():
        raise ValueError(f"{folder}: the folder of a run has a job.json; `meshwise execute --rendezvous` writes it")
    found = [(Job.read(path), folder)]
    checked = folder / VERIFY
    if (checked / "job.json").exists():
        found.append((Job.read(checked / "job.json"), checked))
    _require_begun(found[0][0], folder)
    for job, where in found:
        _require_finished(job, where, folder)
    return found[0][0], collect(found)


def _require_begun(job: Job, folder: Path) -> None:
    if not any(read_beat(folder, rank) for rank in range(job.plan.mesh.num_ranks)):
        script = folder / SCRIPT
        how = f"run `sh {shlex.quote(str(script))} NUMBER` on each host" if script.exists() else "run it on each host"
        raise ExecutionError(f"{folder}: no rank has begun; {how}, then collect")


def _require_finished(job: Job, folder: Path, beats: Path) -> None:
    ranks = job.plan.mesh.num_ranks
    if read_errors(beats, ranks):
        raise ExecutionError(first_failure(beats, ranks))
    for rank in range(ranks):
        last = result_file(folder, rank) if job.profile else metrics_file(folder, rank)
        if not last.exists():
            raise ExecutionError(f"rank {rank} has not finished; it is at {operation(read_beat(beats, rank))}")
