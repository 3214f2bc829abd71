"""For every legal layout a trainer's file reads back to the same plan, or every reason why it cannot is listed."""

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_requests import MODELS, TRAINING, problem, request

from meshwise.executor.export.launchers import UnsupportedRequest
from meshwise.scenarios.inputs.plan_table import build_layout, list_rule_violations
from meshwise.scenarios.interchange.facts import FIELDS, PLAN, Facts, TrainerRequest, build_plan_document, collect_facts
from meshwise.scenarios.interchange.lines import flatten_document
from meshwise.scenarios.interchange.target import Target, is_compatible
from meshwise.scenarios.interchange.targets import TARGETS
from meshwise.scenarios.interchange.torchtitan import TORCHTITAN
from meshwise.scenarios.schema.plan import PlanTable
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.mesh import AXES
from meshwise.strategies.plan.offloading import NO_OFFLOADING, Offloading
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.recomputation import FirstLayers, PerStage, Recompute, SomeOperators

EACH_TARGET = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
WHOLE, PART = Offloading(optimizer=(1.0,)), Offloading(optimizer=(0.5,))
ALL = Offloading(optimizer=(1.0,), parameters=(1.0,))
SAME = replace(TRAINING, gradient_precision="same")
DEGREES = st.sampled_from([1, 1, 2, 4])
LAYOUTS = st.fixed_dictionaries(
    {"data": DEGREES, "tensor": DEGREES, "pipeline": DEGREES, "microbatch": st.sampled_from([1, 2])},
    optional={
        "context": st.sampled_from([1, 2]),
        "expert": st.sampled_from([1, 2]),
        "attention": st.sampled_from(list(Attention)),
        "schedule": st.sampled_from(
            ["1f1b", "gpipe", "interleaved", "looped_bfs", "zb1p", "zbv", "dualpipev", "naive"]
        ),
        "chunks": st.sampled_from([1, 2]),
        "zero": st.integers(0, 3),
        "zero_shards": st.sampled_from([0, 2]),
        "sequence_parallel": st.booleans(),
        "overlap_tensor": st.booleans(),
        "overlap_gradients": st.booleans(),
        "scatter_gather": st.booleans(),
        "reshard_after_forward": st.booleans(),
        "recompute": st.sampled_from(
            [
                Recompute.SELECTIVE,
                Recompute.FULL,
                FirstLayers(Recompute.FULL, 1),
                FirstLayers(Recompute.SELECTIVE, 1),
                SomeOperators(("up",)),
                SomeOperators(("activation",)),
                SomeOperators(("up", "activation", "down")),
                SomeOperators(("attention", "up", "activation", "down")),
                SomeOperators(("expert_activation",)),
                SomeOperators(("input_norm", "attention", "feed_forward_norm", "activation")),
                PerStage((Recompute.FULL, Recompute.NONE)),
                PerStage((FirstLayers(Recompute.SELECTIVE, 2), SomeOperators(("activation",)))),
            ]
        ),
        "offload": st.sampled_from([WHOLE, PART, ALL, Offloading(activations=(1.0,))]),
        "stages": st.sampled_from(
            ["even", "balanced", (5, 3), (2, 6), (8, 0), (1, 2, 2, 3), (3, 0, 2, 3), (2, 1, 3, 2)]
        ),
        "order": st.sampled_from([AXES, ("data", "pipeline", "tensor"), ("pipeline", "tensor", "data")]),
        "gradient_reduction": st.sampled_from(["all_reduce", "parameter_server"]),
    },
)
TRAININGS = st.sampled_from(
    [
        replace(TRAINING, precision=precision, optimizer=optimizer, gradient_clipping=clip, gradient_precision=wide)
        for precision, optimizer, clip, wide in product(
            ("bf16", "fp32", "fp16", "fp8"), ("adamw", "sgd"), (True, False), (None, "same", "fp32")
        )
    ]
)


