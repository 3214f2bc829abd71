"""The request that is exported to another launcher."""

from dataclasses import dataclass

from meshwise.executor.device import CUDA
from meshwise.executor.job import Job


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """A job, and how another launcher shall run it.

    Parameters
    ----------
    name
        Name of the run, of any characters.
    processes
        Ranks on each host.
    folder
        Folder of job and results that all hosts see; for Kubernetes inside the volume.
    port
        Port of the first host at which all hosts meet.
    image, claim
        For Kubernetes: the container image, and the claim of the volume that all pods share.
    """

    name: str
    job: Job
    processes: int
    folder: str
    port: int
    image: str | None = None
    claim: str | None = None

    @property
    def num_nodes(self) -> int:
        """Number of hosts of the run."""
        return self.job.plan.mesh.num_ranks // self.processes

    @property
    def uses_gpus(self) -> bool:
        """Whether each rank has a GPU; else it has a core."""
        return self.job.device == CUDA

    @property
    def title(self) -> str:
        """Name and plan of the run in one printable line."""
        text = f"{self.name}: {self.job.plan.describe()}"
        return "".join(character if character.isprintable() else " " for character in text)


class UnsupportedRequest(ValueError):
    """The target cannot run a part of the request; the message lists every such part."""

    def __init__(self, target: str, reasons: tuple[str, ...]) -> None:
        super().__init__(f"{target} cannot say this: " + "; ".join(reasons))
