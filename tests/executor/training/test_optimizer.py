"""bf16 with fp32 main weights and gradients: near fp32, the same wherever states are, in the memory simulated."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tiny_jobs import SEQUENCE, TINY, job

from meshwise.executor.job import Job
from meshwise.executor.launch.run import build_verification_job, read_losses, run_jobs
from meshwise.executor.recording.timeline import read_timeline
from meshwise.executor.supported import find_unsupported
from meshwise.simulator.engine import simulate
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import build_homogeneous
from meshwise.simulator.machine.host import Host
from meshwise.simulator.machine.topology import Link
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.offloading import offloading
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.plan.recomputation import Recompute

pytestmark = pytest.mark.fresh_ranks  # what is measured here is compared to some bytes

STEPS = 6


def trained(gradient_precision: str | None = None, *, precision: str = "bf16", **layout: Any) -> Job:
    made = job(precision=precision, steps=STEPS, dump=False, **layout)
    return replace(made, training=replace(made.training, gradient_precision=gradient_precision))


JOBS = {
    "fp32": trained(precision="fp32", data=2),
    "data": trained(data=2),
    "same": trained("same", data=2),
    "zero-1": trained(data=2, zero=1),
    "host": trained(data=2, offload=offloading(["optimizer", "activations"])),
    "streamed": trained(data=2, offload=offloading({"optimizer": {"fraction": 0.5, "step": "device"}})),
    "zero-3": trained(data=2, zero=3),
    "zero-3-host": trained(data=2, zero=3, offload=offloading(["optimizer", "parameters"])),
    "sequence-full": trained(tensor=2, microbatch=2, sequence_parallel=True, recompute=Recompute.FULL),
    "pipeline": trained(pipeline=2, microbatch=2),
    "pipedream": trained(pipeline=2, microbatch=2, schedule="pipedream"),
    "pipedream-fp32": trained(precision="fp32", pipeline=2, microbatch=2, schedule="pipedream"),
    "split": trained(pipeline=2, microbatch=2, schedule="zb1p"),
}


@pytest.fixture(scope="module")
def trains(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[float, ...]]:
    """The losses of every job."""
    folder = tmp_path_factory.mktemp("precision")
    run_jobs([(each, folder / name) for name, each in JOBS.items()])
    return {name: read_losses(each.plan, STEPS, folder / name) for name, each in JOBS.items()}


def test_bf16_trains_as_fp32_does(trains: dict[str, tuple[float, ...]]) -> None:
    fp32 = trains["fp32"]
    assert fp32[0] - fp32[-1] > 0.2
    assert trains["pipedream"] == pytest.approx(trains["pipedream-fp32"], rel=2e-3)  # 4 updates a step
    for name, found in trains.items():
        if name.startswith("pipedream"):
            continue
        # bf16 has 8 bits: 0.4 % of a value; over many tokens a loss of 5.5 errs by far less
        assert found == pytest.approx(fp32, rel=5e-4), name
        assert name == "fp32" or found != fp32


def test_where_states_are_changes_no_bit(trains: dict[str, tuple[float, ...]]) -> None:
    assert trains["data"] == trains["zero-1"] == trains["host"] == trains["streamed"]
    assert trains["zero-3"] == trains["zero-3-host"]
    assert trains["pipeline"] == trains["split"]
    assert trains["data"] != trains["same"]  # gradients of 4 microbatches are added in fp32


def test_a_verified_plan_runs_in_fp64() -> None:
    training = build_verification_job(trained("fp32", data=2)).training
    assert (training.precision, training.gradient_bytes) == ("fp64", 8)


@pytest.mark.parametrize(
    ("precision", "gradients", "layout", "reason"),
    [
        ("fp16", None, {"data": 2}, "precision: .*scales no losses.*; nearest: bf16"),
        ("fp32", "fp32", {"data": 2}, None),
        ("bf16", "same", {"data": 2, "zero": 1}, None),
        ("bf16", "same", {"data": 2, "zero": 2}, "gradient_precision: .* met same; nearest: fp32"),
    ],
)
def test_precisions_that_run(precision: str, gradients: str | None, layout: dict[str, int], reason: str | None) -> None:
    made = job(precision="fp32", **layout)
    training = replace(made.training, precision=precision, gradient_precision=gradients)
    reasons = find_unsupported(TINY, training, made.plan)
    assert len(reasons) == (reason is not None)
    if reason is not None:
        with pytest.raises(ValueError, match=reason):
            raise ValueError(reasons[0])


WIDE = Transformer(layers=6, hidden=128, heads=4, kv_heads=4, ffn=512, vocab=512, tied_embeddings=False)


def wide(microbatch: int = 4, **layout: Any) -> tuple[Problem, Job]:
    core = Accelerator("core", (("bf16", 1e11),), memory=2.0**33, memory_bandwidth=1e10)
    link = Link(latency=1e-6, bandwidth=1e9)
    cluster = build_homogeneous("laptop", core, Host("host", 2.0**34), 1, 1, link, link)
    training = Training(8, 8 * SEQUENCE, "bf16", framework="execute")
    problem = Problem(build(WIDE, 8 * SEQUENCE, "bf16"), cluster, training)
    return problem, Job(WIDE, training, complete(problem, Layout(microbatch=microbatch, **layout)), steps=1)


WIDE_CASES: dict[str, dict[str, Any]] = {
    "recomputed": {"recompute": Recompute.FULL},
    "plain": {},
    "more microbatches": {"microbatch": 2},
    "host": {"offload": offloading(["optimizer", "activations"])},
}


@pytest.mark.parametrize("name", WIDE_CASES)
def test_memory_is_as_simulated(name: str, tmp_path: Path) -> None:
    problem, own = wide(**WIDE_CASES[name])
    run_jobs([(own, tmp_path / "run")])
    told = simulate(lower(problem, own.plan), "longest_path").peak_memory
    assert told == pytest.approx(read_timeline(own.plan, tmp_path / "run").peak_memory, rel=0.01)
