"""Requests for other launchers, and a function for each that writes one; all start our own worker under torchrun.

For Slurm it is a batch script: ``sbatch FILE`` runs the plan, with one torchrun a node. Options and variables are those
of sbatch(1) and srun(1): ``SLURM_NODEID`` counts the nodes of the allocation from 0, and ``scontrol show hostnames``
lists them in that order.

For Kubernetes it is a manifest: ``kubectl apply -f FILE`` runs the plan, with one pod a host. An Indexed Job gives each
pod its number and, with a headless Service, the name ``JOB-INDEX.SERVICE``, by which the other pods reach pod 0
(kubernetes.io, "Job with Pod-to-Pod Communication"). The job document is a ConfigMap; results are in a volume that all
pods share.
"""

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from meshwise.executor.device import CUDA
from meshwise.executor.job import Job
from meshwise.executor.launch.several_hosts import (
    ENVIRONMENT,
    ExpandedWord,
    build_torchrun,
    format_command,
    require_processes,
)
from meshwise.executor.supported import find_unsupported


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


def find_obstacles(request: LaunchRequest) -> Iterator[str]:
    """Yield every reason why the worker cannot run a request under torchrun."""
    job = request.job
    if job.plan.placement:
        yield f"placement: torchrun gives ranks to hosts in order, met {len(job.plan.placement)} devices by name"
    reasons = find_unsupported(job.spec, job.training, job.plan)
    yield from (reason for reason in reasons if not reason.startswith("placement:"))
    if not request.folder or not request.folder.isprintable():
        yield f"folder: a folder that all hosts see, in printable characters, met {request.folder[:60]!a}"
    try:
        require_processes(job.plan.mesh.num_ranks, request.processes)
    except ValueError as error:
        yield str(error)


_END_MARK = "END_OF_JOB"
"""Marks the end of the job in the script; no line of JSON is this word."""


def to_slurm(request: LaunchRequest) -> str:
    """Return the batch script for Slurm; `UnsupportedRequest` where the worker cannot run the request."""
    if reasons := tuple(find_obstacles(request)):
        raise UnsupportedRequest("slurm", reasons)
    name = to_slurm_name(request.name)
    jobs, node_rank, master = [ExpandedWord('"$2/job.json"')], ExpandedWord('"$SLURM_NODEID"'), ExpandedWord('"$1"')
    torchrun = build_torchrun(request.num_nodes, request.processes, node_rank, master, request.port, jobs)
    command = f"exec {format_command(torchrun)}"
    gpus = [f"#SBATCH --gpus-per-node={request.processes}"] if request.uses_gpus else []
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {request.title}",
            f"#SBATCH --job-name={name}",
            f"#SBATCH --nodes={request.num_nodes}",
            "#SBATCH --ntasks-per-node=1",
            f"#SBATCH --cpus-per-task={request.processes}",
            *gpus,
            f"#SBATCH --output={name}-%j.log",
            "",
            "set -euo pipefail",
            f"run={shlex.quote(request.folder)}",
            'mkdir -p -- "$run"',
            'run=$(cd -- "$run" && pwd)',
            f"cat >\"$run/job.json\" <<'{_END_MARK}'",
            request.job.to_text(),
            _END_MARK,
            *(f"export {key}={shlex.quote(value)}" for key, value in build_environment(request).items()),
            'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            f'srun --kill-on-bad-exit=1 bash -c {shlex.quote(command)} bash "$first" "$run"',
            "",
        ]
    )


def build_environment(request: LaunchRequest) -> dict[str, str]:
    """Return the environment variables of the ranks."""
    return ENVIRONMENT | ({"NCCL_DEBUG": "WARN"} if request.uses_gpus else {})


def to_slurm_name(text: str) -> str:
    """Return a job name of letters, digits, points and hyphens, because sbatch splits its options at spaces.

    >>> to_slurm_name("gpt3-175b on 1024 A100"), to_slurm_name("-- ")
    ('gpt3-175b-on-1024-A100', 'meshwise')
    """
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")[:64] or "meshwise"


MAX_CONFIG = 2**20
"""Most bytes of a ConfigMap (kubernetes.io, "ConfigMaps": 1 MiB)."""
MAX_LABEL = 63
"""Most characters of a host name (RFC 1123); a pod's is the job's name, a hyphen and its number."""
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_VOLUME, _CONFIG = "/meshwise/volume", "/meshwise/config"
# every pod copies to its own file and renames it: readers never see half a job
_COPY_AND_RUN = (
    'mkdir -p "$0" && cp "$1" "$0/.job.$NODE_RANK" && mv "$0/.job.$NODE_RANK" "$0/job.json" && shift && exec "$@"'
)


