"""What is to be said in another system's words."""

from dataclasses import dataclass

from meshwise.executor.device import CUDA
from meshwise.executor.job import Job


@dataclass(frozen=True, slots=True)
class Request:
    """A job, and how it is to be run.

    Parameters
    ----------
    name
        What the run is called; may hold any characters.
    processes
        Ranks on each host.
    folder
        Where job and results are, seen by all hosts; for Kubernetes inside the volume.
    port
        On which the first host is met.
    image, claim
        For Kubernetes: the container image, and the volume that all pods share.
    """

    name: str
    job: Job
    processes: int
    folder: str
    port: int
    image: str | None = None
    claim: str | None = None

    @property
    def nodes(self) -> int:
        """Hosts of the run."""
        return self.job.plan.mesh.num_ranks // self.processes

    @property
    def gpus(self) -> bool:
        """Whether each rank has a GPU, else a core."""
        return self.job.device == CUDA

    @property
    def title(self) -> str:
        """The plan in one printable line."""
        text = f"{self.name}: {self.job.plan.describe()}"
        return "".join(character if character.isprintable() else " " for character in text)


class CannotSay(ValueError):
    """The target has no words for a part of the request; the message lists every such part."""

    def __init__(self, target: str, reasons: tuple[str, ...]) -> None:
        super().__init__(f"{target} cannot say this: " + "; ".join(reasons))
