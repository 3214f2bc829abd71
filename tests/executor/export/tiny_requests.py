"""Requests for the tests of every target."""

from dataclasses import replace
from typing import Any

from meshwise.executor.device import CPU
from meshwise.executor.export.launchers import LaunchRequest

from ...studies.fault_trials import build_job

HOSTILE = (
    'a"; rm -rf / #',
    "$(reboot) `reboot`",
    "it's\nEND_OF_JOB\n#SBATCH --nodes=99",
    "- [x]: {y: !!python/object:os.system}",
    "\x00\x1b[2J",
    "名前",
    "",
    "-",
    "9" * 300,
)


def request(ranks: int = 4, processes: int = 2, device: str = CPU, **changes: Any) -> LaunchRequest:
    job = replace(build_job(ranks, 200.0), profile=True, steps=2, device=device)
    where: dict[str, Any] = {"folder": "run", "port": 29518, "image": "registry/meshwise:1", "claim": "runs"}
    return LaunchRequest(**{"name": "tiny", "job": job, "processes": processes} | where | changes)
