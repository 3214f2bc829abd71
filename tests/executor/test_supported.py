"""What torch cannot run is refused with a reason, all at once."""

import re
from dataclasses import replace

import pytest
from tiny_jobs import TINY, job

from meshwise.executor import supported
from meshwise.executor.operators.run import list_unsupported_training
from meshwise.executor.supported import find_unsupported
from meshwise.simulator.models.experts import Experts
from meshwise.strategies.plan.layout import DECISIONS, Layout
from meshwise.strategies.plan.mesh import Mesh
from meshwise.strategies.plan.offloading import offloading
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.partition import Stage
from meshwise.strategies.plan.recomputation import PerStage, Recompute, SomeOperators


def test_a_plan_that_runs_has_no_reason_against_it() -> None:
    good = job(data=2, tensor=2, pipeline=2)
    assert find_unsupported(good.spec, good.training, good.plan) == ()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"positions": "rotary", "kv_channels": 7}, r"positions: .* met head_dim\(7\)"),
        ({"window": 8}, "window: .* met 8 of 16"),
        ({"parallel_residual": True}, "parallel_residual: .* met True"),
        ({"dropout": True}, "dropout: .* met true"),
        ({"vocab": 255}, "vocab: .* at least 256, met 255"),
    ],
)
def test_models_it_does_not_have(change: dict[str, object], reason: str) -> None:
    good = job(pipeline=2)
    reasons = find_unsupported(replace(TINY, **change), good.training, good.plan)
    assert len(reasons) == 1
    with pytest.raises(ValueError, match=reason):
        raise ValueError(reasons[0])


def test_every_reason_at_once() -> None:
    good = job(data=2)
    stages = (Stage(("embedding", "head")),)
    reasons = find_unsupported(
        replace(TINY, dropout=True),
        replace(good.training, precision="fp8"),
        replace(good.plan, stages=stages, overlap_tensor=True),
    )
    assert [reason.partition(":")[0] for reason in reasons] == ["dropout", "precision", "stages", "overlap_tensor"]


def test_states_that_it_does_not_keep() -> None:
    good = job(data=2)
    for states in ("same", "int8"):
        (reason,) = find_unsupported(good.spec, replace(good.training, state_precision=states), good.plan)
        assert reason == f"state_precision: the executor's moments are fp32, met {states}; nearest: fp32"
    plain = replace(good.training, precision="fp32", gradient_precision=None)
    assert not list_unsupported_training(replace(plain, state_precision="same"))
    (reason,) = list_unsupported_training(replace(plain, state_precision="int8"))
    assert reason.startswith("state_precision: ") and reason.endswith("met int8; nearest: fp32")


def test_shards_that_torch_would_keep_whole() -> None:
    split = job(data=2, pipeline=2, zero=3, schedule="zb1p")
    (reason,) = find_unsupported(split.spec, split.training, split.plan)
    assert reason.endswith("met true with zb1p; nearest: false")
    kept = job(data=2, pipeline=2, zero=3, schedule="zb1p", reshard_after_forward=False)
    assert find_unsupported(kept.spec, kept.training, kept.plan) == ()


def test_schedules_without_a_flush() -> None:
    good = job(pipeline=2, schedule="pipedream")
    assert find_unsupported(good.spec, good.training, good.plan) == ()
    training = replace(good.training, gradient_clipping=True)
    plan = replace(good.plan, zero=1, gradient_reduction="parameter_server")
    reasons = find_unsupported(good.spec, training, plan)
    assert [reason.partition(":")[0] for reason in reasons] == ["gradient_clipping", "zero", "gradient_reduction"]
    assert reasons[1].endswith("met 1; nearest: 0")


def test_batch_that_would_hang_torch() -> None:
    good = job(data=2, global_batch=16, microbatch=4)
    (reason,) = find_unsupported(good.spec, replace(good.training, global_batch=20), good.plan)
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
    (met,) = find_unsupported(good.spec, replace(good.training, **change), good.plan)
    assert re.search(reason, met)


def test_communication_is_not_run_beside_products() -> None:
    good = job(tensor=2, sequence_parallel=True)
    (reason,) = find_unsupported(good.spec, good.training, replace(good.plan, overlap_tensor=True))
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
    reasons = find_unsupported(good.spec, good.training, plan)
    assert reasons == find_unsupported(good.spec, good.training, replace(good.plan, recompute=one))
    assert len(reasons) == (reason is not None)
    assert reason is None or (reasons[0].startswith("recompute: ") and re.search(reason, reasons[0]))


