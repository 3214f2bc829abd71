"""nanotron's own configuration classes accept exported files and derive the plan."""

from dataclasses import replace
from pathlib import Path

import pytest
from environment import read_with_trainer
from plans import TRAINING, describe_plan, find_differences, make_request, select

from meshwise.scenarios.interchange.facts import Facts, TrainerRequest
from meshwise.scenarios.interchange.nanotron import divide_layers
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.recomputation import Recompute

pytestmark = pytest.mark.long
STAGES = divide_layers(layers=8, hidden=64, ffn=256, vocab=256, pipeline=2)
assert STAGES is not None
CASES: dict[str, tuple[TrainerRequest, int]] = {
    "replicas": (make_request(data=2), 0),
    "zero_1": (make_request(data=4, zero=1, microbatch=2), 0),
    "tensor": (make_request(tensor=2), 0),
    "sequence": (make_request(tensor=2, sequence_parallel=True, overlap_tensor=True), 0),
    "pipeline": (make_request(pipeline=2, stages=STAGES), 0),
    "gpipe": (make_request(pipeline=2, stages=STAGES, schedule="gpipe", data=2, recompute=Recompute.FULL), 0),
    "context": (make_request(data=2, context=2, attention=Attention.RING), 0),
    "fp32_sgd": (make_request(training=replace(TRAINING, precision="fp32", optimizer="sgd"), data=2), 0),
    "unclipped": (make_request(training=replace(TRAINING, gradient_clipping=False), data=2), 0),
}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Facts]:
    return read_with_trainer("nanotron", CASES, Path(tmp_path_factory.mktemp("nanotron")))


def expect(request: TrainerRequest) -> Facts:
    """Return what nanotron's configuration holds of a plan."""
    plan = describe_plan(request)
    names = ("data", "pipeline", "tensor", "context", "expert", "zero", "sequence_parallel", "overlap_tensor")
    engines = {"1f1b": "OneForwardOneBackwardPipelineEngine", "gpipe": "AllForwardAllBackwardPipelineEngine"}
    return select(plan, *names) | {
        "engine": engines[plan["schedule"]],
        "stages": list(plan["stages"]),
        "recompute": plan["recompute"] is Recompute.FULL,
        "batch": plan["training.global_batch"],
        "sequence": plan["training.sequence"],
        "precision": "bfloat16" if plan["training.precision"] == "bf16" else "float32",
        "clipping": 1.0 if plan["training.gradient_clipping"] else None,
        "class": "Qwen2Config",
        **{name: plan[f"model.{name}"] for name in ("layers", "hidden", "vocab", "kv_heads")},
        "rotary_base": 500_000,
        "norm_epsilon": 1e-5,
        "deviation": 0.02,
        "rate": 3e-4,
        "iterations": 1000,
        "checkpoints": "checkpoints",
        "tokenizer": "TOKENIZER",
        "data_path": "TRAINING_DATA",
    }


@pytest.mark.parametrize("name", CASES)
def test_the_trainer_derives_the_plan(name: str, facts: dict[str, Facts]) -> None:
    assert find_differences(facts[name], expect(CASES[name][0])) == []
