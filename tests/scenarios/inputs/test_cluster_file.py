import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from meshwise.scenarios.commands.main import run
from meshwise.scenarios.files.errors import ScenarioError
from meshwise.scenarios.files.library import find_scenario
from meshwise.scenarios.files.reader import dump_yaml, parse_document
from meshwise.scenarios.inputs.cluster_document import build_cluster_document
from meshwise.scenarios.inputs.cluster_file import build_cluster, write_cluster
from meshwise.scenarios.loader import load
from meshwise.simulator.catalog import cluster, cluster_names, list_assumed_figures
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.machine.topology import Crossbar

LINK = {"latency": "1 us", "bandwidth": "1 GB/s"}


def read(data: dict[str, Any]) -> Cluster:
    return build_cluster(parse_document(dump_yaml(data).encode()))


def document(nodes: int = 2) -> dict[str, Any]:
    return build_cluster_document(cluster("local-cpu", nodes))


def faults_of(text: str) -> list[tuple[str, str]]:
    with pytest.raises(ScenarioError) as caught:
        build_cluster(parse_document(text.encode()))
    return [(fault.field, fault.message) for fault in caught.value.faults]


def test_a_bare_number_is_an_error_that_shows_a_unit() -> None:
    text = dump_yaml(document(1)).replace("memory: 8 GiB", "memory: 8")
    assert faults_of(text) == [
        ("accelerator.memory", "a size has a unit, met 8; write a number and a unit, as in '80 GiB'")
    ]


def test_a_preset_accelerator_stands_for_the_whole() -> None:
    written = build_cluster_document(cluster("dgx-a100-80gb", 2))
    assert read(written | {"accelerator": {"preset": "a100-80gb"}}) == cluster("dgx-a100-80gb", 2)
    both = dump_yaml(written | {"accelerator": {"preset": "a100-80gb", "launch": "1 us"}})
    assert faults_of(both) == [("accelerator", "holds preset alone or everything written out, met preset and launch")]


def test_a_file_of_the_first_format_is_a_switch_in_each_node_and_a_crossbar() -> None:
    old = document() | {"intra_node": LINK}
    value = read(old)
    assert value.first_node.network.link.bandwidth == 1e9
    assert type(value.first_node.network).__name__ == "Switch"
    assert value.fabric == Crossbar()


def test_a_graph_edge_marked_both_goes_both_ways() -> None:
    edges = [{"from": f"device {i}", "to": "hub", "both": True} | LINK for i in range(4)]
    one_way = [edge | {"both": False} for edge in edges]
    back = [{"from": edge["to"], "to": edge["from"]} | LINK for edge in edges]
    written_out = [edge for pair in zip(one_way, back, strict=True) for edge in pair]
    graphs = [read(document() | {"fabric": {"kind": "graph", "edges": e}}).fabric for e in (edges, written_out)]
    assert graphs[0] == graphs[1]


def test_a_mixed_cluster_numbers_its_devices_through() -> None:
    one = document(1)
    parts = {key: one[key] for key in ("accelerator", "host", "intra_node", "inter_node")}
    old = parts | {"accelerator": {"preset": "v100-32gb"}}
    mixed = {"name": "mixed", "node_types": [{"count": 2, "devices": 4} | old, {"count": 1, "devices": 2} | parts]}
    value = read(mixed | {"speeds": {"9": 0.5}})
    assert [value.node_of(device) for device in (0, 4, 8, 9)] == [0, 1, 2, 2]
    assert value.accelerator_of(7).name == "V100 SXM2 32GB"
    # the tenth device is a core at half speed
    assert value.accelerator_of(9).peak("fp32") == value.accelerator_of(8).peak("fp32") / 2
    ((field, message),) = faults_of(dump_yaml(mixed | {"speeds": {"10": 0.5}}))
    assert (field, message[:34]) == ("speeds", "speeds are (device below 10, facto")
    ((field, message),) = faults_of(dump_yaml(mixed | {"node_types": [{"count": 2, "devices": 4, "hosts": 3} | old]}))
    assert (field, message) == ("node_types.0.hosts", "hosts(3) divide the devices(4) of a node")


def test_an_unwritable_place_leaves_nothing(tmp_path) -> None:
    with pytest.raises(ValueError, match="cannot be written"):
        write_cluster(cluster("local-cpu", 1), tmp_path / "none" / "c.yaml")
    with pytest.raises(ValueError, match="directory"):
        write_cluster(cluster("local-cpu", 1), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_list_of_clusters_marks_what_is_assumed(capsys) -> None:
    assert run(["list", "clusters", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows.keys() == set(cluster_names())
    for name, row in rows.items():
        assert row["assumed"] == list_assumed_figures(name)
        assert ("assumes" in row["description"]) == bool(list_assumed_figures(name))
        assert row["status"].keys() == row["sources"].keys()


def test_what_calibrate_says_of_its_file_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    (tmp_path / "elsewhere").mkdir()
    out = str(tmp_path / "elsewhere" / "this machine.yaml")
    monkeypatch.setattr("meshwise.scenarios.commands.calibrate.measure_cores", lambda **_: cluster("local-cpu", 1, 2))
    assert run(["calibrate", "--device", "cpu", "--out", out]) == 0
    first, second = capsys.readouterr().out.splitlines()
    words = shlex.split(first.partition("meshwise ")[2])
    assert run([word.replace("SCENARIO", "local/dp2") for word in words]) == 0
    text = find_scenario("local/dp2").read_text("utf-8")
    named = second.partition("`")[2].partition("`")[0]
    beside = tmp_path / "elsewhere" / "scenario.yaml"
    beside.write_text(re.sub(r"cluster:\n(  .*\n)+", named + "\n", text))
    assert "this machine.yaml" in beside.read_text("utf-8")
    assert load(beside).problem.cluster.num_devices == 2
