"""The command of torch that starts the ranks of one host."""

import shlex
from collections.abc import Iterable, Sequence

ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
"""A core a rank: what the prediction for a core is of."""


class Expanded(str):
    """A word of a command that a shell or another program expands, quoted already where it must be."""


def torchrun(nodes: int, processes: int, node_rank: str, first: str, port: int, jobs: Sequence[str]) -> tuple[str, ...]:
    """Return the words of ``torchrun`` for one host that run jobs one after the other; hosts meet at the ``first``.

    Ranks follow hosts in order, ``processes`` on each: a plan's innermost groups stay on one host. torchrun's static
    rendezvous keeps to that order, its dynamic one does not.
    """
    spread = ("--nnodes", str(nodes), "--node-rank", node_rank, "--nproc-per-node", str(processes))
    where = ("--master-addr", first, "--master-port", str(port))
    return ("torchrun", *spread, *where, "-m", "executor.worker", *jobs)


def shell(words: Iterable[str]) -> str:
    """Return a command as a line of a shell.

    >>> shell(("torchrun", "--node-rank", Expanded('"$1"'), "/my run/job.json"))
    'torchrun --node-rank "$1" \\'/my run/job.json\\''
    """
    return " ".join(word if isinstance(word, Expanded) else shlex.quote(word) for word in words)
