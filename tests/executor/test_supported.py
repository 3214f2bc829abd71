"""What torch cannot run is refused with a reason, all at once."""

import re
from dataclasses import replace

import pytest
from tiny_jobs import TINY, job

from executor.supported import unsupported
from strategies.offloading import offloading
from strategies.plan import Stage
from strategies.recomputation import PerStage, Recompute, SomeOperators


def test_a_plan_that_runs_has_no_reason_against_it() -> None:
    good = job(data=2, tensor=2, pipeline=2)
    assert unsupported(good.spec, good.training, good.plan) == ()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"positions": "rotary", "kv_channels": 7}, r"positions: .* met head_dim\(7\)"),
        ({"window": 8}, "window: .* met 8 of 16"),
        ({"parallel_residual": True}, "parallel_residual: .* met True"),
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
        replace(TINY, dropout=True),
        replace(good.training, precision="fp8"),
        replace(good.plan, stages=stages, overlap_tensor=True),
    )
    assert [reason.partition(":")[0] for reason in reasons] == ["dropout", "precision", "stages", "overlap_tensor"]


def test_shards_that_torch_would_keep_whole() -> None:
    split = job(data=2, pipeline=2, zero=3, schedule="zb1p")
    (reason,) = unsupported(split.spec, split.training, split.plan)
    assert reason.endswith("met true with zb1p; nearest: false")
    kept = job(data=2, pipeline=2, zero=3, schedule="zb1p", reshard_after_forward=False)
    assert unsupported(kept.spec, kept.training, kept.plan) == ()


def test_schedules_without_a_flush() -> None:
    good = job(pipeline=2, schedule="pipedream")
    assert unsupported(good.spec, good.training, good.plan) == ()
    training = replace(good.training, gradient_clipping=True)
    plan = replace(good.plan, zero=1, gradient_reduction="parameter_server")
    reasons = unsupported(good.spec, training, plan)
    assert [reason.partition(":")[0] for reason in reasons] == ["gradient_clipping", "zero", "gradient_reduction"]
    assert reasons[1].endswith("met 1; nearest: 0")


def test_batch_that_would_hang_torch() -> None:
    good = job(data=2, global_batch=16, microbatch=4)
    (reason,) = unsupported(good.spec, replace(good.training, global_batch=20), good.plan)
    assert reason == ("global_batch: sequences(8) of a microbatch on all data ranks * microbatches(2) = 16, met 20")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"optimizer": "lion"}, "optimizer: .* adamw or sgd, met lion"),
        ({"precision": "fp64", "gradient_precision": "fp32"}, "gradient_precision: .* met fp32"),
    ],
)
def test_training_it_does_not_do(change: dict[str, object], reason: str) -> None:
    good = job(data=2)
    (met,) = unsupported(good.spec, replace(good.training, **change), good.plan)
    assert re.search(reason, met)


def test_communication_is_not_run_beside_products() -> None:
    good = job(tensor=2, sequence_parallel=True)
    (reason,) = unsupported(good.spec, good.training, replace(good.plan, overlap_tensor=True))
    expected = "overlap_tensor: torch's tensor parallelism runs collectives before and after products; nearest: false"
    assert reason == expected


@pytest.mark.parametrize(
    ("names", "layout", "reason"),
    [
        (("activation", "up"), {"data": 2}, None),
        (("rotary",), {"data": 2}, "recomputes input_norm, qkv, .* met the operators rotary; nearest: selective"),
        (("activation",), {"tensor": 2}, "met the operators activation; nearest: selective"),
        (("activation",), {"offload": offloading(["activations"])}, "hosts .* nearest: selective"),
    ],
)
def test_single_operators(names: tuple[str, ...], layout: dict[str, object], reason: str | None) -> None:
    good = job(**layout)
    one = SomeOperators(names)
    plan = replace(good.plan, recompute=PerStage((one, *[Recompute.FULL] * (len(good.plan.stages) - 1))))
    reasons = unsupported(good.spec, good.training, plan)
    assert reasons == unsupported(good.spec, good.training, replace(good.plan, recompute=one))
    assert len(reasons) == (reason is not None)
    assert reason is None or (reasons[0].startswith("recompute: ") and re.search(reason, reasons[0]))


def test_unfused_attention_is_recomputed_as_one() -> None:
    good = job(replace(TINY, attention="unfused"), data=2)
    for names, holds in ((("scores", "softmax", "context"), True), (("softmax",), False)):
        plan = replace(good.plan, recompute=SomeOperators(names))
        assert (unsupported(replace(TINY, attention="unfused"), good.training, plan) == ()) is holds


def test_only_the_megatron_cut() -> None:
    good = job(tensor=2)
    (reason,) = unsupported(good.spec, good.training, replace(good.plan, shardings=good.plan.shardings[1:]))
    assert reason.startswith("shardings:")
