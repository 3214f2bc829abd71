"""Routes on a torus, by hand."""

import networkx as nx

from meshwise.simulator.interconnect.interconnect import Interconnect, interconnect
from meshwise.simulator.machine.topology import Torus

from .machines import FAST, machine, node, one


def torus(*shape: int, wraparound: bool = True) -> Interconnect:
    fabric = Torus(shape, FAST, wraparound)
    return interconnect(machine((node(1), fabric.num_devices), fabric=fabric))


def test_axes_follow_each_other_the_short_way() -> None:
    # Device 1 is (0, 1), device 14 is (3, 2): x by -1 over the edge, then y by +1.
    assert one(torus(4, 4), 1, 14) == [("torus 1 x-", 1.0), ("torus 13 y+", 1.0)]


def test_exactly_half_way_round_goes_both_ways() -> None:
    # From (0, 0) to (2, 2) of 4 x 4: rows 1 and 3 to row 2, then columns 1 and 3.
    route = one(torus(4, 4), 0, 10)
    ways = ("0 x+", "4 x+", "0 x-", "12 x-", "8 y+", "9 y+", "8 y-", "11 y-")
    assert route == [(f"torus {way}", 0.5) for way in ways]


def test_a_grid_does_not_wrap() -> None:
    wired = torus(4, wraparound=False)
    assert one(wired, 3, 0) == [("torus 3 x-", 1.0), ("torus 2 x-", 1.0), ("torus 1 x-", 1.0)]
    assert sum(wired.kind(link).startswith("torus") for link in range(wired.num_links)) == 2 * 3


def test_two_devices_are_joined_by_one_wire_each_way() -> None:
    wired = torus(2, 3)
    assert one(wired, 0, 3) == [("torus 0 x+", 1.0)] and one(wired, 3, 0) == [("torus 3 x-", 1.0)]
    # 3 pairs on the axis of 2, 2 rings of 3 on the other, both ways.
    assert wired.num_links == 2 * 3 + 2 * 2 * 3


def test_the_graph_is_that_of_networkx() -> None:
    ours = nx.relabel_nodes(torus(3, 4).graph(), {f"device {device}": divmod(device, 4) for device in range(12)})
    theirs = nx.grid_graph((4, 3), periodic=True).to_directed()
    assert set(ours.edges) == set(theirs.edges)
