"""The fabric of a row: by its words, the measured record of its network, or the default of its kind."""

import pytest

from meshwise.scenarios.published.fabrics import bridged_generation, find_fabric_kind
from meshwise.scenarios.published.machine import build_machine
from meshwise.scenarios.published.row import Row


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("8 x 400 Gb/s InfiniBand NDR", "infiniband"),
        ("RoCE, 1600 Gbps node-node", "roce"),
        ("EFA 400 Gb/s", "efa"),
        ("GPUDirect-TCPXO, 8 x 200 Gb/s", "tcpx"),
        ("HPE Slingshot-11", "slingshot"),
        ("25 Gb/s Ethernet", "sockets"),
        ("HDR100", "infiniband"),
        ("string and cups", "unknown"),
        ("", "unknown"),
    ],
)
def test_kinds(words: str, kind: str) -> None:
    assert find_fabric_kind(Row({"inter_node_link": words})) == kind


def test_the_share_of_the_line_rate_is_that_of_the_kind() -> None:
    # 4 x 200 Gb/s are 100 GB/s a node; Slingshot reaches 0.55 of it
    row = Row({"accelerator": "GH200", "inter_node_link": "4 x 200 Gb/s Slingshot", "devices_per_node": 4})
    node = build_machine(row, 8).first_node
    assert node.nics * node.nic.bandwidth == pytest.approx(55e9)
    assert any("(slingshot fabric; 0.31 to 0.80)" in line for line in row.assumed)


def test_a_network_that_was_measured_has_its_record() -> None:
    row = Row({"accelerator": "H100 SXM (p5.48xlarge)", "inter_node_link": "EFA v2, 32x100 Gb/s per node"})
    node = build_machine(row, 16).first_node
    assert node.nic.latency == pytest.approx(88e-6)
    assert node.nics * node.nic.bandwidth == pytest.approx(400e9 * 38.1 / 50)
    assert any("as measured for efa-3200g" in line for line in row.assumed)


def test_nothing_stated_is_the_catalogues_default() -> None:
    node = build_machine(Row({"accelerator": "H100"}), 16).first_node
    assert node.nics * node.nic.bandwidth == pytest.approx(336e9)


def test_bridges_join_pairs_alone() -> None:
    row = Row({"intra_node_link": "NVLink pairs, PCIe between pairs"})
    assert (bridged_generation(row, 2, 4), bridged_generation(row, 4, 4)) == (0, 4)
    assert bridged_generation(Row({"intra_node_link": "NVLink4/NVSwitch"}), 8, 5) == 0
