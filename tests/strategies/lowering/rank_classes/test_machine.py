"""A group of ranks takes for a collective what the simulator says, by the protocol that is fastest for it alone."""

import numpy as np
import pytest

from meshwise.simulator.collective import Collective
from meshwise.simulator.collectives.choose import choose, idle_time, phases
from meshwise.simulator.machine.cluster import Cluster, Node
from meshwise.simulator.machine.host import Host
from meshwise.simulator.machine.topology import Crossbar, Link, Switch
from meshwise.simulator.units import TICKS_PER_SECOND
from meshwise.strategies.lowering.rank_classes.classes import fold
from meshwise.strategies.lowering.rank_classes.machine import Communicator
from meshwise.strategies.lowering.rank_classes.placement import PlacedMesh
from meshwise.strategies.plan.mesh import DATA, PIPELINE, TENSOR, Axis, Mesh

from ...plans import NCCL
from ...problems import IDEAL

PORT, NIC = Link(1e-6, 1e9, launch=5e-6), Link(2e-6, 2.5e8, launch=5e-6)
NODE = Node(IDEAL, Host("host", 1e12), 4, Switch(PORT, reduces=True), 4, NIC)
CLUSTER = Cluster("m", ((NODE, 4),), Crossbar(), library=NCCL)
MESH = Mesh((Axis(PIPELINE, 1), Axis(DATA, 2), Axis(TENSOR, 8)))
TABLE = fold(PlacedMesh(CLUSTER, MESH, (), False))
SIZES = [1.0, 1e2, 1e3, 1e4, 1e5, 1e6]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", [TENSOR, DATA])
@pytest.mark.parametrize("collective", [Collective.ALL_REDUCE, Collective.ALL_GATHER])
def test_ticks_are_the_idle_time(kind: str, collective: Collective, size: float) -> None:
    group = TABLE.tables[kind].devices[0]
    algorithm = choose(CLUSTER, collective, group, size)
    seconds = idle_time(CLUSTER, phases(CLUSTER, collective, algorithm, np.array([group])), 0, size)
    assert Communicator(TABLE, kind, 0).ticks(collective, size) == pytest.approx(seconds * TICKS_PER_SECOND, abs=8)


@pytest.mark.parametrize(("size", "payload"), [(10.0, 0.125), (1e3, 0.5), (1e6, 1.0)])
def test_flags_are_bytes_on_links_too(size: float, payload: float) -> None:
    # two ranks on two nodes gather: half of the size over each NIC, 2 ns a byte, and what LL and LL128 write besides.
    # Simple waits 5 + 2 us, LL128 3.75 + 1 and takes 4 ns a byte, LL 2.5 + 0.5 and 16 ns:
    # LL is fastest until 1.75 us / 12 ns = 146 bytes, LL128 until 2.25 us / 2 ns = 1,125
    [leg] = Communicator(TABLE, DATA, 0).list_phases(Collective.ALL_GATHER, size)
    nics = [
        moved for link, moved in leg.flow.usage if "nic" in TABLE.network.name(int(TABLE.link_representatives[link]))
    ]
    assert nics == pytest.approx([size / 2 / payload])  # in and out are one class of links
