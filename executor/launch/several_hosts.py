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
from typing import Protocol

from meshwise.executor.job import Job, metrics_file, result_file
from meshwise.executor.launch.launcher import ExecutionError, clear_folder
from meshwise.executor.launch.run import VERIFY, Run, collect_run
from meshwise.executor.recording.rank_files import describe_first_failure, parse_operation, read_beat, read_errors

WORKER = "meshwise.executor.launch.worker"
"""The module that runs the jobs of the executor's own models."""
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
        """Raise ``ValueError`` where the host is this machine and something listens on the port.

        The message names the next free port. Another machine is not asked.
        """
        if self._is_here() and not _is_port_free(self.port):
            free_port = next((port for port in range(self.port + 1, 65536) if _is_port_free(port)), None)
            nearest = f"; nearest: {free_port}" if free_port else ""
            raise ValueError(f"rendezvous: the port is free on {self.host}, met {self.port}, which is busy{nearest}")

    def _is_here(self) -> bool:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(self.host, 0, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError:
            return False
        return True


def _is_port_free(port: int) -> bool:
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


class ExpandedWord(str):
    """A word of a command that a shell or another program expands; it is quoted already where it must be."""


def build_torchrun(
    num_nodes: int,
    processes: int,
    node_rank: str,
    master: str,
    port: int,
    jobs: Sequence[str],
    worker: str = WORKER,
) -> tuple[str, ...]:
    """Return the words of a ``torchrun`` command for one host, which runs jobs in order; hosts meet at ``master``.

    ``worker`` is the module that a rank runs with the files of the jobs.

    Ranks follow hosts in order, ``processes`` on each, so that a plan's innermost groups stay on one host. torchrun's
    static rendezvous keeps that order, its dynamic one does not.
    """
    size_options = ("--nnodes", str(num_nodes), "--node-rank", node_rank, "--nproc-per-node", str(processes))
    address_options = ("--master-addr", master, "--master-port", str(port))
    return ("torchrun", *size_options, *address_options, "-m", worker, *jobs)


def format_command(words: Iterable[str]) -> str:
    """Return a command as a line for a shell.

    >>> format_command(("torchrun", "--node-rank", ExpandedWord('"$1"'), "/my run/job.json"))
    'torchrun --node-rank "$1" \\'/my run/job.json\\''
    """
    return " ".join(word if isinstance(word, ExpandedWord) else shlex.quote(word) for word in words)


SCRIPT = "host.sh"


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a run: ``nodes`` hosts with ``processes`` ranks each, which meet at ``rendezvous``."""

    nodes: int
    processes: int
    rendezvous: Rendezvous

    @classmethod
    def from_ranks(cls, num_ranks: int, processes: int, rendezvous: Rendezvous) -> "Hosts":
        """Return the hosts for ``num_ranks`` ranks; raises as `require_processes` where these do not fill hosts."""
        require_processes(num_ranks, processes)
        return cls(num_ranks // processes, processes, rendezvous)


def require_processes(num_ranks: int, processes: int) -> None:
    """Raise ``ValueError`` where a plan of ``num_ranks`` ranks cannot have ``processes`` processes on each host.

    The message names the nearest number that divides the ranks.
    """
    if processes < 1 or num_ranks % processes:
        nearest = max(size for size in range(1, num_ranks + 1) if num_ranks % size == 0 and size <= max(processes, 1))
        counts_text = f"met {processes} processes of {num_ranks} ranks"
        rule = "a plan has at least as many ranks" if processes > num_ranks else "the ranks divide into hosts"
        raise ValueError(f"processes: {rule}, {counts_text}; nearest: {nearest}")


class HostJob(Protocol):
    """A job that ranks on other hosts read from a folder that all hosts share."""

    def write(self, folder: Path) -> Path:
        """Write the job into a folder and return its file."""


def prepare_hosts(jobs: Sequence[tuple[HostJob, Path]], hosts: Hosts, worker: str = WORKER) -> Path:
    """Write the jobs, and the script that each host runs with its number, from 0; return the path of the script.

    ``worker`` is the module that a rank runs. ``ValueError`` where the port of the rendezvous is busy.
    """
    hosts.rendezvous.require_free()
    # a verification of an earlier run in this folder would be collected with this one
    (jobs[0][1] / VERIFY / "job.json").unlink(missing_ok=True)
    for _, folder in jobs:
        folder.mkdir(parents=True, exist_ok=True)
        clear_folder(folder)
    paths = [str(job.write(folder).resolve()) for job, folder in jobs]
    script = jobs[0][1] / SCRIPT
    host, port = hosts.rendezvous.host, hosts.rendezvous.port
    line = format_command(build_torchrun(hosts.nodes, hosts.processes, ExpandedWord('"$1"'), host, port, paths, worker))
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
    jobs = [(Job.read(path), folder)]
    check_folder = folder / VERIFY
    if (check_folder / "job.json").exists():
        jobs.append((Job.read(check_folder / "job.json"), check_folder))
    _require_begun(jobs[0][0], folder)
    for job, job_folder in jobs:
        _require_finished(job, job_folder, folder)
    return jobs[0][0], collect_run(jobs)


def _require_begun(job: Job, folder: Path) -> None:
    if not any(read_beat(folder, rank) for rank in range(job.plan.mesh.num_ranks)):
        script = folder / SCRIPT
        instruction = (
            f"run `sh {shlex.quote(str(script))} NUMBER` on each host" if script.exists() else "run it on each host"
        )
        raise ExecutionError(f"{folder}: no rank has begun; {instruction}, then collect")


def _require_finished(job: Job, folder: Path, beats: Path) -> None:
    num_ranks = job.plan.mesh.num_ranks
    if read_errors(beats, num_ranks):
        raise ExecutionError(describe_first_failure(beats, num_ranks))
    for rank in range(num_ranks):
        last_file = result_file(folder, rank) if job.profile else metrics_file(folder, rank)
        if not last_file.exists():
            raise ExecutionError(f"rank {rank} has not finished; it is at {parse_operation(read_beat(beats, rank))}")
