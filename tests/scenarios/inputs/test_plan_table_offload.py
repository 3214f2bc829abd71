"""The field ``plan.offload`` of a scenario: names, fractions, whole plans, and faults where they are."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwise import load
from meshwise.scenarios.files import library
from meshwise.scenarios.files.errors import ScenarioError
from meshwise.scenarios.files.reader import Document, read_document
from meshwise.scenarios.loader import read_scenario
from meshwise.scenarios.scenario import Scenario
from meshwise.strategies.plan.offloading import Offloading, StepPlace


def scenario(**plan: Any) -> Scenario:
    """Return a scenario of two pipeline ranks with other fields of its plan."""
    document = read_document(library.find_scenario("local/dp2-tp2-pp2"))
    return read_scenario(Document(document.file, document.data | {"plan": document.data["plan"] | plan}))


@pytest.mark.parametrize(
    ("stated", "meant"),
    [
        (["optimizer"], Offloading(optimizer=(1.0,))),
        (["optimizer", "activations"], Offloading(optimizer=(1.0,), activations=(1.0,))),
        ({"activations": [1.0, 0.5]}, Offloading(activations=(1.0, 0.5))),
        ({"optimizer": {"fraction": 0.5, "step": "device"}}, Offloading((0.5,), step=StepPlace.DEVICE)),
        ([], Offloading()),
    ],
)
def test_what_is_stated_is_in_the_plan_and_in_its_document(stated: Any, meant: Offloading, tmp_path: Path) -> None:
    found = scenario(offload=stated)
    plan = found.choose_plan()
    assert plan.offload == meant
    document = read_document(library.find_scenario("local/dp2-tp2-pp2"))
    whole = document.data | {"plan": json.loads(json.dumps(plan.to_json()))}
    assert read_scenario(Document("whole", whole)).choose_plan() == plan


@pytest.mark.parametrize(
    ("stated", "field", "message"),
    [
        (["weights"], "plan.offload", "holds any of optimizer, parameters, activations, met 'weights'"),
        (
            {"activations": 2},
            "plan.offload",
            "activations: a fraction is at least 0 and at most 1, met 2; nearest: 1.0",
        ),
        ({"activations": [1, 1, 1]}, "plan.offload.activations", "one for each of pipeline(2) ranks, met 3"),
        (["parameters"], "plan.offload.parameters", "need optimizer: 1.0 on the same pipeline ranks, met optimizer: 0"),
    ],
)
def test_a_fault_is_at_the_field(stated: Any, field: str, message: str) -> None:
    with pytest.raises(ScenarioError) as error:
        scenario(offload=stated)
    faults = [fault for fault in error.value.faults if fault.field == field]
    assert faults and message in faults[0].message


def test_a_cluster_without_pcie_says_that_copies_take_no_time() -> None:
    line = "copies between devices and hosts take no time of PCIe, of which the cluster states none"
    assert line in scenario(offload=["activations"]).simulate().assumptions
    assert line not in scenario().simulate().assumptions
    assert line not in load("activation-offload").simulate().assumptions
