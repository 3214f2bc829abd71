"""What a scenario says on top of a preset or a cluster file."""

from dataclasses import replace
from typing import Any

import pytest

from meshwise.scenarios.files.errors import ScenarioError
from meshwise.scenarios.files.reader import parse_document
from meshwise.scenarios.inputs.cluster_file import write_cluster
from meshwise.scenarios.loader import read_scenario
from meshwise.simulator.catalog import cluster
from meshwise.simulator.collective import Algorithm, Collective
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.machine.topology import LeafSpine, Torus

SCENARIO = """\
model: {preset: gpt3-1.3b}
training: {global_batch: 16, sequence: 64, precision: fp32}
cluster:
"""


def scenario_cluster(text: str, folder: Any = None) -> Cluster:
    lines = "".join(f"  {line}\n" for line in text.splitlines())
    name = "s.yaml" if folder is None else str(folder / "s.yaml")
    return read_scenario(parse_document((SCENARIO + lines).encode(), name)).problem.cluster


def test_a_scenario_adds_to_a_preset() -> None:
    text = (
        "preset: dgx-h100\nnodes: 4\nspeeds: {3: 0.5}\nlink_speeds: {nic 1 out: 0.25}\nalgorithms: {all_reduce: tree}\n"
        "tenants:\n- {name: t, devices: [0, 8], collective: send, size: 1 GB, period: 1 s}\n"
        "fabric: {kind: leaf_spine, nodes_per_leaf: 2, oversubscription: 2}\noverlap_slowdown: 1.1\n"
    )
    plain, changed = cluster("dgx-h100", 4), scenario_cluster(text)
    assert changed.nodes == plain.nodes
    assert changed.fabric == LeafSpine(2, oversubscription=2)
    assert changed.speeds == ((3, 0.5),) and changed.link_speeds == (("nic 1 out", 0.25),)
    assert changed.algorithms == ((Collective.ALL_REDUCE, Algorithm.TREE),)
    assert [tenant.devices for tenant in changed.tenants] == [(0, 8)]
    assert changed.overlap_slowdown == 1.1
    assert scenario_cluster("preset: dgx-h100\nnodes: 4") == plain


def test_a_scenario_adds_to_a_file_and_wins_where_both_speak(tmp_path) -> None:
    stated = replace(cluster("local-cpu", 2), speeds=((0, 0.9), (1, 0.8)), overlap_slowdown=1.5)
    write_cluster(stated, tmp_path / "c.yaml")
    changed = scenario_cluster("file: c.yaml\nnodes: 3\nspeeds: {1: 0.5, 5: 0.7}", tmp_path)
    assert changed.num_nodes == 3
    assert dict(changed.speeds) == {0: 0.9, 1: 0.5, 5: 0.7}
    assert changed.overlap_slowdown == 1.5
    assert scenario_cluster("file: c.yaml", tmp_path) == stated


def test_a_file_with_a_size_of_its_own_is_not_resized_unless_its_fabric_is_replaced(tmp_path) -> None:
    link = cluster("local-cpu").first_node.nic
    write_cluster(replace(cluster("local-cpu", 2), fabric=Torus((2, 2), link)), tmp_path / "c.yaml")
    with pytest.raises(ScenarioError, match=r"s\.yaml:5:3: cluster\.nodes: .*have a size of their own"):
        scenario_cluster("file: c.yaml\nnodes: 3", tmp_path)
    assert scenario_cluster("file: c.yaml\nnodes: 3\nfabric: {kind: crossbar}", tmp_path).num_devices == 6


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("preset: dgx-h100\nnodes: 1\nspeeds: {8: 0.5}", "s.yaml:6:3: cluster.speeds: speeds are (device below 8"),
        ("preset: mi300x-8\nnodes: 1\ndevices_per_node: 9", "s.yaml:6:3: cluster.devices_per_node: devices_per_node"),
        ("preset: tpu-v5e\nnodes: 33", "s.yaml:5:3: cluster.nodes: nodes * devices_per_node fill a grid within 16"),
        ("preset: dgx-h100\nnodes: 1\nfabric: {kind: ring}", "s.yaml:6:3: cluster.fabric: kind is one of crossbar"),
    ],
)  # fmt: skip
def test_an_addition_that_does_not_suit_is_a_fault_at_its_line(text: str, place: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        scenario_cluster(text)
    assert str(caught.value).startswith(place)