def drawn(choice: dict[str, Any], model: str, training: Any) -> TrainerRequest | None:
    """Return the request of a layout where it is legal."""
    layout = Layout(**choice)
    ranks = layout.data * layout.tensor * layout.pipeline * layout.context
    of = problem(model, ranks, training)
    if list_rule_violations(of, layout):
        return None
    return TrainerRequest("drawn", MODELS[model], of, complete(of, layout))


def plan_of(request: TrainerRequest, facts: Facts) -> Plan:
    """Return the plan that facts mean, by the way of a plan file."""
    return complete(request.problem, build_layout(PlanTable.model_validate(build_plan_document(facts))))


def reads_back(target: Target, request: TrainerRequest) -> str:
    """Return the file of a request after it was read back."""
    text = target.to_text(request)
    facts = target.read(text.encode())
    assert plan_of(request, facts) == request.plan, text
    own = collect_facts(request)
    assert [name for name in facts if name not in PLAN and not is_compatible(facts[name], own[name])] == []
    return text


@EACH_TARGET
@given(choice=LAYOUTS, model=st.sampled_from(list(MODELS)), training=TRAININGS)
@settings(max_examples=150, deadline=None)
def test_a_file_reads_back_or_reasons_are_listed(
    target: Target, choice: dict[str, Any], model: str, training: Any
) -> None:
    asked = drawn(choice, model, training)
    if asked is None:
        return
    try:
        reads_back(target, asked)
    except UnsupportedRequest as error:
        head, _, reasons = str(error).partition(" cannot say this: ")
        assert head == target.versioned_name
        assert all(each.split(": ")[0] in FIELDS and ", met " in each for each in reasons.split("; ")), reasons


