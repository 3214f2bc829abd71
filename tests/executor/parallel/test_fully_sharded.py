"""Ranks on cores that share parameters and gradients hold what the simulator says: torch gathers ahead there too."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tiny_jobs import cluster

from meshwise.executor.job import Job
from meshwise.executor.launch.run import run_jobs
from meshwise.executor.recording.timeline import read_timeline
from meshwise.simulator.engine import simulate
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.simulator.program import Category
from meshwise.simulator.timeline import Timeline
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.plan.recomputation import Recompute

pytestmark = pytest.mark.fresh_ranks  # what is measured here is compared to some bytes

SPEC = Transformer(layers=4, hidden=128, heads=4, kv_heads=4, ffn=512, vocab=256, tied_embeddings=False)
SEQUENCE = 64


def cores() -> Cluster:
    """Two devices that compute their own collectives."""
    found = cluster(2)
    node, count = found.nodes[0]
    device = replace(node.accelerator, computes_collectives=True)
    return replace(found, nodes=((replace(node, accelerator=device), count),))


def problem() -> Problem:
    return Problem(build(SPEC, SEQUENCE, "fp32"), cores(), Training(16, SEQUENCE, "fp32", framework="torch"))


def job(**layout: Any) -> Job:
    return Job(SPEC, problem().training, complete(problem(), Layout(data=2, **layout)), steps=1)


JOBS = {
    "ZeRO 2": job(microbatch=8, zero=2),
    "ZeRO 3": job(microbatch=8, zero=3),
    "ZeRO 3, recomputed": job(microbatch=4, zero=3, recompute=Recompute.FULL),
}


def told(name: str) -> Timeline:
    return simulate(lower(problem(), JOBS[name].plan), "longest_path")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Timeline]:
    """The measured timeline of every job."""
    folder: Path = tmp_path_factory.mktemp("sharded")
    pairs = [(each, folder / str(number)) for number, each in enumerate(JOBS.values())]
    run_jobs(pairs)
    return {name: read_timeline(each.plan, at) for name, (each, at) in zip(JOBS, pairs, strict=True)}


@pytest.mark.parametrize("name", JOBS)
def test_the_peak_is_as_simulated(name: str, ran: dict[str, Timeline]) -> None:
    # gloo has a copy of what it reduces until it has: of a layer's gradients, on a busy machine of two; it shows where
    # the rest is small. A layer has 12 h^2 + 13 h parameters
    h = SPEC.hidden
    copies = 2 * 4 * (12 * h**2 + 13 * h) if JOBS[name].plan.recompute is Recompute.FULL else 0
    simulated, measured = told(name).peak_memory, ran[name].peak_memory
    assert 0.98 * simulated <= measured <= 1.02 * simulated + copies


def test_with_zero_2_a_rank_has_whole_parameters_and_its_shards() -> None:
    # 4 bytes a parameter, and half of them again; states are two moments of 4 bytes of its half
    parameters = problem().graph.num_parameters
    held = dict(zip(Category, told("ZeRO 2").memory[0].usage[0], strict=True))
    assert held[Category.PARAMETERS] == pytest.approx(4 * parameters * 1.5, rel=1e-3)
    assert held[Category.OPTIMIZER] == pytest.approx(2 * 4 * parameters / 2, rel=1e-3)
