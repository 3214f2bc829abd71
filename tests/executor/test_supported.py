"""What torch cannot run is refused with a reason, all at once."""

import re
from dataclasses import replace

import pytest
from tiny_jobs import TINY, job

from executor.supported import unsupported
from strategies.mesh import Axis, Mesh
from strategies.plan import Stage
from strategies.recomputation import PerStage, Recompute, SomeOperators


def test_a_plan_that_runs_has_no_reason_against_it() -> None:
    good = job(data=2, tensor=2, pipeline=2)
    assert unsupported(good.spec, good.training, good.plan) == ()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ffn_kind": "swiglu"}, "ffn_kind: .* met swiglu"),
        ({"kv_heads": 2}, r"kv_heads: .* heads\(4\), met 2"),
        ({"positions": "rotary"}, "positions: .* met rotary"),
        ({"dropout": True}, "dropout: .* met true"),
        ({"tied_embeddings": True}, "tied_embeddings: .* met pipeline 2; nearest: false"),
        ({"vocab": 255}, "vocab: .* at least 256, met 255"),
    ],
)
def test_models_it_does_not_have(change: dict[str, object], reason: str) -> None:
    good = job(pipeline=2)
    reasons = unsupported(replace(TINY, **change), good.training, good.plan)
    assert len(reasons) == 1
    with pytest.raises(ValueError, match=reason):
        raise ValueError(reasons[0])


def test_every_reason_at_once() -> None:
    good = job(data=2)
    stages = (Stage(("embedding", "head")),)
    reasons = unsupported(
        replace(TINY, dropout=True), replace(good.training, precision="bf16"), replace(good.plan, stages=stages, zero=3)
    )
    assert [reason.partition(":")[0] for reason in reasons] == ["dropout", "precision", "stages", "zero"]


def test_states_shared_by_groups_of_data_ranks() -> None:
    good = job(data=4, zero=1)
    mesh = Mesh(tuple(Axis(*axis) for axis in (("pipeline", 1), ("replica", 2), ("data", 2), ("tensor", 1))))
    (reason,) = unsupported(good.spec, good.training, replace(good.plan, mesh=mesh))
    assert reason == "zero_shards: the executor shares states over all 4 data ranks, met groups of 2"


def test_microbatches_of_several_sizes() -> None:
    good = job(data=2, global_batch=16, microbatch=4)
    (reason,) = unsupported(good.spec, good.training, replace(good.plan, microbatch=(5, 3)))
    assert reason == (
        "microbatch: the executor runs microbatches of one size on all data ranks, met [5, 3]; nearest: 5"
    )


def test_batch_that_would_hang_torch() -> None:
    good = job(data=2, global_batch=16, microbatch=4)
    (reason,) = unsupported(good.spec, replace(good.training, global_batch=20), good.plan)
    assert reason == "global_batch: data(2) * microbatch(4) * microbatches(2) = 16, met 20"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"optimizer": "lion"}, "optimizer: .* adamw or sgd, met lion"),
        ({"precision": "fp64", "gradient_precision": "fp32"}, "gradient_precision: .* met fp32"),
        ({"gradient_clipping": True}, "gradient_clipping: .* met true; nearest: false"),
    ],
)
def test_training_it_does_not_do(change: dict[str, object], reason: str) -> None:
    good = job(data=2)
    (met,) = unsupported(good.spec, replace(good.training, **change), good.plan)
    assert re.search(reason, met)


def test_a_server_is_not_run() -> None:
    good = job(data=2)
    (reason,) = unsupported(good.spec, good.training, replace(good.plan, gradient_reduction="parameter_server"))
    assert reason == "gradient_reduction: the executor has no server, met parameter_server; nearest: all_reduce"


def test_communication_is_not_run_beside_products() -> None:
    good = job(tensor=2, sequence_parallel=True)
    (reason,) = unsupported(good.spec, good.training, replace(good.plan, overlap_tensor=True))
    expected = "overlap_tensor: torch's tensor parallelism runs collectives before and after products; nearest: false"
    assert reason == expected


def test_single_operators_are_not_recomputed() -> None:
    good = job(data=2)
    (reason,) = unsupported(good.spec, good.training, replace(good.plan, recompute=SomeOperators(("activation",))))
    assert reason.startswith("recompute:") and "met the operators activation; nearest: selective" in reason
    one = PerStage((Recompute.FULL, SomeOperators(("activation",))))
    two = replace(good.plan, stages=good.plan.stages * 2, recompute=one)
    assert reason in set(unsupported(good.spec, good.training, two))


def test_only_the_megatron_cut() -> None:
    good = job(tensor=2)
    (reason,) = unsupported(good.spec, good.training, replace(good.plan, shardings=good.plan.shardings[1:]))
    assert reason.startswith("shardings:")
