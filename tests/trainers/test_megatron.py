"""Megatron-LM's own ``parse_args`` and ``validate_args`` accept exported scripts, run by bash, and derive the plan."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from environment import read_with_trainer
from plans import EXPERTS, GPT, LLAMA, QWEN, SAME, TRAINING, describe_plan, find_differences, make_request, select

from meshwise.scenarios.interchange.facts import Facts, TrainerRequest
from meshwise.strategies.plan.offloading import Offloading
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.recomputation import FirstLayers, PerStage, Recompute, SomeOperators

pytestmark = pytest.mark.long
FULL, SELECTIVE = Recompute.FULL, Recompute.SELECTIVE
SEQUENCE: dict[str, Any] = {"tensor": 2, "sequence_parallel": True}
ACTIVATION, MLP = SomeOperators(("activation",)), SomeOperators(("up", "activation", "down"))
WORDS: dict[Any, dict[str, Any]] = {
    Recompute.NONE: {"granularity": None},
    SELECTIVE: {"granularity": "selective", "modules": ["core_attn"]},
    FULL: {"granularity": "full", "method": "uniform", "recompute_layers": 1},
    FirstLayers(FULL, 3): {"granularity": "full", "method": "block", "recompute_layers": 3},
    MLP: {"granularity": "selective", "modules": ["mlp"]},
    ACTIVATION: {"granularity": None, "spec": True},
    PerStage((FirstLayers(SELECTIVE, 2), ACTIVATION)): {"granularity": None, "spec": True},
}
CASES: dict[str, tuple[TrainerRequest, int]] = {
    "replicas": (make_request(data=2), 0),
    "hosts": (make_request(data=16, zero=1, overlap_gradients=False), 0),
    "zero_1": (make_request(data=4, zero=1, zero_shards=2), 0),
    "zero_2": (make_request(data=4, zero=2), 0),
    "zero_3": (make_request(data=4, zero=3), 0),
    "fsdp2_kept": (make_request(training=SAME, data=4, zero=3, reshard_after_forward=False), 0),
    "tensor": (make_request(tensor=2), 0),
    "sequence": (make_request(data=2, zero=1, **SEQUENCE), 0),
    "overlap_tensor": (make_request(overlap_tensor=True, **SEQUENCE), 0),
    "pipeline": (make_request(pipeline=2, scatter_gather=True, **SEQUENCE), 0),
    "stages": (make_request(pipeline=2, stages=(5, 3)), 0),
    "chunks": (make_request(pipeline=2, chunks=2, schedule="interleaved", data=2), 0),
    "chunks_uneven": (make_request(pipeline=2, chunks=2, schedule="interleaved", stages=(1, 2, 2, 3)), 0),
    **{attention.value: (make_request(data=2, context=2, attention=attention, zero=1), 0) for attention in Attention},
    "experts": (make_request(EXPERTS, data=4, expert=2, zero=1), 0),
    "experts_tensor": (make_request(EXPERTS, data=2, expert=2, **SEQUENCE), 0),
    "selective": (make_request(recompute=SELECTIVE), 0),
    "full": (make_request(recompute=FULL, **SEQUENCE), 0),
    "first_layers": (make_request(pipeline=2, recompute=FirstLayers(FULL, 3)), 0),
    "mlp": (make_request(recompute=MLP), 0),
    "activation": (make_request(recompute=ACTIVATION), 0),
    "by_stage": (make_request(pipeline=2, recompute=PerStage((FirstLayers(SELECTIVE, 2), ACTIVATION))), 0),
    "host_half": (make_request(data=4, zero=1, offload=Offloading(optimizer=(0.5,))), 0),
    "fp16": (make_request(training=replace(TRAINING, precision="fp16")), 0),
    "fp8": (make_request(training=replace(TRAINING, precision="fp8")), 0),
    "fp32_sgd": (make_request(training=replace(TRAINING, precision="fp32", optimizer="sgd")), 0),
    "unclipped": (make_request(training=replace(TRAINING, gradient_clipping=False)), 0),
    "gpt": (make_request(GPT, data=2, zero=1), 0),
    "qwen": (make_request(QWEN, data=2, zero=1), 0),
}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Facts]:
    return read_with_trainer("megatron", CASES, Path(tmp_path_factory.mktemp("megatron")))


def expect(request: TrainerRequest) -> Facts:
    """Return what Megatron-LM's arguments and its ``TransformerConfig`` hold of a plan."""
    plan = describe_plan(request)
    names = ("data", "tensor", "context", "pipeline", "expert", "chunks", "zero", "sequence_parallel")
    names = (*names, "overlap_tensor", "overlap_gradients", "reshard_after_forward")
    experts, precision, is_gpt = plan["model.experts"], plan["training.precision"], request.spec is GPT
    return (
        select(plan, *names)
        | WORDS[plan["recompute"]]
        | {
            "stages": list(plan["stages"]),
            "instances": plan["data"] // (plan["zero_shards"] or plan["data"]),
            "attention": {Attention.ULYSSES: "a2a", Attention.ALL_GATHER: "allgather"}.get(plan["attention"], "p2p"),
            "offload": plan["offload"].optimizer[0] if plan["offload"].optimizer else 0,
            "sequence": plan["training.sequence"],
            "precision": {"fp16": "float16", "fp32": "float32"}.get(precision, "bfloat16"),
            "clipping": float(plan["training.gradient_clipping"]),
            **{name: plan[f"model.{name}"] for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")},
            "norm": "LayerNorm" if is_gpt else "RMSNorm",
            "experts": experts.count if experts else None,
            "norm_epsilon": 1e-5 if request.spec in (LLAMA, GPT) else 1e-6,
            "rotary_base": 10_000 if is_gpt else 500_000 if request.spec is LLAMA else 1_000_000,
            "deviation": 0.02,
            "rate": 3e-4,
            "iterations": 1000,
            "checkpoints": "checkpoints",
            "data_path": ["TRAINING_DATA"],
            "tokenizer": "TOKENIZER",
        }
    )


@pytest.mark.parametrize("name", CASES)
def test_the_trainer_derives_the_plan(name: str, facts: dict[str, Facts]) -> None:
    assert find_differences(facts[name], expect(CASES[name][0])) == []
