"""Accelerate's launcher and plugins accept exported files and derive the plan; scripts take two steps with gloo."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from environment import read_with_trainer
from plans import ALL, STATES, TRAINING, describe_plan, find_differences, make_request

from meshwise.scenarios.interchange.facts import Facts, TrainerRequest
from meshwise.strategies.plan.offloading import NO_OFFLOADING
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.recomputation import Recompute

pytestmark = pytest.mark.long
FULL = Recompute.FULL
CASES: dict[str, tuple[TrainerRequest, int]] = {
    "alone": (make_request(data=1), 2),
    "replicas": (make_request(data=2), 2),
    "replicas_16": (make_request(data=16), 0),
    "zero_1": (make_request(data=2, zero=1, overlap_gradients=False), 2),
    "zero_2": (make_request(data=16, zero=2, overlap_gradients=False, offload=STATES), 0),
    "fsdp": (make_request(data=2, zero=3, recompute=FULL, microbatch=2), 2),
    "fsdp_kept": (
        make_request(training=replace(TRAINING, precision="fp32"), data=2, zero=3, reshard_after_forward=False),
        2,
    ),
    "hsdp": (make_request(data=4, zero=3, zero_shards=2), 0),
    "offload": (make_request(data=4, zero=3, offload=ALL), 0),
    "tensor": (make_request(data=2, zero=3, tensor=2), 0),
    "ring": (make_request(data=2, zero=3, context=2, attention=Attention.RING), 0),
    "gather": (make_request(data=2, zero=3, context=2, attention=Attention.ALL_GATHER), 0),
}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Facts]:
    return read_with_trainer("accelerate", CASES, Path(tmp_path_factory.mktemp("accelerate")))


def expect(request: TrainerRequest) -> Facts:
    """Return what an accelerator holds of a plan."""
    plan = describe_plan(request)
    ranks = plan["data"] * plan["tensor"] * plan["context"]
    precision = plan["training.precision"]
    result = {"ranks": ranks, "stated_ranks": ranks, "precision": "no" if precision == "fp32" else precision}
    if plan["zero"] in (1, 2):
        return result | {
            "type": "DEEPSPEED",
            "zero": plan["zero"],
            "accumulations": plan["microbatches"],
            "offload": "none" if plan["offload"] == NO_OFFLOADING else "cpu",
            "clipping": float(plan["training.gradient_clipping"]),
        }
    if plan["zero"] == 0:
        return result | {"type": "MULTI_GPU" if ranks > 1 else "NO", "fsdp": False}
    shard = plan["zero_shards"] or plan["data"]
    sizes = {"dp_replicate": plan["data"] // shard, "dp_shard": shard, "cp": plan["context"], "tp": plan["tensor"]}
    rotation = {Attention.RING: "alltoall", Attention.ALL_GATHER: "allgather"}.get(plan["attention"])
    return result | {
        "type": "FSDP",
        "fsdp": True,
        "version": 2,
        "replicate": plan["data"] // shard,
        "shard": shard,
        "tensor": plan["tensor"],
        "context": plan["context"],
        "mesh": {name: size for name, size in sizes.items() if size > 1},
        "rotation": rotation,
        "reshard_after_forward": plan["reshard_after_forward"],
        "offload": plan["offload"] == ALL,
        "recompute": plan["recompute"] is FULL,
    }


@pytest.mark.parametrize("name", CASES)
def test_the_trainer_derives_the_plan(name: str, facts: dict[str, Facts]) -> None:
    request, steps = CASES[name]
    plan, script = describe_plan(request), facts[name]["script"]
    assert find_differences(facts[name], expect(request)) == []
    assert int(script["per_device_train_batch_size"]) == plan["microbatch"]
    assert int(script["gradient_accumulation_steps"]) == plan["microbatches"]
    assert (float(script["rope_theta"]), float(script["norm_epsilon"])) == (500_000, 1e-5)
    losses = facts[name].get("steps", [""])[1:]
    assert len(losses) == steps and all(map(math.isfinite, losses))
