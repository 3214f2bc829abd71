"""DeepSpeed's own configuration accepts exported files and derives the plan; its engine takes two steps with gloo."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from environment import read_with_trainer
from plans import ALL, EXPERTS, SAME, STATES, TRAINING, describe_plan, find_differences, make_request, select

from meshwise.scenarios.interchange.facts import Facts, TrainerRequest
from meshwise.strategies.plan.offloading import Offloading
from meshwise.strategies.plan.parallelism import Attention

pytestmark = pytest.mark.long
TWO: dict[str, Any] = {"data": 2, "zero": 1}
CASES: dict[str, tuple[TrainerRequest, int]] = {
    "replicas": (make_request(training=SAME, data=2, overlap_gradients=False), 2),
    "zero_1": (make_request(data=2, zero=1, microbatch=2), 2),
    "zero_2": (make_request(data=2, zero=2, overlap_gradients=False), 2),
    "zero_3": (make_request(data=2, zero=3), 2),
    "sgd": (make_request(training=replace(TRAINING, optimizer="sgd", precision="fp32"), **TWO), 2),
    "fp32": (make_request(training=replace(TRAINING, precision="fp32", gradient_clipping=False), **TWO), 2),
    "fp16": (make_request(training=replace(TRAINING, precision="fp16"), **TWO), 0),
    "lion": (make_request(training=replace(TRAINING, optimizer="lion"), **TWO), 0),
    "host_states": (make_request(data=4, zero=2, offload=STATES), 0),
    "host_half": (make_request(data=4, zero=3, offload=Offloading(optimizer=(0.5,))), 0),
    "host_all": (make_request(data=4, zero=3, offload=ALL), 0),
    "tensor": (make_request(tensor=2, **TWO), 0),
    "context": (make_request(context=2, attention=Attention.ULYSSES, **TWO), 0),
    "experts": (make_request(EXPERTS, data=4, expert=2, zero=1), 0),
}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Facts]:
    return read_with_trainer("deepspeed", CASES, Path(tmp_path_factory.mktemp("deepspeed")))


def expect(request: TrainerRequest) -> Facts:
    """Return what DeepSpeed's configuration holds of a plan."""
    plan = describe_plan(request)
    offload: Offloading = plan["offload"]
    return select(plan, "data", "tensor", "context", "expert", "zero") | {
        "batch": plan["training.global_batch"],
        "overlap_gradients": plan["overlap_gradients"] if plan["zero"] else None,
        "offload_optimizer": offload.optimizer[0] if offload.optimizer else 0,
        "offload_parameters": bool(offload.parameters),
        "precision": plan["training.precision"],
        "gradients": "fp32" if plan["training.gradient_precision"] == "fp32" else plan["training.precision"],
        "clipping": float(plan["training.gradient_clipping"]),
        "optimizer": {"adamw": "adamw", "sgd": "SGD", "lion": "lion"}[plan["training.optimizer"]],
        "rate": 3e-4,
        "schedule": "WarmupCosineLR",
        "iterations": 1000,
        "recompute": None,
    }


@pytest.mark.parametrize("name", CASES)
def test_the_trainer_derives_the_plan(name: str, facts: dict[str, Facts]) -> None:
    request, steps = CASES[name]
    assert find_differences(facts[name], expect(request)) == []
    losses = facts[name].get("steps", [])
    assert len(losses) == steps and all(map(math.isfinite, losses))
