"""Sizes of networks that cannot be built are refused."""

from collections.abc import Callable

import pytest

from meshwise.simulator.machine.topology import Dragonfly, FatTree, Graph, LeafSpine, Link, Mesh, PcieTree, Torus

LINK = Link(1e-6, 1e9)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Mesh(LINK, ((0, 0, 1),)), "mesh pairs join two different devices by at least one link"),
        (lambda: Mesh(LINK, ((0, 1, 0),)), "mesh pairs join two different devices by at least one link"),
        (lambda: Mesh(LINK, ((-1, 1, 1),)), "mesh pairs join two different devices by at least one link"),
        (lambda: PcieTree(LINK, 0, 1, LINK), "devices_per_switch and switches_per_socket are at least 1"),
        (lambda: LeafSpine(0), "nodes_per_leaf >= 1, oversubscription > 0 and hop >= 0"),
        (lambda: LeafSpine(1, 0.0), "nodes_per_leaf >= 1, oversubscription > 0 and hop >= 0"),
        (lambda: LeafSpine(1, hop=-1e-9), "nodes_per_leaf >= 1, oversubscription > 0 and hop >= 0"),
        (lambda: FatTree(1, 0), "nodes_per_leaf and leaves_per_pod are at least 1"),
        (lambda: FatTree(1, 1, hop=-1e-9), "nodes_per_leaf and leaves_per_pod are at least 1"),
        (lambda: FatTree(1, 1, 0.0), "oversubscription is positive"),
        (lambda: FatTree(1, 1, 1.0, 0.0), "oversubscription is positive"),
        (lambda: Dragonfly(1, 0, LINK, LINK), "nodes_per_router and routers_per_group are at least 1"),
        (lambda: Torus((), LINK), r"a torus has 1 to 3 axes of at least 1, met \(\)"),
        (lambda: Torus((2, 2, 2, 2), LINK), r"a torus has 1 to 3 axes of at least 1, met \(2, 2, 2, 2\)"),
        (lambda: Torus((2, 0), LINK), r"a torus has 1 to 3 axes of at least 1, met \(2, 0\)"),
        (lambda: Graph(()), "a graph has edges between different vertices"),
        (lambda: Graph((("hub", "hub", LINK),)), "a graph has edges between different vertices"),
    ],
)
def test_what_cannot_be_built_is_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_the_least_that_can_be_built() -> None:
    assert (Torus((1,), LINK).num_devices, Torus((2, 3, 4), LINK).num_devices) == (1, 24)
    for least in (LeafSpine(1, 1e-9), FatTree(1, 1, 1e-9, 1e-9), Dragonfly(1, 1, LINK, LINK), Mesh(LINK, ((0, 1, 1),))):
        assert least
