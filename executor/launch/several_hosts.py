"""Prepares and reads a run that torchrun starts on several hosts.

The folder of the run is prepared on one host, and read when all ranks have ended. Hosts meet at the name and a port of
the first host.
"""

import errno
import re
import shlex
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwise.executor.job import Job, metrics_file, result_file
from meshwise.executor.launch.launcher import ExecutionError, clear
from meshwise.executor.launch.run import VERIFY, Run, collect
from meshwise.executor.recording.rank_files import first_failure, operation, read_beat, read_errors

DEFAULT_PORT = 29500
"""torchrun's default port."""
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:%-]*[A-Za-z0-9])?|::1?")


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The first host of a run, by name or address, and the port of its store."""

    host: str
    port: int = DEFAULT_PORT

    def __post_init__(self) -> None:
        if not _HOST.fullmatch(self.host):
            raise ValueError(f"rendezvous: HOST:PORT names a host by name or address, met {self.host[:60]!r}")
        if not 1 <= self.port <= 65535:
            raise ValueError(f"rendezvous: a port is from 1 to 65535, met {self.port}; nearest: {DEFAULT_PORT}")

    @classmethod
    def parse(cls, text: str) -> "Rendezvous":
        """Return the rendezvous that ``HOST``, ``HOST:PORT`` or ``[ADDRESS]:PORT`` names.

        >>> Rendezvous.parse("node0:1234"), Rendezvous.parse("[fd00::2]:80").host
        (Rendezvous(host='node0', port=1234), 'fd00::2')
        """
        match = re.fullmatch(r"(?:\[(?P<address>[^\]]*)\]|(?P<name>[^:]*))(?::(?P<port>[0-9]{1,9}))?", text)
        if match is None:
            raise ValueError(f"rendezvous: HOST:PORT is the first host and a port of it, met {text[:60]!r}")
        return cls(match["address"] or match["name"] or "", int(match["port"] or DEFAULT_PORT))

    def require_free(self) -> None:
        """Raise where the port is busy on this machine; another machine is not asked.

        Raises
        ------
        ValueError
            Where the host is this machine and something listens on the port; the message names the next free port.
        """
        if self._is_here() and not _is_free(self.port):
            free = next((port for port in range(self.port + 1, 65536) if _is_free(port)), None)
            nearest = f"; nearest: {free}" if free else ""
            raise ValueError(f"rendezvous: the port is free on {self.host}, met {self.port}, which is busy{nearest}")

    def _is_here(self) -> bool:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(self.host, 0, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError:
            return False
        return True


def _is_free(port: int) -> bool:
    """Return whether torchrun's store could have a port of this host, on all of whose addresses it listens."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
"""Environment of every rank: one thread, because the simulator's device is one core."""


class Expanded(str):
    """A word of a command that a shell or another program expands; it is quoted already where it must be."""


def torchrun(nodes: int, processes: int, node_rank: str, first: str, port: int, jobs: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a ``torchrun`` command for one host, which runs jobs in order; hosts meet at ``first``.

    Ranks follow hosts in order, ``processes`` on each, so that a plan's innermost groups stay on one host. torchrun's
    static rendezvous keeps that order, its dynamic one does not.
    """
    spread = ("--nnodes", str(nodes), "--node-rank", node_rank, "--nproc-per-node", str(processes))
    where = ("--master-addr", first, "--master-port", str(port))
    return ("torchrun", *spread, *where, "-m", "meshwise.executor.launch.worker", *jobs)


def shell(words: Iterable[str]) -> str:
    """Return a command as a line for a shell.

    >>> shell(("torchrun", "--node-rank", Expanded('"$1"'), "/my run/job.json"))
    'torchrun --node-rank "$1" \\'/my run/job.json\\''
    """
    return " ".join(word if isinstance(word, Expanded) else shlex.quote(word) for word in words)


SCRIPT = "host.sh"


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a run: ``nodes`` hosts with ``processes`` ranks each, which meet at ``rendezvous``."""

    nodes: int
    processes: int
    rendezvous: Rendezvous

    @classmethod
    def of(cls, ranks: int, processes: int, rendezvous: Rendezvous) -> "Hosts":
        """Return the hosts for ``ranks`` ranks; raises as `require_processes` where ranks do not divide into hosts."""
        require_processes(ranks, processes)
        return cls(ranks // processes, processes, rendezvous)


def require_processes(ranks: int, processes: int) -> None:
    """Raise where a plan of ``ranks`` ranks cannot have ``processes`` processes on each host.

    Raises
    ------
    ValueError
        Where ``processes`` does not divide the ranks; the message names the nearest number that does.
    """
    if processes < 1 or ranks % processes:
        nearest = max(size for size in range(1, ranks + 1) if ranks % size == 0 and size <= max(processes, 1))
        met = f"met {processes} processes of {ranks} ranks"
        what = "a plan has at least as many ranks" if processes > ranks else "the ranks divide into hosts"
        raise ValueError(f"processes: {what}, {met}; nearest: {nearest}")


def prepare(jobs: Sequence[tuple[Job, Path]], hosts: Hosts) -> Path:
    """Write the jobs, and the script that each host runs with its number, from 0; return the path of the script.

    Raises
    ------
    ValueError
        Where the port of the rendezvous is busy.
    """
    hosts.rendezvous.require_free()
    # a verification of an earlier run in this folder would be collected with this one
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
    """Return the job in a folder and the results that its ranks wrote there.

    Raises
    ------
    ValueError
        Where the folder has no job.
    ExecutionError
        Where a rank failed or has not finished, or no rank has begun.
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
