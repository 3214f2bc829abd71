"""Every system that a plan can be said to: one function each, in a file of its own."""

from collections.abc import Callable

from executor.export.kubernetes import to_kubernetes
from executor.export.request import Request
from executor.export.slurm import to_slurm

TARGETS: dict[str, Callable[[Request], str]] = {"slurm": to_slurm, "kubernetes": to_kubernetes}
"""What writes a request for a system, by the name of the system; raises `CannotSay` where it has no words for it."""
