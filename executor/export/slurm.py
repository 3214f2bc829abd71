"""A batch script for Slurm: ``sbatch FILE`` runs the plan, one torchrun a node.

Options and variables are those of sbatch(1) and srun(1): ``SLURM_NODEID`` counts the nodes of the allocation from 0,
and ``scontrol show hostnames`` lists them in that order.
"""

import re
import shlex

from executor.export.launchable import unlaunchable
from executor.export.request import CannotSay, Request
from executor.torchrun import ENVIRONMENT, Expanded, shell, torchrun

_END = "END_OF_JOB"
"""Ends the job in the script: no line of JSON is this word."""


def to_slurm(request: Request) -> str:
    """Return the script; `CannotSay` where the worker cannot run the request."""
    if reasons := tuple(unlaunchable(request)):
        raise CannotSay("slurm", reasons)
    name = slurm_name(request.name)
    jobs, node, first = [Expanded('"$2/job.json"')], Expanded('"$SLURM_NODEID"'), Expanded('"$1"')
    inner = f"exec {shell(torchrun(request.nodes, request.processes, node, first, request.port, jobs))}"
    gpus = [f"#SBATCH --gpus-per-node={request.processes}"] if request.gpus else []
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {request.title}",
            f"#SBATCH --job-name={name}",
            f"#SBATCH --nodes={request.nodes}",
            "#SBATCH --ntasks-per-node=1",
            f"#SBATCH --cpus-per-task={request.processes}",
            *gpus,
            f"#SBATCH --output={name}-%j.log",
            "",
            "set -euo pipefail",
            f"run={shlex.quote(request.folder)}",
            'mkdir -p -- "$run"',
            'run=$(cd -- "$run" && pwd)',
            f"cat >\"$run/job.json\" <<'{_END}'",
            request.job.text(),
            _END,
            *(f"export {key}={shlex.quote(value)}" for key, value in environment(request).items()),
            'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            f'srun --kill-on-bad-exit=1 bash -c {shlex.quote(inner)} bash "$first" "$run"',
            "",
        ]
    )


def environment(request: Request) -> dict[str, str]:
    """Return what the ranks find in their environment."""
    return ENVIRONMENT | ({"NCCL_DEBUG": "WARN"} if request.gpus else {})


def slurm_name(text: str) -> str:
    """Return a name of a job in letters, digits, points and hyphens: sbatch reads its options word by word.

    >>> slurm_name("gpt3-175b on 1024 A100"), slurm_name("-- ")
    ('gpt3-175b-on-1024-A100', 'meshwise')
    """
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")[:64] or "meshwise"
