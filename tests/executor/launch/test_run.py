"""From plan to measurement, through our launcher and through torchrun."""

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tiny_jobs import TINY, job

from meshwise.executor.check.verification import Verification, VerificationError
from meshwise.executor.launch.launcher import ExecutionError
from meshwise.executor.launch.run import Run, build_verification_job, compare_job, execute, read_losses, run_jobs
from meshwise.executor.options import RunOptions
from meshwise.executor.supported import find_unsupported
from meshwise.simulator.memory import CATEGORIES
from meshwise.simulator.models.experts import Experts
from meshwise.simulator.program import Category, StreamKind, TaskKind

pytestmark = pytest.mark.fresh_ranks


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Run:
    asked = job(precision="fp32", data=2, tensor=2, microbatch=2)
    seen: list[int] = []
    run = execute(
        asked.spec,
        asked.training,
        asked.plan,
        RunOptions(steps=20),
        folder=tmp_path_factory.mktemp("run"),
        progress=lambda step, loss, seconds: seen.append(step),
    )
    assert seen == list(range(20))
    return run


def test_loss_falls_on_real_text(measured: Run) -> None:
    assert len(measured.losses) == 20
    assert measured.losses[0] == pytest.approx(5.545, abs=0.1)  # ln 256: nothing learned yet
    assert measured.losses[-1] < measured.losses[0] - 0.5


def test_scaled_down_model_is_equal_to_one_process(measured: Run) -> None:
    assert measured.verification is not None and measured.verification.equal


def test_timeline_is_measured(measured: Run) -> None:
    timeline = measured.timeline
    assert [c.ranks for c in timeline.rank_classes] == [(0,), (1,), (2,), (3,)]
    for rank in range(4):
        busy = {kind: timeline.busy_time(rank, [kind]) for kind in TaskKind}
        for kind in (TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.OPTIMIZER):
            assert 0 < busy[kind] < timeline.step_time
        assert 0 < busy[TaskKind.TENSOR_COMMUNICATION] < timeline.step_time
        assert 0 < busy[TaskKind.DATA_COMMUNICATION] < timeline.step_time
        assert busy[TaskKind.PIPELINE_COMMUNICATION] == 0
    assert all(0 <= span.start <= span.end <= timeline.step_time for span in timeline.spans)


def test_tensor_parallel_communicates_as_megatron_does(measured: Run) -> None:
    # a layer: two sums forward, two backward; one for the embedding, one for the gradient that
    # enters the logits; three for the softmax over a cut vocabulary: maximum, sum, loss
    expected = 4 * TINY.layers + 2 + 3
    for rank in range(4):
        spans = [s for s in measured.timeline.spans if s.rank_class == rank and s.microbatch == 0]
        sums = [s for s in spans if s.kind is TaskKind.TENSOR_COMMUNICATION]
        assert len(sums) == expected
        assert {span.operators for span in sums} == {"all_reduce"}


def test_a_rank_does_one_thing_at_a_time(measured: Run) -> None:
    for rank in range(4):
        spans = [s for s in measured.timeline.spans if s.rank_class == rank]
        busy = sorted((s.start, s.end) for s in spans if s.stream in (StreamKind.COMPUTE, StreamKind.TENSOR))
        assert all(before[1] <= after[0] for before, after in pairwise(busy))


def test_collectives_say_their_bytes(measured: Run) -> None:
    # between layers: 2 sequences of 16 tokens, 32 values of 4 bytes each; four sums a layer, and those of both ends
    whole = 2 * 16 * 32 * 4
    for rank in range(4):
        first = [s for s in measured.timeline.spans if s.rank_class == rank and s.microbatch == 0]
        sizes = [s.bytes for s in first if s.kind is TaskKind.TENSOR_COMMUNICATION]
        assert sizes.count(whole) == 4 * TINY.layers + 2
        summed = [s for s in measured.timeline.spans if s.rank_class == rank and s.kind is TaskKind.DATA_COMMUNICATION]
        held = measured.timeline.memory[rank].usage[0][CATEGORIES.index(Category.PARAMETERS)]
        assert [s.operators for s in summed] == ["all_reduce gradients"]
        assert summed[0].bytes == held  # a gradient of 4 bytes for every parameter of 4 bytes


