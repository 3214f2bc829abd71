"""Every kind of plan computes what one process computes, in fp64."""

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from tiny_jobs import TINY, cluster, verify_all
from tiny_jobs import job as any_job

from meshwise.executor.check.reference import train
from meshwise.executor.job import Job, tensors_file
from meshwise.executor.launch.run import compare_job, read_losses
from meshwise.executor.recording.timeline import read_timeline
from meshwise.simulator.engine import simulate
from meshwise.simulator.models.experts import Experts
from meshwise.simulator.models.model import build
from meshwise.simulator.program import TaskKind
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.plan.offloading import OFFLOADS, offloading
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import FirstLayers, PerStage, Recompute, SomeOperators
from meshwise.strategies.schedules.schedule import ActionKind

job = partial(any_job, steps=2)
"""The second step shows what the first left, and its own parameters and states what the second does with that."""

TIED = replace(TINY, tied_embeddings=True, attention="unfused")

LLAMA = replace(TINY, kv_heads=2, ffn_kind="swiglu", positions="rotary")


MIXED = replace(LLAMA, experts=Experts(count=4, top_k=2, ffn=16))
SWITCH = replace(TINY, experts=Experts(count=8, top_k=1, ffn=16, shared=1, dense_layers=2))


def clipped(plain: Job) -> Job:
    """Return the job with gradients clipped: their norm is 1.5 to 2 in its first steps."""
    return replace(plain, training=replace(plain.training, gradient_clipping=True))


