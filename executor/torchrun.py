"""The command of torch that starts the ranks of one host."""

import shlex
from collections.abc import Iterable, Sequence

from executor.rendezvous import Rendezvous

ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
"""A core a rank: what the prediction for a core is of."""


def torchrun(nodes: int, processes: int, rendezvous: Rendezvous, jobs: Sequence[str]) -> tuple[str, ...]:
    """Return the words of ``torchrun`` for one host, all but its ``--node-rank``, that run jobs one after the other.

    Ranks follow hosts in order, ``processes`` on each: a plan's innermost groups stay on one host. torchrun's static
    rendezvous keeps to that order, its dynamic one does not.
    """
    spread = ("--nnodes", str(nodes), "--nproc-per-node", str(processes))
    meeting = ("--master-addr", rendezvous.host, "--master-port", str(rendezvous.port))
    return ("torchrun", *spread, *meeting, "-m", "executor.worker", *jobs)


def shell(words: Iterable[str], node_rank: str) -> str:
    """Return a command as a line of a shell, with ``node_rank``, which the shell may expand, behind its first word.

    >>> shell(("torchrun", "--nnodes", "2", "/my run/job.json"), '"$1"')
    'torchrun --node-rank "$1" --nnodes 2 \\'/my run/job.json\\''
    """
    first, *rest = words
    return f"{shlex.quote(first)} --node-rank {node_rank} {shlex.join(rest)}"
