"""What every target that starts our own worker under torchrun needs."""

from collections.abc import Iterator

from executor.export.request import Request
from executor.several_hosts import require_processes
from executor.supported import unsupported


def unlaunchable(request: Request) -> Iterator[str]:
    """Yield every reason why the worker cannot run a request under torchrun."""
    job = request.job
    if job.plan.placement:
        yield f"placement: torchrun gives ranks to hosts in order, met {len(job.plan.placement)} devices by name"
    yield from (reason for reason in unsupported(job.spec, job.training, job.plan) if not _is_placement(reason))
    if not request.folder or not request.folder.isprintable():
        yield f"folder: a folder that all hosts see, in printable characters, met {request.folder[:60]!a}"
    try:
        require_processes(job.plan.mesh.num_ranks, request.processes)
    except ValueError as error:
        yield str(error)


def _is_placement(reason: str) -> bool:
    return reason.startswith("placement:")