TWO = {
    "data": job(data=2),
    "data-late": job(data=2, microbatch=2, overlap_gradients=False, schedule="gpipe"),
    "data-zero": job(data=2, zero=1, schedule="gpipe", optimizer="sgd"),
    "tensor": job(tensor=2, microbatch=4, profile=True),
    "tensor-tied-unfused": job(TIED, tensor=2, microbatch=8),
    "tensor-sequence-full": job(tensor=2, microbatch=4, sequence_parallel=True, recompute=Recompute.FULL, profile=True),
    "tensor-selective": job(tensor=2, microbatch=4, recompute=Recompute.SELECTIVE),
    "gpipe": job(pipeline=2, microbatch=2, schedule="gpipe", profile=True),
    "1f1b": job(pipeline=2, schedule="1f1b", profile=True),
    "interleaved": job(pipeline=2, chunks=2, microbatch=2, schedule="interleaved", profile=True),
    "pipeline-some-full": job(pipeline=2, microbatch=2, stages=(3, 1), recompute=FirstLayers(Recompute.FULL, 2)),
    "pipeline-per-stage": job(
        pipeline=2,
        microbatch=2,
        stages=(3, 1),
        recompute=PerStage((FirstLayers(Recompute.FULL, 2), Recompute.SELECTIVE)),
    ),
    "pipeline-full": job(pipeline=2, microbatch=2, stages=(3, 1), recompute=Recompute.FULL, profile=True),
    "uneven": job(data=2, microbatch=(3, 1)),
    "server": job(data=2, gradient_reduction="parameter_server"),
    "per-stage": job(
        pipeline=2, microbatch=2, recompute=PerStage((FirstLayers(Recompute.FULL, 1), Recompute.SELECTIVE))
    ),
    "zero-2": job(data=2, zero=2, microbatch=2),
    "host-optimizer-zero-1": job(data=2, zero=1, offload=offloading({"optimizer": 0.3}), optimizer="sgd"),
    "host-streamed-zero-3": job(data=2, zero=3, offload=offloading({"optimizer": {"fraction": 0.6, "step": "device"}})),
    "host-activations-sequence": job(
        tensor=2, microbatch=4, sequence_parallel=True, offload=offloading({"activations": 1.0, "optimizer": 0.5})
    ),
    "host-all-zero-3": job(data=2, zero=3, offload=offloading(list(OFFLOADS)), recompute=Recompute.FULL, profile=True),
    "host-per-stage": job(
        pipeline=2,
        microbatch=2,
        offload=offloading({"optimizer": [1.0, 0.5], "parameters": [0.5, 0.0], "activations": [1.0, 0.5]}),
    ),
    "zero-3-full": job(data=2, zero=3, recompute=Recompute.FULL),
    "zero-3-kept-tied": job(TIED, data=2, zero=3, reshard_after_forward=False, recompute=Recompute.SELECTIVE),
    "clipped": clipped(job(data=2)),
    "clipped-zero-3": clipped(job(data=2, zero=3)),
    "clipped-sequence": clipped(job(tensor=2, microbatch=8, sequence_parallel=True)),
    "clipped-pipeline": clipped(job(pipeline=2, microbatch=2)),
    "llama": job(LLAMA, data=2),
    "llama-normed-zero-3": job(
        replace(LLAMA, qk_norm=True, ffn_kind="geglu"), data=2, zero=3, recompute=Recompute.FULL
    ),
    "llama-tensor": job(replace(LLAMA, attention="unfused", tied_embeddings=True), tensor=2, microbatch=4),
    "llama-sequence": job(LLAMA, tensor=2, microbatch=4, sequence_parallel=True, recompute=Recompute.SELECTIVE),
    "naive": job(pipeline=2, schedule="naive", profile=True),
    "looped-bfs": job(pipeline=2, chunks=2, schedule="looped_bfs"),
    "zb1p": job(pipeline=2, schedule="zb1p", profile=True),
    "zb2p": job(pipeline=2, schedule="zb2p"),
    "interleaved-zero-bubble": job(pipeline=2, chunks=2, schedule="interleaved_zero_bubble"),
    "zbv": job(pipeline=2, chunks=2, schedule="zbv", profile=True),
    "zb1p-full": job(pipeline=2, schedule="zb1p", recompute=Recompute.FULL),
    "dualpipev": job(pipeline=2, chunks=2, schedule="dualpipev", profile=True),
    "tied-1f1b": job(TIED, pipeline=2, microbatch=2, stages=(3, 1)),
    "tied-zbv": clipped(job(TIED, pipeline=2, chunks=2, schedule="zbv")),
    "context-ring": job(context=2, microbatch=2, profile=True),
    "context-ring-llama-full": job(LLAMA, context=2, microbatch=4, recompute=Recompute.FULL),
    "context-gather-unfused": job(
        TIED, context=2, microbatch=4, attention=Attention.ALL_GATHER, recompute=Recompute.SELECTIVE
    ),
    "context-ulysses-llama": job(
        LLAMA, context=2, microbatch=4, attention=Attention.ULYSSES, recompute=Recompute.SELECTIVE, profile=True
    ),
    "context-zero-3": clipped(job(context=2, zero=3, microbatch=4)),
    "experts-zero-3": clipped(job(SWITCH, data=2, zero=3, recompute=Recompute.FULL)),
    "experts-sequence-shared": job(SWITCH, tensor=2, microbatch=4, sequence_parallel=True),
    "experts-spread": job(MIXED, data=2, expert=2, microbatch=2, profile=True),
    "experts-spread-zero-1": job(MIXED, data=2, expert=2, zero=1, overlap_gradients=False),
    "experts-zbv": job(MIXED, pipeline=2, chunks=2, schedule="zbv"),
    "operators": job(LLAMA, data=2, recompute=SomeOperators(("attention", "qkv", "up", "activation", "input_norm"))),
    "operators-unfused-zero-3": job(
        TIED, data=2, zero=3, recompute=SomeOperators(("scores", "softmax", "context", "activation"))
    ),
    "operators-zb1p": job(
        pipeline=2,
        microbatch=2,
        schedule="zb1p",
        recompute=PerStage((SomeOperators(("feed_forward_norm", "up", "activation", "down")), Recompute.SELECTIVE)),
    ),
    "operators-pipedream": job(
        pipeline=2, microbatch=2, schedule="pipedream", recompute=SomeOperators(("feed_forward_norm", "activation"))
    ),
    "pipedream": job(pipeline=2, microbatch=2, schedule="pipedream", profile=True),
    "pipedream-host-full": job(
        pipeline=2, schedule="pipedream", optimizer="sgd", recompute=Recompute.FULL, offload=offloading(["optimizer"])
    ),
    "pipedream-2bw": job(pipeline=2, microbatch=2, schedule="pipedream_2bw", steps=4),
    "written": job(pipeline=2, global_batch=2, schedule="0F0 0F1 0B1 0B0\n1F0 1F1 1I1 1I0 1W0 1W1"),
}
FOUR = {
    "data-tensor": job(data=2, tensor=2, microbatch=2),
    "data-tensor-zero": job(data=2, tensor=2, zero=1, sequence_parallel=True),
    "data-pipeline-zero": job(data=2, pipeline=2, zero=1, chunks=2, schedule="interleaved"),
    "tensor-pipeline": job(tensor=2, pipeline=2, microbatch=2, sequence_parallel=True),
    "pipeline": job(pipeline=4, profile=True),
    "uneven-zero-3-pipeline": job(data=2, pipeline=2, zero=3, microbatch=(1, 3)),
    "server-tensor-clipped": clipped(job(data=2, tensor=2, gradient_reduction="parameter_server")),
    "llama-tensor-zbv": job(LLAMA, tensor=2, pipeline=2, chunks=2, schedule="zbv"),
    "hybrid-zero-3": job(data=4, zero=3, zero_shards=2),
    "hybrid-zero-1": job(data=4, zero=1, zero_shards=2),
    "zero-3-tensor": job(data=2, tensor=2, zero=3, microbatch=2),
    "zero-2-tensor-clipped": clipped(job(data=2, tensor=2, zero=2, sequence_parallel=True)),
    "zero-3-pipeline": job(data=2, pipeline=2, zero=3),
    "tied-data-zbv-zero": job(TIED, data=2, pipeline=2, zero=1, chunks=2, schedule="zbv"),
    "tied-server-clipped": clipped(job(TIED, data=2, pipeline=2, gradient_reduction="parameter_server")),
    "tied-zero-3-pipeline": clipped(job(TIED, data=2, pipeline=2, zero=3)),
    "tied-zero-2-dualpipev": clipped(job(TIED, data=2, pipeline=2, zero=2, chunks=2, schedule="dualpipev")),
    "context-tensor-sequence": job(tensor=2, context=2, microbatch=4, sequence_parallel=True),
    "context-zbv": job(TIED, pipeline=2, context=2, chunks=2, schedule="zbv", attention=Attention.ALL_GATHER),
    "context-zero-2-data": clipped(job(data=2, context=2, zero=2, microbatch=2)),
    "experts-spread-zero-3": clipped(job(MIXED, data=4, expert=2, zero=3)),
    "experts-spread-sequence": job(
        SWITCH, data=2, expert=2, tensor=2, microbatch=2, sequence_parallel=True, profile=True
    ),
    "experts-spread-tensor-zero-3": clipped(job(MIXED, data=2, expert=2, tensor=2, zero=3)),
    "experts-spread-pipeline": job(MIXED, data=2, expert=2, pipeline=2, zero=2),
    "experts-spread-context": job(MIXED, data=2, expert=2, context=2, zero=3),
    "zero-3-zbv": job(data=2, pipeline=2, zero=3, reshard_after_forward=False, chunks=2, schedule="zbv"),
    "zero-2-dualpipev": job(data=2, pipeline=2, zero=2, chunks=2, schedule="dualpipev"),
    "zero-1-zb1p": job(data=2, pipeline=2, zero=1, schedule="zb1p"),
    "pipedream-4": job(pipeline=4, schedule="pipedream"),
    "pipedream-2bw-4": job(pipeline=4, microbatch=2, schedule="pipedream_2bw", steps=4),
    "pipedream-uneven": job(data=2, pipeline=2, microbatch=(3, 1), schedule="pipedream"),
    "pipedream-2bw-sequence": job(
        tensor=2, pipeline=2, microbatch=2, sequence_parallel=True, schedule="pipedream_2bw", steps=4
    ),
    "tensor-zbv": job(tensor=2, pipeline=2, schedule="zbv", chunks=2, sequence_parallel=True),
}
EIGHT = {
    "data-tensor-pipeline": job(data=2, tensor=2, pipeline=2, microbatch=2),
    "zero-3-tensor-pipeline": job(data=2, tensor=2, pipeline=2, zero=3, microbatch=2),
}


