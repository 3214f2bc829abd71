"""Routes over graphs that a user draws."""

from collections import defaultdict
from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.interconnect.interconnect import Interconnect, interconnect
from meshwise.simulator.machine.topology import Graph

from .machines import FAST, SLOW, graphs, machine, node, one


def wired(*ways: str) -> Interconnect:
    """Devices 0 to 2 on a graph of ``a>b`` edges."""
    ends = [way.split(">") for way in ways]
    return Interconnect(machine((node(1), 2), fabric=Graph(tuple((a, b, SLOW) for a, b in ends))))


def test_a_vertex_splits_evenly_over_its_edges_not_over_paths() -> None:
    # Beyond a are two ways by b and one by c: a sends half to each all the same.
    edges = ("device 0>a", "a>b", "a>c", "b>d", "b>e", "c>f", "d>device 1", "e>device 1", "f>device 1")
    interconnect = wired(*edges)
    shares = [1.0, 0.5, 0.5, 0.25, 0.25, 0.5, 0.25, 0.25, 0.5]
    assert one(interconnect, 0, 1) == list(zip(edges, shares, strict=True))
    assert interconnect.kind(interconnect.link("b>e")) == "edge"


def test_fewer_hops_win_over_wider_links() -> None:
    narrow = ("device 0", "device 1", SLOW)
    wide = ("device 0", "s", FAST), ("s", "device 1", FAST)
    interconnect = Interconnect(machine((node(2), 1), fabric=Graph((narrow, *wide))))
    assert one(interconnect, 0, 1) == [("device 0>device 1", 1.0)]


@settings(max_examples=200, deadline=None)
@given(
    st.integers(2, 5).flatmap(lambda n: st.tuples(st.just(n), graphs(n), st.integers(0, n - 1), st.integers(0, n - 1)))
)
def test_a_share_is_the_chance_of_a_packet_that_picks_a_next_hop_at_random(
    drawn: tuple[int, Graph, int, int],
) -> None:
    devices, fabric, source, target = drawn
    graph = nx.DiGraph([(a, b) for a, b, _ in fabric.edges])
    ends = f"device {source}", f"device {target}"
    paths = list(nx.all_shortest_paths(graph, *ends)) if source != target else []
    hops: defaultdict[str, set[str]] = defaultdict(set)
    for path in paths:
        for a, b in pairwise(path):
            hops[a].add(b)
    chance: defaultdict[str, float] = defaultdict(float)
    for path in paths:
        along = np.prod([1 / len(hops[a]) for a, _ in pairwise(path)])
        for a, b in pairwise(path):
            chance[f"{a}>{b}"] += along
    route = one(Interconnect(machine((node(1), devices), fabric=fabric)), source, target)
    assert dict(route) == pytest.approx(dict(chance))


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="no way from 1 to 0"):
        one(wired("device 0>device 1"), 1, 0)
    with pytest.raises(ValueError, match="met device 0>device 1 2 times"):
        wired("device 0>device 1", "device 0>device 1")
    with pytest.raises(ValueError, match="nearest: device 0>leaf"):
        wired("device 0>leaf", "leaf>device 1").link("device 0>leav")


def test_only_the_graph_has_links() -> None:
    names = [wired("device 0>device 1").name(0)]
    assert names == ["device 0>device 1"] and wired("device 0>device 1").num_links == 1
    assert interconnect(machine((node(1), 1), fabric=Graph((("device 0", "s", FAST),)))).num_links == 1