def test_memory_is_told_apart(measured: Run) -> None:
    for profile in measured.timeline.memory:
        parameters, gradients, optimizer, activations, _ = (
            [row[CATEGORIES.index(category)] for row in profile.usage] for category in Category
        )
        assert set(parameters) == {parameters[0]}
        assert gradients[0] == 0 and gradients[-1] == max(gradients) == parameters[0]
        assert optimizer[0] >= 2 * parameters[0] and set(optimizer) == {optimizer[0]}  # two moments, and steps
        assert activations[0] == 0 < max(activations)


def test_peak_memory_holds_at_least_parameters_and_optimizer(measured: Run) -> None:
    layer = 12 * TINY.hidden**2 * 2 // 3 + 13 * TINY.hidden  # ffn is 2 * hidden: 4 + 4 of 12 hidden**2
    cut = (TINY.layers * layer + 2 * TINY.vocab * TINY.hidden) // 2
    assert measured.peak_memory > 3 * 4 * cut  # weights and two moments, half of them a tensor rank


def test_step_time_is_the_median_without_warm_up(measured: Run) -> None:
    times = sorted(measured.step_times[2:])
    assert measured.step_time == pytest.approx((times[8] + times[9]) / 2)


def test_failure_inside_torch_reaches_the_user(tmp_path: Path) -> None:
    wrong = job(data=2)
    wrong = replace(wrong, training=replace(wrong.training, precision="fp16"))
    with pytest.raises(ExecutionError, match=r"rank \d failed: KeyError: 'fp16'"):
        run_jobs([(wrong, tmp_path)])


def test_a_run_that_fails_its_verification_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwise.executor.launch.run.compare_job", lambda job, folder: Verification(0.0, 3e-5, 0.0))
    asked = job(data=2)
    with pytest.raises(VerificationError, match=r"not started: .* gradients 3\.0e-05, .* equal is at most 1e-12"):
        execute(asked.spec, asked.training, asked.plan, RunOptions(1, verify=True), folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["verify"]


def test_refused_before_launch(tmp_path: Path) -> None:
    asked = job(data=2)
    with pytest.raises(ValueError, match="precision: the executor trains in fp32, fp64 or bf16, met fp16"):
        execute(
            asked.spec,
            replace(asked.training, precision="fp16"),
            asked.plan,
            RunOptions(1, verify=False),
            folder=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


def test_verification_job_keeps_the_plan_and_shrinks_the_model() -> None:
    large = replace(TINY, hidden=512, heads=4, kv_heads=4, ffn=2048, vocab=50304)
    small = build_verification_job(job(large, tensor=2, microbatch=8))
    assert (small.spec.hidden, small.spec.ffn, small.spec.vocab, small.spec.layers) == (32, 64, 256, 4)
    assert small.training.precision == "fp64"


def test_verification_job_keeps_cuts_that_divide() -> None:
    experts = Experts(count=4, top_k=2, ffn=2048)
    mixed = replace(TINY, hidden=512, heads=4, kv_heads=4, ffn=2048, experts=experts)
    small = build_verification_job(job(mixed, sequence=80, context=5, tensor=2, microbatch=8, sequence_parallel=True))
    assert small.training.sequence == 40  # at least 32, a multiple of 2 parts * 5 ranks * 2 tensor ranks = 20
    assert small.spec.experts == replace(experts, ffn=64)
    assert find_unsupported(small.spec, small.training, small.plan) == ()


def test_torchrun(tmp_path: Path) -> None:
    pair = job(data=2)
    path = pair.write(tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [*command, "-m", "meshwise.executor.launch.worker", str(path)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == ""
    assert compare_job(pair, tmp_path).equal
    assert len(read_losses(pair.plan, pair.steps, tmp_path)) == 3