@pytest.mark.parametrize("jobs", [FOUR, EIGHT, TWO], ids=["4 ranks", "8 ranks", "2 ranks"])
def test_ranks_compute_what_one_process_computes(jobs: dict[str, Job], tmp_path: Path) -> None:
    for name, found in verify_all(tmp_path, jobs).items():
        assert found.equal, f"{name}: {found}"
        assert found.gradient_error < 1e-13 and found.loss_error < 1e-13, f"{name}: {found}"
    for name, ran in jobs.items():
        if ran.profile and not ran.plan.asynchronous:
            _timeline_follows_the_schedule(ran, tmp_path / name)
            _collectives_are_those_simulated(ran, tmp_path / name)


LETTERS = {ActionKind.FORWARD: "forward", ActionKind.BACKWARD: "backward", ActionKind.INPUT: "backward"}


def _timeline_follows_the_schedule(ran: Job, folder: Path) -> None:
    timeline = read_timeline(ran.plan, folder)
    for rank in range(ran.plan.mesh.num_ranks):
        order = ran.plan.actions.orders[ran.plan.mesh.coordinate(rank, "pipeline")]
        passes = tuple((LETTERS[kind], stage, microbatch) for stage, kind, microbatch in order if kind in LETTERS)
        assert timeline.order(rank) == passes
        weights = sum(kind is ActionKind.WEIGHT for _, kind, _ in order)
        kinds = [span.kind for span in timeline.spans if span.rank_class == rank]
        assert kinds.count(TaskKind.WEIGHT_GRADIENT) == weights
        steps = [s for s in timeline.spans if s.rank_class == rank and s.kind is TaskKind.OPTIMIZER]
        # not cut by communication: gradients were whole before; a host takes a part after the other
        assert len(steps) == 1 or any(ran.plan.offload.optimizer)


