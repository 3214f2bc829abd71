"""Families of links that load alike are refined once, and come out as if each were refined."""

from dataclasses import replace

import pytest

from simulator.cluster import Cluster, Node
from simulator.host import Host, Pcie
from simulator.interconnect.interconnect import interconnect
from simulator.interconnect.kinds import Crossbar, Fabric, LeafSpine, PcieTree, Switch
from simulator.link import Link
from strategies.lowering import loads
from strategies.lowering.classes import ClassTable, fold
from strategies.lowering.placed import Placed
from strategies.mesh import DATA, PIPELINE, TENSOR, Axis, Mesh

from .problems import IDEAL

HOST = Host("host", 1e12, pcie=Pcie(Link(1e-6, 32e9), 2))
MESH = Mesh((Axis(PIPELINE, 2), Axis(DATA, 4), Axis(TENSOR, 4)))
FAST = Link(1e-6, 300e9)


def placed(network: Switch | PcieTree, fabric: Fabric, slow: str | None) -> Placed:
    """Return 32 ranks on 8 nodes of 4 devices that have slots of their own."""
    node = Node(IDEAL, HOST, 4, network, 4, Link(2e-6, 50e9))
    cluster = Cluster("m", ((node, 8),), fabric, link_speeds=((slow, 0.5),) if slow else ())
    return Placed(cluster, MESH, (), False)


def classes(table: ClassTable) -> list[list[int]]:
    """Return the classes of ranks, of links and of groups of every kind, as numbers in order of appearance."""
    columns = [table.class_of, table.link_class, *(groups.class_of for groups in table.tables.values())]
    return [column.tolist() for column in columns]


@pytest.mark.parametrize("network", [Switch(FAST), PcieTree(FAST, 2, 1, FAST)])
@pytest.mark.parametrize("fabric", [Crossbar(), LeafSpine(2, 2.0)])
@pytest.mark.parametrize("slow", [None, "pcie 5 out", "nic 5 out"])
def test_twins_fold_as_if_they_were_refined_themselves(
    monkeypatch: pytest.MonkeyPatch, network: Switch | PcieTree, fabric: Fabric, slow: str | None
) -> None:
    case = placed(network, fabric, slow)
    folded = classes(fold(case))
    monkeypatch.setattr(loads, "_twins", lambda parts, usual: range(len(parts.families)))
    assert folded == classes(fold(case))


def test_slots_and_nics_are_twins_where_only_nics_use_slots() -> None:
    network = interconnect(placed(Switch(FAST), Crossbar(), None).cluster)
    _, twins = loads.Loads(placed(Switch(FAST), Crossbar(), None)).coloured()
    names = {(network.name(twin.start), network.name(first.start)) for twin, first in twins}
    assert ("nic 0 out", "pcie 0 out") in names
    assert ("nic 0 in", "pcie 0 in") in names
    # with the optimizer on hosts, slots carry more than their NICs
    _, twins = loads.Loads(replace(placed(Switch(FAST), Crossbar(), None), offloads=True)).coloured()
    assert not any(network.kind(twin.start).startswith("nic") for twin, _ in twins)