def test_unfused_attention_is_recomputed_as_one() -> None:
    good = job(replace(TINY, attention="unfused"), data=2)
    for names, holds in ((("scores", "softmax", "context"), True), (("softmax",), False)):
        plan = replace(good.plan, recompute=SomeOperators(names))
        assert (find_unsupported(replace(TINY, attention="unfused"), good.training, plan) == ()) is holds


def test_only_the_megatron_cut() -> None:
    good = job(tensor=2)
    (reason,) = find_unsupported(good.spec, good.training, replace(good.plan, shardings=good.plan.shardings[1:]))
    assert reason.startswith("shardings:")


@pytest.mark.parametrize(
    ("layout", "change", "reason"),
    [
        ({"context": 2}, {"sequence": 18}, r"context: .* 2 \* context\(2\) divides sequence\(18\); nearest context: 1"),
        ({"context": 2}, {"attention": None}, "attention: .* met none; nearest: ring"),
        ({"context": 2}, {"attention": "unfused"}, "attention: ring .* met unfused; nearest: all_gather"),
        (
            {"context": 2, "attention": Attention.ULYSSES},
            {"kv_heads": 1},
            r"ulysses: .*keys\(1\); nearest: all_gather",
        ),
    ],
)
def test_contexts_that_cannot_be_cut(layout: dict[str, object], change: dict[str, object], reason: str) -> None:
    good = job(**layout)
    assert find_unsupported(good.spec, good.training, good.plan) == ()
    training = replace(good.training, **{k: v for k, v in change.items() if k == "sequence"})
    spec = replace(good.spec, **{k: v for k, v in change.items() if k == "kv_heads" or v == "unfused"})
    plan = replace(good.plan, attention=None) if None in change.values() else good.plan
    assert any(re.search(reason, met) for met in find_unsupported(spec, training, plan))


def test_axes_in_another_order() -> None:
    good = job(data=2, context=2)
    turned = replace(good.plan, mesh=Mesh(good.plan.mesh.axes[::-1]))
    (reason,) = find_unsupported(good.spec, good.training, turned)
    assert (
        reason == "order: the executor's mesh is pipeline, data, context, tensor, met tensor, context, data, pipeline"
    )


@pytest.mark.parametrize(
    ("layout", "experts", "reason"),
    [
        ({"data": 2}, {"score_bias": True}, "experts: score_bias: .* met true; nearest: false"),
        ({"data": 4, "expert": 4}, {"count": 6}, r"expert: expert divides the experts\(6\), met 4; nearest: 3"),
        ({"tensor": 2}, {"ffn": 15}, r"tensor: torch needs tensor to divide ffn of an expert\(15\), met 2"),
    ],
)
def test_experts_that_it_does_not_run(layout: dict[str, int], experts: dict[str, int], reason: str) -> None:
    mixed = replace(TINY, experts=Experts(count=4, top_k=2, ffn=16))
    good = job(mixed, **layout)
    assert find_unsupported(good.spec, good.training, good.plan) == ()
    changed = replace(mixed, experts=replace(mixed.experts, **experts))
    (met,) = (each for each in find_unsupported(changed, good.training, good.plan) if not each.startswith("shardings"))
    assert re.search(reason, met)


@pytest.mark.parametrize(("name", "value"), [("sequence_parallel", True), ("context", 2), ("zero", 1)])
def test_what_it_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    """A decision that is new has no name in the table: its default runs, every other value is a reason."""
    layout = replace(Layout(data=2, tensor=2), **{name: value})
    known = supported._DECISIONS
    assert list(supported._check_decisions(layout)) == []
    monkeypatch.setattr(supported, "_DECISIONS", known - {name})
    assert list(supported._check_decisions(replace(layout, **{name: DECISIONS[name].default}))) == []
    (reason,) = supported._check_decisions(layout)
    default, met = (str(option).lower() for option in (DECISIONS[name].default, value))
    assert reason == f"{name}: the executor has no other than {default}, met {met}; nearest: {default}"


def test_it_knows_no_decision_that_is_none() -> None:
    assert DECISIONS.keys() >= supported._DECISIONS
