"""Links inside nodes, and the routes between devices of one node."""

from collections.abc import Iterator
from typing import Protocol

from simulator.interconnect.host_wiring import HostWiring
from simulator.interconnect.kinds import Mesh, PcieTree, Ring, Switch
from simulator.interconnect.links import Edge, Links
from simulator.interconnect.mesh import FullMeshWiring, MeshWiring
from simulator.interconnect.numbering import Numbering
from simulator.interconnect.pcie_tree import PcieTreeWiring
from simulator.interconnect.ring import RingWiring
from simulator.interconnect.routes import IntArray, Routes
from simulator.interconnect.switch import SwitchWiring


class NodeWiring(Protocol):
    """The links inside all nodes of one kind."""

    def routes(self, source: IntArray, target: IntArray) -> Routes:
        """Return the routes between different devices; the two of each pair are in one node of the kind."""

    def edges(self) -> Iterator[Edge]:
        """Yield the explicit edges."""


def node_wiring(links: Links, numbering: Numbering, host: HostWiring, kind: int) -> NodeWiring:
    """Return the links inside the nodes of a kind, added to ``links``."""
    match numbering.kinds[kind].network:
        case Switch(link=link):
            return SwitchWiring(links, numbering, kind, link)
        case Mesh(link=link, pairs=()):
            return FullMeshWiring(links, numbering, kind, link)
        case Mesh() as mesh:
            return MeshWiring(links, numbering, kind, mesh)
        case Ring(link=link):
            return RingWiring(links, numbering, kind, link)
        case PcieTree() as tree:
            return PcieTreeWiring(links, numbering, kind, tree, host)
