"""What a plan says of host memory: its documents, and every rule with its message."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.offloading import (
    NO_OFFLOADING,
    OFFLOADS,
    Offloading,
    StepPlace,
    count_fraction,
    offloading,
)
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.rules import violations

from ..problems import problem

EVERY = st.sampled_from([(), (1.0,), (0.25,), (0.0, 1.0, 0.5, 0.0)])
OFFLOADINGS = st.builds(Offloading, EVERY, EVERY, EVERY) | st.builds(
    Offloading, EVERY.filter(bool), EVERY, EVERY, st.just(StepPlace.DEVICE)
)


@given(OFFLOADINGS)
def test_a_document_means_what_it_was_made_of(offload: Offloading) -> None:
    assert offloading(json.loads(json.dumps(offload.document))) == offload


def test_names_mean_all_of_it() -> None:
    assert offloading(["optimizer"]) == offloading({"optimizer": 1}) == Offloading(optimizer=(1.0,))
    assert offloading(["optimizer"]).document == ["optimizer"]
    assert offloading([]) == offloading({}) == NO_OFFLOADING
    assert offloading({"optimizer": {"fraction": 0.5, "step": "device"}}) == Offloading((0.5,), step=StepPlace.DEVICE)
    assert not NO_OFFLOADING and not Offloading(activations=(0.0, 0.0)) and Offloading(activations=(0.0, 0.1))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (["optimiser"], "holds any of optimizer, parameters, activations, met 'optimiser'; nearest: optimizer"),
        (["optimizer", "optimizer"], "names each of optimizer, parameters, activations once, met optimizer twice"),
        ({"weights": 1.0}, "holds any of optimizer, parameters, activations, met 'weights'"),
        ("optimizer", "is a list of names, any of optimizer, parameters, activations, or a mapping"),
        ({"activations": 1.5}, "activations: a fraction is at least 0 and at most 1, met 1.5; nearest: 1.0"),
        ({"activations": [1.0, -0.5]}, "activations: a fraction is at least 0 and at most 1, met -0.5; nearest: 0.0"),
        ({"activations": float("nan")}, "activations: a fraction is at least 0 and at most 1, met nan"),
        ({"activations": 0}, "activations: a fraction of all is more than 0, met 0; nearest: leave it out"),
        ({"activations": "half"}, "activations: is a fraction of more than 0 and at most 1, or one for every pipeline"),
        ({"activations": []}, "activations: is a fraction of more than 0"),
        ({"parameters": {"fraction": 1.0}}, "parameters: is a fraction of more than 0"),
        ({"parameters": True}, "parameters: is a fraction of more than 0"),
        ({"optimizer": {"step": "gpu"}}, "optimizer: step is host or device, met 'gpu'; nearest: host"),
        ({"optimizer": {"ratio": 0.5}}, "optimizer: holds fraction and step, met 'ratio'"),
        (
            {"optimizer": {"fraction": [0.0, 0.0], "step": "device"}},
            "optimizer: step: device needs states on the host, met none; nearest: step: host",
        ),
    ],
)
def test_a_wrong_document_says_what_holds_and_what_was_met(document: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        offloading(document)
    assert str(error.value).startswith(message)


@given(st.integers(0, 10**12), st.integers(1, 1000))
def test_a_fraction_is_rounded_up_and_exact_where_it_is_whole(count: int, thousandths: int) -> None:
    found = count_fraction(count, thousandths / 1000)
    assert found == -(-count * thousandths // 1000)


def test_plan_documents_carry_it_and_old_ones_still_mean_the_same() -> None:
    small = problem()
    plan = complete(small, Layout(pipeline=8, offload=Offloading((0.5,), activations=(1.0, *[0.5] * 7))))
    document = json.loads(json.dumps(plan.to_json()))
    assert document["offload"] == {"optimizer": 0.5, "activations": [1.0, *[0.5] * 7]}
    assert Plan.from_json(document) == plan
    old = complete(small, Layout(data=8)).to_json() | {"offload": ["optimizer"]}
    assert Plan.from_json(old).offload == Offloading(optimizer=(1.0,))
    assert "0.5 of optimizer, 1/0.5/0.5/0.5/0.5/0.5/0.5/0.5 of activations on the host" in plan.describe()


ALL = Offloading(optimizer=(1.0,), parameters=(1.0,))
ACTIVATIONS = Offloading(activations=(1.0,))


@pytest.mark.parametrize(
    ("changes", "layout", "field", "message"),
    [
        (
            {},
            Layout(data=2, pipeline=4, offload=Offloading(activations=(1.0, 0.5))),
            "activations",
            "holds one fraction, or one for each of pipeline(4) ranks, met 2; nearest: 4 of them",
        ),
        (
            {},
            Layout(pipeline=8, schedule="zb1p", offload=ACTIVATIONS),
            "activations",
            "zb1p splits backward or runs passes in pairs; nearest: 1f1b",
        ),
        (
            {},
            Layout(pipeline=8, offload=Offloading(parameters=(1.0,))),
            "parameters",
            "met optimizer: 0 with parameters: 1; nearest: optimizer: 1.0",
        ),
        (
            {},
            Layout(pipeline=2, data=4, zero=3, offload=Offloading((1.0, 0.5), (0.0, 0.25))),
            "parameters",
            "met optimizer: 0.5 with parameters: 0.25; nearest: optimizer: 1.0",
        ),
        (
            {},
            Layout(data=4, context=2, zero=1, offload=ALL),
            "parameters",
            "need zero 3 where data * context = 8 ranks keep the same parameters, met zero 1; nearest: 3",
        ),
        (
            {},
            Layout(data=8, zero=3, zero_shards=4, offload=ALL),
            "parameters",
            "replicas sum gradients on devices at the end of a step, met 2 replicas; nearest: zero_shards: 0",
        ),
        (
            {"tied": True},
            Layout(pipeline=8, offload=ALL),
            "parameters",
            "need both ends of a tied one on one rank, and all of them there, met pipeline(8) with all of the",
        ),
        (
            {"tied": True},
            Layout(data=8, zero=3, offload=Offloading((1.0,), (0.5,))),
            "parameters",
            "met pipeline(1) with a part of the parameters; nearest: parameters: 1.0",
        ),
    ],
)
def test_a_broken_rule_says_what_holds_and_what_was_met(
    changes: dict[str, Any], layout: Layout, field: str, message: str
) -> None:
    found = list(violations(problem(**changes), layout))
    assert [violation.field for violation in found] == [f"offload.{field}"]
    assert message in found[0].message


def test_parameters_leave_only_where_no_copies_of_them_stay() -> None:
    small = problem(precision="bf16")
    small = replace(small, training=replace(small.training, precision="fp8"))
    (found,) = violations(small, Layout(data=8, zero=3, offload=ALL))
    expected = "parameters on the host leave no copies on devices, and fp8 ones stay there; nearest: precision: bf16"
    assert found == ("offload.parameters", expected)
    assert not list(violations(small, Layout(data=8, zero=3, offload=Offloading((1.0,), activations=(1.0,)))))


def test_activations_are_those_of_layers() -> None:
    small = problem()
    blocks = tuple(replace(block, layer=False, repeat=1) for block in small.graph.blocks)
    bare = Problem(replace(small.graph, blocks=blocks), small.cluster, small.training)
    found = [v for v in violations(bare, Layout(data=8, offload=ACTIVATIONS)) if v.field.startswith("offload")]
    assert [v.message for v in found] == [
        "activations on the host are those of layers, the model has none; nearest: leave it out"
    ]


def test_what_may_be_offloaded_is_what_the_value_holds() -> None:
    assert tuple(Offloading.__dataclass_fields__)[:3] == OFFLOADS
