"""Plans on a GPU compute what one process computes, and hold what is simulated; without a GPU nothing is run."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU on this machine", allow_module_level=True)

from dataclasses import replace  # noqa: E402

from tiny_jobs import TINY, job, plan, verify_all  # noqa: E402

from meshwise.executor.device import CUDA  # noqa: E402
from meshwise.executor.job import Job  # noqa: E402
from meshwise.executor.launch.run import execute, read_gpu_memory, run_jobs  # noqa: E402
from meshwise.executor.options import RunOptions  # noqa: E402
from meshwise.simulator.models.transformer import Transformer  # noqa: E402
from meshwise.simulator.program import StreamKind, TaskKind  # noqa: E402
from meshwise.strategies.plan.offloading import offloading  # noqa: E402
from meshwise.strategies.plan.problem import Training  # noqa: E402
from meshwise.strategies.plan.recomputation import Recompute, SomeOperators  # noqa: E402

LLAMA = replace(TINY, kv_heads=2, ffn_kind="swiglu", positions="rotary")
ALONE = {
    "plain": job(microbatch=2),
    "llama": job(LLAMA, microbatch=2),
    "unfused": job(replace(TINY, attention="unfused"), microbatch=2),
    "sgd": job(microbatch=2, optimizer="sgd"),
    "full": job(microbatch=2, recompute=Recompute.FULL),
    "selective": job(microbatch=2, recompute=Recompute.SELECTIVE),
    "operators": job(microbatch=2, recompute=SomeOperators(("input_norm", "activation"))),
    "optimizer": job(microbatch=2, offload=offloading(["optimizer"])),
    "streamed optimizer": job(microbatch=2, offload=offloading({"optimizer": {"fraction": 1.0, "step": "device"}})),
    "half of the optimizer": job(microbatch=2, offload=offloading({"optimizer": 0.5})),
    "activations": job(microbatch=2, offload=offloading(["activations"])),
    "parameters": job(microbatch=2, offload=offloading(["optimizer", "parameters"])),
    "all": job(microbatch=2, offload=offloading(["optimizer", "parameters", "activations"])),
}
MANY = {
    "data": {"data": 2},
    "zero 1": {"data": 2, "zero": 1},
    "zero 3": {"data": 2, "zero": 3},
    "tensor": {"tensor": 2, "microbatch": 4},
    "sequence": {"tensor": 2, "microbatch": 4, "sequence_parallel": True},
    "1f1b": {"pipeline": 2, "schedule": "1f1b"},
    "interleaved": {"pipeline": 2, "chunks": 2, "microbatch": 2, "schedule": "interleaved"},
    "pipedream": {"pipeline": 2, "schedule": "pipedream"},
    "context": {"context": 2, "microbatch": 4},
}


def on_gpu(jobs: dict[str, Job]) -> dict[str, Job]:
    return {name: replace(each, device=CUDA) for name, each in jobs.items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return verify_all(tmp_path_factory.mktemp("gpu"), on_gpu(ALONE))


@pytest.mark.parametrize("name", ALONE)
def test_one_gpu_computes_what_one_process_computes_in_fp64(name: str, alone: dict) -> None:
    assert alone[name].equal, alone[name]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two ranks need two GPUs")
@pytest.mark.parametrize("name", MANY)
def test_two_gpus_compute_what_one_process_computes_in_fp64(name: str, tmp_path: Path) -> None:
    (found,) = verify_all(tmp_path, on_gpu({name: job(**MANY[name])})).values()
    assert found.equal, found


SPEC = Transformer(layers=6, hidden=1024, heads=16, kv_heads=16, ffn=4096, vocab=4096, tied_embeddings=False)
TRAINING = Training(8, 512, "bf16", framework="execute")


@pytest.mark.parametrize("offload", [(), ("activations",), ("optimizer",), ("optimizer", "parameters")])
def test_a_run_in_bf16_has_spans_and_the_peak_of_its_profile(offload: tuple[str, ...], tmp_path: Path) -> None:
    chosen = plan(SPEC, TRAINING, microbatch=4, offload=offloading(list(offload)))
    run = execute(SPEC, TRAINING, chosen, RunOptions(4, verify=False, device=CUDA), folder=tmp_path)
    assert run.steps == 4 and all(0 < loss < 20 for loss in run.losses)
    assert run.timeline.engine == "nccl" and run.timeline.step_time > 0
    kinds = {span.kind for span in run.timeline.spans}
    assert {TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.OPTIMIZER} <= kinds
    streams = {span.stream for span in run.timeline.spans}
    assert (StreamKind.FROM_HOST in streams) is bool(offload)
    # what the profiler saw taken, on top of what was held before, is what the allocator says it gave out
    assert run.timeline.peak_memory == pytest.approx(run.peak_memory, rel=0.02)
    assert run.reserved_memory >= run.peak_memory
    assert (run.host_memory > 0) is bool(offload)


def test_the_peak_is_as_simulated(tmp_path: Path) -> None:
    from tiny_jobs import cluster

    from meshwise.simulator.engine import simulate
    from meshwise.simulator.models.model import build
    from meshwise.strategies.lowering.lower import lower
    from meshwise.strategies.plan.problem import Problem

    chosen = plan(SPEC, TRAINING, microbatch=4)
    each = Job(SPEC, TRAINING, chosen, steps=3, device=CUDA)
    run_jobs([(each, tmp_path)])
    told = simulate(lower(Problem(build(SPEC, 512, "bf16"), cluster(1), TRAINING), chosen), "longest_path")
    # cuBLAS takes 32 MiB, and the allocator rounds to 512 bytes
    assert told.peak_memory == pytest.approx(read_gpu_memory(chosen, tmp_path, "peak"), rel=0.1)
