"""Tiny jobs for the executor's tests."""

from pathlib import Path
from typing import Any

from meshwise.executor.check.verification import Verification
from meshwise.executor.job import Job
from meshwise.executor.launch.run import compare_job, run_jobs
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster, build_homogeneous
from meshwise.simulator.machine.host import Host
from meshwise.simulator.machine.topology import Link
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem, Training

TINY = Transformer(layers=4, hidden=32, heads=4, kv_heads=4, ffn=64, vocab=256, tied_embeddings=False)
SEQUENCE = 16


def cluster(devices: int) -> Cluster:
    peaks = ("fp32", 1e11), ("fp64", 5e10), ("bf16", 1e11)
    accelerator = Accelerator("core", peaks, memory=2.0**33, memory_bandwidth=1e10)
    link = Link(latency=1e-6, bandwidth=1e9)
    return build_homogeneous("laptop", accelerator, Host("host", 2.0**34), 1, devices, link, link)


def plan(spec: Transformer, training: Training, **layout: Any) -> Plan:
    chosen = Layout(**layout)
    ranks = chosen.data * chosen.tensor * chosen.pipeline * chosen.context
    graph = build(spec, training.sequence, training.precision)
    return complete(Problem(graph, cluster(ranks), training), chosen)


def job(
    spec: Transformer = TINY,
    *,
    precision: str = "fp64",
    optimizer: str = "adamw",
    global_batch: int = 8,
    sequence: int = SEQUENCE,
    steps: int = 3,
    dump: bool = True,
    profile: bool = False,
    timeout: float = 60.0,
    **layout: Any,
) -> Job:
    training = Training(global_batch, sequence, precision, optimizer)
    chosen = plan(spec, training, **layout)
    return Job(spec, training, chosen, steps, dump=dump, profile=profile, timeout=timeout)


def verify_all(folder: Path, jobs: dict[str, Job]) -> dict[str, Verification]:
    """Run jobs of as many ranks in one launch and compare each with one process."""
    pairs = [(job, folder / name) for name, job in jobs.items()]
    run_jobs(pairs)
    return {name: compare_job(job, folder / name) for name, job in jobs.items()}
