"""Hostile cluster files: one fault each, at its field."""

from typing import Any

import pytest

from meshwise.scenarios.files.errors import ScenarioError
from meshwise.scenarios.files.reader import dump_yaml, parse_document
from meshwise.scenarios.inputs.cluster_document import build_cluster_document
from meshwise.scenarios.inputs.cluster_file import build_cluster
from meshwise.simulator.catalog import cluster

LINK = {"latency": "1 us", "bandwidth": "1 GB/s"}
BASE = build_cluster_document(cluster("local-cpu", 2))


def edges(*names: str) -> dict[str, Any]:
    ends = [{"from": name, "to": "hub", "both": True} | LINK for name in names]
    return {"kind": "graph", "edges": ends}


TENANT = {"name": "other", "devices": [0, 1], "collective": "all_reduce", "size": "1 GB", "period": "1 s"}


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"intra_node": LINK | {"kind": "swich"}}, "intra_node", "met 'swich'; nearest: switch"),
        ({"intra_node": LINK | {"kind": ["mesh"]}}, "intra_node", "mesh, ring, pcie, met ['mesh']"),
        ({"intra_node": LINK | {"kind": "ring", "reduces": True}}, "intra_node.reduces", "known: latency"),
        ({"intra_node": LINK | {"kind": "mesh", "pairs": [[0, 2, 1]]}}, "intra_node", "pairs join devices below 2"),
        ({"intra_node": LINK | {"kind": "mesh", "pairs": [[0, 0, 1]]}}, "intra_node", "two different devices"),
        ({"intra_node": LINK | {"kind": "mesh", "pairs": [[0, 1, -1]]}}, "intra_node.pairs.0.2", "is at least 1"),
        ({"intra_node": LINK | {"kind": "mesh"}, "devices_per_node": 4096}, "intra_node", "at most 256 devices"),
        ({"intra_node": LINK | {"kind": "pcie", "devices_per_switch": 0}}, "intra_node.devices_per_switch", "least 1"),
        ({"hosts_per_node": 3}, "hosts_per_node", "hosts(3) divide the devices(2)"),
        ({"hosts_per_node": 0}, "hosts_per_node", "is at least 1, met 0"),
        ({"fabric": "leaf_spine"}, "fabric", "holds a mapping"),
        ({"fabric": {}}, "fabric", "kind is one of crossbar, leaf_spine"),
        ({"fabric": {"kind": "leaf_spine"}}, "fabric.nodes_per_leaf", "this field is required"),
        ({"fabric": {"kind": "leaf_spine", "nodes_per_leaf": 2, "oversubscription": 0}},
         "fabric.oversubscription", "is more than 0"),
        ({"fabric": {"kind": "fat_tree", "nodes_per_leaf": 2, "leaves_per_pods": 1}},
         "fabric.leaves_per_pods", "nearest: leaves_per_pod"),
        ({"fabric": {"kind": "dragonfly", "nodes_per_router": 2, "routers_per_group": 10**9,
                     "local": LINK, "group_link": LINK}}, "fabric.routers_per_group", "is at most 1000000"),
        ({"fabric": {"kind": "torus", "shape": [3, 2]} | LINK}, "fabric", "torus 3 * 2 = 6 devices, the nodes have 4"),
        ({"fabric": {"kind": "torus", "shape": [2, 2, 1, 1]} | LINK}, "fabric.shape", "at most 3 items"),
        ({"fabric": {"kind": "torus", "shape": []} | LINK}, "fabric.shape", "at least 1 items"),
        ({"fabric": edges("device 0", "device 1")}, "fabric", "met none from device 0 to device 2"),
        ({"fabric": edges("device 0", "device 0", "hub")}, "fabric", "edges between different vertices"),
        ({"fabric": {"kind": "graph", "edges": []}}, "fabric.edges", "at least 1 items"),
        ({"fabric": {"kind": "graph", "edges": [{"from": "a"} | LINK]}}, "fabric.edges.0.to", "this field is required"),
        ({"speeds": {"4": 0.5}}, "speeds", "speeds are (device below 4, factor above 0), met (4, 0.5)"),
        ({"speeds": {"first": 0.5}}, "speeds.first", "names a device by its number, met 'first'"),
        ({"speeds": {"00": 0.5}}, "speeds.00", "names a device by its number"),
        ({"speeds": {"0": 0}}, "speeds.0", "more than 0"),
        ({"link_speeds": {"nic 0 out": "slow"}}, "link_speeds.nic 0 out", "holds a number"),
        ({"link_speeds": {"nic 0 out": 1e9}}, "link_speeds.nic 0 out", "is at most 1000"),
        ({"link_speeds": {"nic 0 up": 0.5}}, "link_speeds", "nic 0"),
        ({"fabric": edges("device 0", "device 1", "device 2", "device 3", "device 3")}, "fabric", "each edge once"),
        ({"intra_node": LINK | {"kind": "pcie", "devices_per_switch": 2, "switches_per_socket": 1, "socket": LINK},
          "host": BASE["host"] | {"pcie": LINK}}, "intra_node.devices_per_switch", "same devices_per_switch, met 2"),
        ({"algorithms": {"all_reduce": "rings"}}, "algorithms.all_reduce", "nearest: ring"),
        ({"algorithms": {"all_reduce": "measured"}}, "algorithms.all_reduce", "met 'measured'"),
        ({"algorithms": {"allreduce": "ring"}}, "algorithms.allreduce", "nearest: all_reduce"),
        ({"tenants": [TENANT | {"devices": [0, 9]}]}, "tenants", "tenant other: devices are below 4, met 9"),
        ({"tenants": [TENANT | {"devices": [1, 1]}]}, "tenants.0", "at least two different devices"),
        ({"tenants": [TENANT | {"size": 8}]}, "tenants.0.size", "a size has a unit"),
        ({"tenants": [TENANT | {"period": "0 s"}]}, "tenants.0.period", "more than 0"),
        ({"overlap_slowdown": 0.9}, "overlap_slowdown", "is at least 1"),
        ({"overlap_slowdown": 3}, "overlap_slowdown", "is at most 2"),
        ({"nodes": 1_000_000, "devices_per_node": 2}, "nodes", "at most 1000000 devices, met 2000000"),
        ({"node_types": []}, "node_types", "at least 1 items"),
        ({"collectives": [{"collective": "send", "ranks": 2, "points": [[2, "1 us"], [1, "1 us"]]}]},
         "collectives.0", "sizes rise"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_one_fault_at_its_place(change: dict[str, Any], field: str, message: str) -> None:
    text = dump_yaml(BASE | change)
    with pytest.raises(ScenarioError) as caught:
        build_cluster(parse_document(text.encode()))
    (fault,) = [fault for fault in caught.value.faults if fault.field == field]
    assert message in fault.message
    key = field.split(".")[0]
    start = next(number for number, line in enumerate(text.splitlines(), 1) if line.startswith(f"{key}:"))
    assert fault.line >= start and fault.column >= 1


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"launch": "-1 us"}, "host.launch", "is at least 0"),
        ({"launch": 1}, "host.launch", "a time has a unit"),
        ({"numa_nodes": 0}, "host.numa_nodes", "is at least 1"),
        ({"numa_nodes": 10**6}, "host.numa_nodes", "is at most 1000"),
        ({"pcie": {}}, "host.pcie.bandwidth", "this field is required"),
        ({"pcie": {"bandwidth": "16"}}, "host.pcie.bandwidth", "a bandwidth has a unit"),
        ({"pcie": {"bandwidth": "16 GB/s", "devices_per_switch": 0}}, "host.pcie.devices_per_switch", "at least 1"),
    ],
)
def test_a_wrong_host_is_one_fault_at_its_place(change: dict[str, Any], field: str, message: str) -> None:
    text = dump_yaml(BASE | {"host": BASE["host"] | change})
    with pytest.raises(ScenarioError) as caught:
        build_cluster(parse_document(text.encode()))
    (fault,) = caught.value.faults
    assert fault.field == field
    assert message in fault.message