def _sayable() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield requests that a trainer can say, one at least for every entry of its map that has a choice."""
    llama: dict[str, Any] = {"model": "llama"}
    for data, tensor in product((1, 2), (1, 2)):
        yield "megatron", {"data": data, "tensor": tensor, "scatter_gather": True}
        yield "torchtitan", {"data": data, "tensor": tensor}
        yield "deepspeed", {"data": data, "tensor": tensor, "overlap_gradients": data == 1, "training": SAME}
        yield "nanotron", llama | {"data": data, "tensor": tensor}
    for attention, zero in product(Attention, (0, 1, 2, 3)):
        yield "megatron", {"data": 2, "context": 2, "attention": attention, "zero": zero}
    for zero in (1, 2, 3):
        yield "deepspeed", {"data": 4, "context": 2, "attention": Attention.ULYSSES, "zero": zero}
        yield "deepspeed", {"data": 4, "zero": zero, "offload": WHOLE}
        yield "deepspeed", {"model": "mixture", "data": 4, "zero": zero, "expert": 2}
    yield "deepspeed", {"data": 4, "zero": 3, "offload": ALL}
    yield "deepspeed", {"data": 4, "zero": 3, "offload": PART}
    for stages in ((4, 4), (5, 3), (8, 0)):
        yield "megatron", {"pipeline": 2, "stages": stages}
        yield "torchtitan", {"pipeline": 2, "stages": stages}
    for stages in ((1, 2, 2, 3), (2, 2, 2, 2)):
        chunked = {"pipeline": 2, "chunks": 2, "stages": stages}
        yield "megatron", chunked | {"schedule": "interleaved", "microbatch": 2}
        for schedule in ("interleaved", "looped_bfs", "zbv", "dualpipev", "interleaved_zero_bubble"):
            yield "torchtitan", chunked | {"schedule": schedule}
    for how in (Recompute.FULL, Recompute.SELECTIVE, FirstLayers(Recompute.FULL, 3)):
        yield "megatron", {"pipeline": 2, "recompute": how, "tensor": 2, "sequence_parallel": True}
    feed_forward = ("up", "activation", "down")
    for names in (feed_forward, ("attention", *feed_forward), ("expert_activation", "attention")):
        yield "megatron", {"model": "mixture", "data": 2, "recompute": SomeOperators(names)}
    yield "torchtitan", {"pipeline": 2, "recompute": FirstLayers(Recompute.FULL, 3)}
    alone: dict[str, Any] = {"model": "llama", "recompute": SomeOperators(("activation",))}
    yield "torchtitan", alone | {"data": 4, "zero": 3, "tensor": 2, "sequence_parallel": True, "overlap_tensor": True}
    yield "torchtitan", alone | {"data": 2, "pipeline": 2, "schedule": "zbv", "chunks": 2}
    yield "torchtitan", alone | {"model": "mixture", "data": 4, "zero": 3, "expert": 2}
    kept: dict[str, Any] = {"data": 4, "zero": 3, "reshard_after_forward": False, "training": SAME}
    yield "megatron", kept
    yield "megatron", kept | {"tensor": 2, "sequence_parallel": True, "overlap_tensor": True}
    yield "megatron", kept | {"context": 2, "attention": Attention.RING, "recompute": Recompute.FULL}
    yield "megatron", kept | {"training": replace(SAME, precision="fp8"), "model": "llama"}
    yield "megatron", kept | {"training": replace(TRAINING, precision="fp32"), "model": "mixture"}
    for model, precision in product(("gpt", "llama"), ("bf16", "fp8", "fp32")):
        yield "torchtitan", {"model": model, "data": 4, "training": replace(TRAINING, precision=precision)}
    yield "megatron", {"data": 4, "zero": 1, "zero_shards": 2, "offload": PART}
    mixture = {"model": "mixture", "data": 4, "expert": 2, "tensor": 2, "sequence_parallel": True}
    yield "megatron", mixture | {"overlap_gradients": False}
    yield "megatron", {"tensor": 2, "sequence_parallel": True, "overlap_tensor": True}
    for reshard in (True, False):
        sharded = {"data": 4, "zero": 3, "reshard_after_forward": reshard, "recompute": Recompute.FULL}
        for name in ("torchtitan", "accelerate"):
            yield name, sharded | {"zero_shards": 2}
            yield name, sharded | {"tensor": 2}
            yield name, sharded | {"context": 2, "attention": Attention.ALL_GATHER, "offload": ALL}
    yield "torchtitan", {"model": "mixture", "data": 4, "zero": 3, "expert": 2}
    yield "torchtitan", {"tensor": 2, "sequence_parallel": True, "overlap_tensor": True, "schedule": "1f1b"}
    yield "accelerate", {"data": 4, "zero": 3, "context": 2, "attention": Attention.RING}
    yield "accelerate", {"data": 2}
    yield "accelerate", {"data": 1}
    yield "accelerate", {"tensor": 2}
    for zero, offload in product((1, 2), (NO_OFFLOADING, WHOLE)):
        yield "accelerate", {"data": 4, "zero": zero, "overlap_gradients": False, "offload": offload}
    for schedule, how in product(("1f1b", "gpipe"), (Recompute.NONE, Recompute.FULL)):
        yield "nanotron", llama | {"pipeline": 2, "stages": (5, 3), "schedule": schedule, "recompute": how}
    yield "nanotron", llama | {"data": 2, "zero": 1, "context": 2, "microbatch": 2}
    yield "nanotron", llama | {"tensor": 2, "sequence_parallel": True, "overlap_tensor": True}


@pytest.mark.parametrize(("name", "choice"), list(_sayable()), ids=str)
def test_what_can_be_said_is_said(name: str, choice: dict[str, Any]) -> None:
    text = reads_back(TARGETS[name], request(**choice))
    assert TARGETS[name].version in text or (name == "deepspeed" and TARGETS[name].versioned_name in text)


@given(choice=LAYOUTS, model=st.sampled_from(list(MODELS)), precision=st.sampled_from(["bf16", "fp8"]))
@settings(max_examples=150, deadline=None)
def test_the_activation_alone_is_said_where_no_recomputation_is(
    choice: dict[str, Any], model: str, precision: str
) -> None:
    """torchtitan says of a swiglu what it says with nothing recomputed, and one call more; of another nothing."""
    training = replace(TRAINING, precision=precision)
    plain = drawn(choice | {"recompute": Recompute.NONE}, model, training)
    again = drawn(choice | {"recompute": SomeOperators(("activation",))}, model, training)
    if plain is None or again is None:
        return
    try:
        text = TORCHTITAN.to_text(plain)
    except UnsupportedRequest as error:
        with pytest.raises(UnsupportedRequest) as other:
            TORCHTITAN.to_text(again)
        reasons = str(error).partition(": ")[2].split("; ")
        assert [reason for reason in reasons if reason not in str(other.value)] == []
        return
    if MODELS[model].ffn_kind != "swiglu":
        with pytest.raises(UnsupportedRequest, match=r"plan\.recompute: the activation of swiglu alone"):
            TORCHTITAN.to_text(again)
        return
    said = reads_back(TORCHTITAN, again).splitlines()
    statements = [line for line in text.splitlines() if line.startswith("    config.")]
    assert [line for line in said if line.startswith("    config.")][: len(statements)] == statements
    assert said.count("    recompute_activations(config)") == 1 and "recompute_activations" not in text


@given(choice=LAYOUTS, model=st.sampled_from(list(MODELS)), training=TRAININGS)
@settings(max_examples=150, deadline=None)
def test_kept_parameters_are_those_of_fsdp2(choice: dict[str, Any], model: str, training: Any) -> None:
    """What Megatron-LM's ``validate_args`` refuses beside ``--use-torch-fsdp2`` no script says beside it."""
    asked = drawn(choice | {"data": 4, "zero": 3, "reshard_after_forward": False}, model, training)
    if asked is None:
        return
    megatron = TARGETS["megatron"]
    asked = replace(asked, spec=replace(asked.spec, tied_embeddings=False))
    try:
        text = reads_back(megatron, asked)
    except UnsupportedRequest:
        return
    values = flatten_document(megatron.parse(text.encode(), "file")).values
    needed = {"--torch-fsdp2-no-reshard-after-forward": True, "--no-gradient-accumulation-fusion": True}
    needed |= {"--untie-embeddings-and-output-weights": True, "--ckpt-format": "torch_dist"}
    assert values | needed == values
    assert not {"--use-distributed-optimizer", "--use-megatron-fsdp", "--fp16"} & values.keys()
    assert not {"--pipeline-model-parallel-size", "--expert-model-parallel-size"} & values.keys()
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in text


