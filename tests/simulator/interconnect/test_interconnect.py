"""Laws of links and routes that hold for every cluster."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.catalog import cluster
from meshwise.simulator.interconnect.interconnect import Interconnect, interconnect
from meshwise.simulator.interconnect.links import number_devices
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.machine.topology import (
    Crossbar,
    Dragonfly,
    FatTree,
    Graph,
    LeafSpine,
    Mesh,
    PcieTree,
    Ring,
    Torus,
)

from .machines import (
    CUBE_MESH,
    FAST,
    SLOW,
    bandwidth,
    check_route,
    clusters,
    every_pair,
    machine,
    node,
    one,
)

MACHINES = {
    "switch": machine((node(4), 2)),
    "cube mesh": machine((node(8, CUBE_MESH), 1)),
    "full mesh": machine((node(5, Mesh(FAST)), 2)),
    "ring": machine((node(6, Ring(FAST)), 2)),
    "pcie tree": machine((node(8, PcieTree(FAST, 2, 2, SLOW)), 1)),
    "leaf spine": machine((node(2), 6), fabric=LeafSpine(2, 2.0)),
    "rails": machine((node(2), 5), fabric=LeafSpine(2, rail_optimized=True)),
    "fat tree": machine((node(2), 7), fabric=FatTree(1, 3)),
    "dragonfly": machine((node(1), 14), fabric=Dragonfly(1, 3, FAST, SLOW)),
    "torus": machine((node(4), 6), fabric=Torus((2, 3, 4), FAST)),
    "grid": machine((node(4), 3), fabric=Torus((4, 3), FAST, wraparound=False)),
    "mixed": machine((node(3, nics=2), 2), (node(4, Ring(FAST), nics=1), 2), fabric=LeafSpine(3)),
}


@pytest.mark.parametrize("name", MACHINES)
def test_every_route_is_a_unit_of_flow_over_fewest_hops(name: str) -> None:
    cluster = MACHINES[name]
    for source, target in zip(*every_pair(cluster.num_devices), strict=True):
        check_route(cluster, interconnect(cluster), int(source), int(target))


@settings(max_examples=1000, deadline=None)
@given(clusters(), st.data())
def test_a_route_of_any_cluster_is_a_unit_of_flow_over_fewest_hops(cluster: Cluster, data: st.DataObject) -> None:
    device = st.integers(0, cluster.num_devices - 1)
    check_route(cluster, Interconnect(cluster), data.draw(device), data.draw(device))


@settings(max_examples=100, deadline=None)
@given(clusters(), st.data())
def test_routes_of_many_pairs_are_those_of_each(cluster: Cluster, data: st.DataObject) -> None:
    wired, device = Interconnect(cluster), st.integers(0, cluster.num_devices - 1)
    pairs = np.array(data.draw(st.lists(st.tuples(device, device), max_size=12)), dtype=np.int64).reshape(-1, 2)
    pair, link, share = wired.routes(pairs[:, 0], pairs[:, 1])
    named = [(wired.name(entry), amount) for entry, amount in zip(link.tolist(), share.tolist(), strict=True)]
    assert pair.tolist() == sorted(pair.tolist())
    for index, (source, target) in enumerate(pairs.tolist()):
        assert [row for owner, row in zip(pair, named, strict=True) if owner == index] == one(wired, source, target)


@settings(max_examples=100, deadline=None)
@given(clusters())
def test_links_have_names_of_their_own_and_finite_figures(cluster: Cluster) -> None:
    wired = Interconnect(cluster)
    names = [wired.name(link) for link in range(wired.num_links)]
    assert [wired.link(name) for name in names] == list(range(wired.num_links))
    assert np.isfinite(wired.bandwidth).all() and (wired.bandwidth > 0).all()
    assert len(wired.bandwidth) == len(wired.latency) == len(wired.launch) == wired.num_links
    if not isinstance(cluster.fabric, Graph):
        for link, name in enumerate(names):
            assert wired.kind(link) == " ".join(word for word in name.split() if not word[0].isdigit())


@settings(max_examples=100, deadline=None)
@given(clusters())
def test_the_graph_has_every_link_that_a_device_uses(cluster: Cluster) -> None:
    wired = Interconnect(cluster)
    absent = set(range(wired.num_links)) - {link for _, _, link in wired.graph().edges(data="link")}
    used = {f"nic {nic} {way}" for nic in number_devices(cluster).nic for way in ("out", "in")}
    spare = {wired.name(link) for link in absent if not wired.kind(link).startswith("memory")}
    assert spare == {name for name in map(wired.name, range(wired.num_links)) if name.startswith("nic")} - used


@settings(max_examples=100, deadline=None)
@given(clusters())
def test_devices_are_counted_off_to_hosts_and_nics_node_by_node(cluster: Cluster) -> None:
    hosts, nics, first_host, first_nic = [], [], 0, 0
    for kind, count in cluster.nodes:
        for _ in range(count):
            for local in range(kind.devices):
                hosts.append(first_host + local // (kind.devices // kind.hosts))
                nics.append(first_nic + local * kind.nics // kind.devices)
            first_host, first_nic = first_host + kind.hosts, first_nic + kind.nics
    assert Interconnect(cluster).host_of(np.arange(cluster.num_devices)).tolist() == hosts
    assert number_devices(cluster).nic.tolist() == nics


@settings(max_examples=100, deadline=None)
@given(clusters(), st.data())
def test_link_speeds_change_one_link(cluster: Cluster, data: st.DataObject) -> None:
    built = Interconnect(cluster)
    link = data.draw(st.integers(0, built.num_links - 1)) if built.num_links else None
    speeds = ((built.name(link), 0.25),) if link is not None else ()
    real = Interconnect(Cluster(cluster.name, cluster.nodes, cluster.fabric, link_speeds=speeds))
    changed = np.flatnonzero(real.bandwidth != built.bandwidth).tolist()
    assert changed == ([link] if link is not None else [])
    assert all(real.bandwidth[entry] == built.bandwidth[entry] / 4 for entry in changed)


def test_link_speeds_of_one_link_multiply() -> None:
    cluster = machine((node(2), 1), link_speeds=(("nic 1 out", 0.5), ("nic 1 out", 0.5)))
    assert bandwidth(interconnect(cluster), "nic 1 out") == 50e9 / 4


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("nic 99 out", "nic 1 out"), ("devise 1 in", "device 1 in"), ("nic 01 out", "nic 1 out")],
)
def test_an_unknown_link_meets_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"nearest: {nearest}"):
        Interconnect(machine((node(2), 1), link_speeds=((name, 0.5),)))


def test_nonsense_is_rejected() -> None:
    wired, one_device = interconnect(machine((node(2), 2))), np.array([0])
    with pytest.raises(ValueError, match="below 4, met 0 to 4"):
        wired.routes(np.array([0, 4]), np.array([0, 0]))
    with pytest.raises(ValueError, match="below 4, met -1 to -1"):
        wired.to_host(np.array([-1]))
    with pytest.raises(ValueError, match="1 sources and 2 targets"):
        wired.routes(one_device, np.array([1, 2]))
    with pytest.raises(ValueError, match=f"below {wired.num_links}, met {wired.num_links}"):
        wired.name(wired.num_links)
    with pytest.raises(ValueError, match="factor above 0"):
        Interconnect(machine((node(2), 1), link_speeds=(("nic 0 out", 0.0),)))


def test_a_kept_interconnect_cannot_be_written() -> None:
    wired = interconnect(machine((node(2), 2)))
    with pytest.raises(ValueError, match="read-only"):
        wired.bandwidth[0] = 1.0


LARGE = {
    "crossbar": Crossbar(),
    "fat tree": FatTree(32, 16, 2.0, 2.0, hop=1e-7),
    "dragonfly": Dragonfly(8, 32, FAST, SLOW),
    "torus": Torus((32, 64, 64), FAST),
}


@pytest.mark.parametrize("name", LARGE)
def test_routes_of_131072_devices(name: str) -> None:
    wired = Interconnect(machine((node(8), 16384), fabric=LARGE[name]))
    devices = np.arange(131072)
    pair, link, share = wired.routes(devices, (devices + 1) % 131072)
    assert np.bincount(pair, weights=share, minlength=131072).min() >= 1
    starts = np.flatnonzero(np.diff(pair, prepend=-1))
    last = devices[131000]
    rows = slice(starts[last], starts[last + 1])
    assert one(wired, last, last + 1) == [(wired.name(entry), 1.0) for entry in link[rows].tolist()]


def test_many_links_are_found_as_one_is() -> None:
    """Past a few, names are looked up in a table: the number is the same, and a wrong name is told its nearest."""
    machine = Interconnect(cluster("dgx-a100-80gb", 4))
    names = [machine.name(link) for link in range(0, machine.num_links, 3)]
    assert len(names) > 20
    assert [machine.link(name) for name in names] == list(range(0, machine.num_links, 3))
    with pytest.raises(ValueError, match=r"met 'nic 999999 out'; nearest: nic \d+ out"):
        machine.link("nic 999999 out")