def to_kubernetes(request: LaunchRequest) -> str:
    """Return the manifest for Kubernetes; `UnsupportedRequest` where it lacks something or the worker cannot run it."""
    if reasons := (*find_obstacles(request), *_find_missing(request)):
        raise UnsupportedRequest("kubernetes", tuple(reasons))
    name = to_kubernetes_name(request.name, request.num_nodes)
    metadata = {"metadata": {"name": name}}
    # pods look pod 0 up before any of them is ready
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": name}}
    documents = [
        {"apiVersion": "v1", "kind": "ConfigMap", **metadata, "data": {"job.json": request.job.to_text()}},
        {"apiVersion": "v1", "kind": "Service", **metadata, "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", **metadata, "spec": _build_job(name, request)},
    ]
    return f"# {request.title}\n" + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)


def _find_missing(request: LaunchRequest) -> list[str]:
    reasons = []
    if request.image is None or not _IMAGE.fullmatch(request.image):
        reasons.append(
            f"image: the name of a container image with meshwise and torch, met {_quote_text(request.image)}"
        )
    if request.claim is None or not _SUBDOMAIN.fullmatch(request.claim) or len(request.claim) > 253:
        reasons.append(f"claim: the name of a volume claim that all pods can write, met {_quote_text(request.claim)}")
    if (size := len(request.job.to_text())) > MAX_CONFIG:
        reasons.append(f"a ConfigMap holds {MAX_CONFIG} bytes, met a job of {size}")
    return reasons


def _quote_text(text: str | None) -> str:
    return "none" if text is None else f"{text[:60]!a}"


def to_kubernetes_name(text: str, nodes: int) -> str:
    """Return a job name of lower-case letters, digits and hyphens, short enough for the host names of its pods.

    A Service of the same name begins with a letter (RFC 1035).

    >>> to_kubernetes_name("GPT-3 175B; on A100", 128), to_kubernetes_name("7b", 1)
    ('gpt-3-175b-on-a100', 'run-7b')
    """
    max_length = MAX_LABEL - len(f"-{nodes - 1}")
    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "meshwise"
    return (words if words[0].isalpha() else f"run-{words}")[:max_length].strip("-")


def _build_job(name: str, request: LaunchRequest) -> dict[str, Any]:
    pod = {
        "subdomain": name,
        "restartPolicy": "Never",
        "containers": [_build_container(name, request)],
        "volumes": [
            {"name": "config", "configMap": {"name": name}},
            {"name": "volume", "persistentVolumeClaim": {"claimName": request.claim}},
            # NCCL needs more shared memory than a container has by default
            *([{"name": "shm", "emptyDir": {"medium": "Memory"}}] if request.uses_gpus else []),
        ],
    }
    return {
        "completions": request.num_nodes,
        "parallelism": request.num_nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": pod},
    }


def _build_container(name: str, request: LaunchRequest) -> dict[str, Any]:
    """Return the container of a pod, which copies the job into the run's folder and then runs torchrun.

    ``$(NODE_RANK)`` is expanded by Kubernetes; ``$$`` is its escape for a dollar.
    """
    folder = f"{_VOLUME}/{request.folder.lstrip('/')}"
    master = f"{name}-0.{name}"
    words = build_torchrun(
        request.num_nodes, request.processes, "$(NODE_RANK)", master, request.port, [f"{folder}/job.json"]
    )
    command = ["sh", "-c", _COPY_AND_RUN, folder, f"{_CONFIG}/job.json", *words]
    variables = [{"name": key, "value": value} for key, value in build_environment(request).items()]
    resources = {"cpu": request.processes} | ({"nvidia.com/gpu": request.processes} if request.uses_gpus else {})
    return {
        "name": "ranks",
        "image": request.image,
        "command": [word if word == "$(NODE_RANK)" else word.replace("$", "$$") for word in command],
        "env": [{"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}}, *variables],
        "resources": {"requests": resources, "limits": resources},
        "volumeMounts": [
            {"name": "config", "mountPath": _CONFIG},
            {"name": "volume", "mountPath": _VOLUME},
            *([{"name": "shm", "mountPath": "/dev/shm"}] if request.uses_gpus else []),
        ],
    }


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a literal block, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _represent_text)


TARGETS: dict[str, Callable[[LaunchRequest], str]] = {"slurm": to_slurm, "kubernetes": to_kubernetes}
"""Name of a launcher -> the function that writes a request for it, or raises `UnsupportedRequest` where it cannot."""
