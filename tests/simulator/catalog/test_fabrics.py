"""Default figures of NICs by kind of fabric."""

import pytest

from meshwise.simulator.catalog import cluster
from meshwise.simulator.catalog.fabrics import fabric_default, fabric_kinds


def test_every_kind_has_a_share_inside_its_range_and_a_source() -> None:
    for kind in fabric_kinds():
        default = fabric_default(kind)
        assert 0 < default.low <= default.share <= default.high <= 1
        assert default.latency > 0 and default.launch > 0 and len(default.source) > 20


def test_a_kind_that_is_not_known_is_told() -> None:
    with pytest.raises(ValueError, match=r"fabric is one of infiniband, roce, .*, met carrier pigeons"):
        fabric_default("carrier pigeons")


def test_the_catalogue_takes_the_default_of_its_fabric() -> None:
    # 8 NICs of 400 Gb/s at 0.84: 8 * 50 * 0.84 = 336 GB/s
    node = cluster("dgx-h100", 2).first_node
    assert node.nics * node.nic.bandwidth == pytest.approx(336e9)
    assert node.nic == fabric_default("infiniband").nic(50e9)


def test_measured_machines_keep_their_record() -> None:
    assert cluster("gcp-a3-ultra", 2).first_node.nic.bandwidth == pytest.approx(38.1e9)
