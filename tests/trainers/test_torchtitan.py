"""torchtitan's own parser, mesh and model accept exported modules and derive the plan; its trainer takes two steps."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from environment import read_with_trainer
from plans import ALL, EXPERTS, QWEN, TRAINING, count_parameters, describe_plan, find_differences, make_request, select

from meshwise.scenarios.interchange.facts import Facts, TrainerRequest
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.recomputation import FirstLayers, Recompute, SomeOperators

pytestmark = pytest.mark.long
SHARDED: dict[str, Any] = {"data": 4, "zero": 3}
CHUNKED: dict[str, Any] = {"pipeline": 2, "chunks": 2}
GATHER = Attention.ALL_GATHER
WIDE = replace(TRAINING, precision="fp32")
SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
CASES: dict[str, tuple[TrainerRequest, int]] = {
    "replicas": (make_request(data=2), 2),
    "fsdp": (make_request(**SHARDED), 2),
    "fsdp_kept": (make_request(**SHARDED, reshard_after_forward=False), 2),
    "hsdp": (make_request(**SHARDED, zero_shards=2, recompute=Recompute.FULL), 2),
    "offload": (make_request(**SHARDED, offload=ALL), 0),
    "unclipped": (make_request(training=replace(TRAINING, gradient_clipping=False), **SHARDED), 2),
    "fp32": (make_request(training=WIDE, **SHARDED), 2),
    "tensor": (make_request(tensor=2), 2),
    "sequence": (make_request(tensor=2, sequence_parallel=True, **SHARDED), 2),
    "async_tensor": (make_request(tensor=2, sequence_parallel=True, overlap_tensor=True), 0),
    "context": (make_request(context=2, attention=GATHER, **SHARDED), 0),
    "gpipe": (make_request(pipeline=2, schedule="gpipe"), 2),
    "stages": (make_request(pipeline=2, stages=(5, 3), recompute=Recompute.FULL), 2),
    "first_layers": (make_request(pipeline=2, recompute=FirstLayers(Recompute.FULL, 3)), 2),
    **{
        schedule: (make_request(**CHUNKED, schedule=schedule, stages=(1, 2, 2, 3)), 2)
        for schedule in ("interleaved", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")
    },
    "activation": (make_request(recompute=SomeOperators(("activation",)), **SHARDED), 2),
    "microbatches": (make_request(data=2, zero=3, microbatch=4), 2),
    "qwen": (make_request(QWEN, tensor=2, sequence_parallel=True, **SHARDED), 2),
    "experts": (make_request(EXPERTS, expert=2, **SHARDED), 2),
    "all": (make_request(data=2, zero=3, tensor=2, sequence_parallel=True, pipeline=2, recompute=Recompute.FULL), 0),
}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Facts]:
    return read_with_trainer("torchtitan", CASES, Path(tmp_path_factory.mktemp("torchtitan")))


def expect(request: TrainerRequest) -> Facts:
    """Return what torchtitan's objects hold of a plan."""
    plan = describe_plan(request)
    names = ("data", "tensor", "context", "pipeline", "expert", "zero", "sequence_parallel", "reshard_after_forward")
    words = {Recompute.NONE: "none", Recompute.FULL: "full", SomeOperators(("activation",)): "activation"}
    recompute, experts, is_qwen = plan["recompute"], plan["model.experts"], plan["model.qk_norm"]
    return select(plan, *names) | {
        "shards": (plan["zero_shards"] or plan["data"]) if plan["zero"] else 1,
        "schedule": SCHEDULES[plan["schedule"]] if plan["pipeline"] > 1 else None,
        "stages": list(plan["stages"]),
        "recompute": f"first {recompute.layers}" if isinstance(recompute, FirstLayers) else words[recompute],
        "offload": plan["offload"] == ALL,
        "sequence": plan["training.sequence"],
        "precision": "bfloat16" if plan["training.precision"] == "bf16" else "float32",
        "async_tensor": plan["overlap_tensor"],
        "clipping": plan["training.gradient_clipping"],
        "parameters": count_parameters(request),
        "experts": experts.count if experts else 0,
        "rotary_base": 1_000_000 if is_qwen else 500_000,
        "norm_epsilon": 1e-6 if is_qwen else 1e-5,
        "checkpoints": "checkpoints",
        "rate": 3e-4,
    }


@pytest.mark.parametrize("name", CASES)
def test_the_trainer_derives_the_plan(name: str, facts: dict[str, Facts]) -> None:
    request, steps = CASES[name]
    assert find_differences(facts[name], expect(request)) == []
    losses = facts[name].get("steps", [])
    assert len(losses) == steps and all(map(math.isfinite, losses))