def _collectives_are_those_simulated(ran: Job, folder: Path) -> None:
    """Check how often ranks exchange keys and tokens; the executor besides says how many tokens it sends."""
    kinds = (TaskKind.CONTEXT_COMMUNICATION, TaskKind.EXPERT_COMMUNICATION)
    graph = build(ran.spec, ran.training.sequence, ran.training.precision)
    simulated = simulate(lower(Problem(graph, cluster(ran.plan.mesh.num_ranks), ran.training), ran.plan))
    expected = Counter(span.kind for span in simulated.spans if span.rank_class == 0 and span.kind in kinds)
    spans = [span for span in read_timeline(ran.plan, folder).spans if span.rank_class == 0 and span.kind in kinds]
    assert Counter(span.kind for span in spans if not span.operators.endswith(("counts", "send"))) == expected


def _write_reference(reference: Job, folder: Path, spoil: str | None = None) -> Job:
    expected_losses, arrays = train(reference)
    if spoil is not None:
        arrays[spoil] = arrays[spoil] + 1e-9 * np.abs(arrays[spoil]).max()
    folder.mkdir(exist_ok=True)
    np.savez(tensors_file(folder, 0), **arrays)
    lines = [f'{{"step": {i}, "loss": {loss!r}, "seconds": 1.0}}\n' for i, loss in enumerate(expected_losses)]
    (folder / "rank-0.jsonl").write_text("".join(lines))
    return reference


def test_verification_sees_a_wrong_gradient(tmp_path: Path) -> None:
    one = job(steps=1)
    assert compare_job(_write_reference(one, tmp_path), tmp_path).equal
    spoilt = compare_job(_write_reference(one, tmp_path, "gradient layers.1.up.weight"), tmp_path)
    assert not spoilt.equal
    assert spoilt.gradient_error == pytest.approx(1e-9, rel=1e-3)


def test_verification_sees_a_missing_tensor(tmp_path: Path) -> None:
    one = _write_reference(job(steps=1), tmp_path)
    with np.load(tensors_file(tmp_path, 0)) as arrays:
        kept = {name: arrays[name] for name in arrays.files if name != "gradient head.logits.weight"}
    np.savez(tensors_file(tmp_path, 0), **kept)
    with pytest.raises(ValueError, match=r"missing: gradient head\.logits\.weight"):
        compare_job(one, tmp_path)


def test_loss_is_the_mean_over_data_ranks(tmp_path: Path) -> None:
    two = job(data=2, steps=1)
    for rank, loss in enumerate((2.0, 4.0)):
        (tmp_path / f"rank-{rank}.jsonl").write_text(f'{{"step": 0, "loss": {loss}, "seconds": 0.5}}\n')
    assert read_losses(two.plan, two.steps, tmp_path) == (3.0,)