@EACH_TARGET
def test_a_map_has_every_field_once(target: Target) -> None:
    met = [field for entry in target.entries for field in entry.fields]
    assert sorted(met) == sorted(FIELDS)
    assert len(PLAN) == len(fields(Layout))


@EACH_TARGET
def test_a_map_has_every_key_once_at_most(target: Target) -> None:
    met = [key for entry in target.entries for key in entry.keys]
    assert len(met) == len(set(met))


@EACH_TARGET
def test_all_reasons_at_once(target: Target) -> None:
    choice = {"data": 2, "tensor": 2, "pipeline": 2, "schedule": "zb1p", "order": ("data", "pipeline", "tensor")}
    with pytest.raises(UnsupportedRequest) as error:
        target.to_text(request(microbatch=(1, 3), gradient_reduction="parameter_server", **choice))
    for field in ("microbatch", "order", "gradient_reduction", "schedule"):
        assert f"plan.{field}: " in str(error.value)


@EACH_TARGET
def test_a_plan_that_is_no_layout_is_refused(target: Target) -> None:
    asked = request(tensor=2)
    cut = replace(asked, plan=replace(asked.plan, shardings=asked.plan.shardings[:-1]))
    with pytest.raises(UnsupportedRequest, match="a plan that cuts operators in ways of its own"):
        target.to_text(cut)
