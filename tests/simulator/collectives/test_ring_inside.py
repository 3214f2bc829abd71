"""Rings through devices that are wired to each other keep all their wires busy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.simulator.collective import Algorithm, Collective
from meshwise.simulator.collectives.choose import phases
from meshwise.simulator.collectives.placement import place_groups
from meshwise.simulator.collectives.ring import node_rings
from meshwise.simulator.machine.topology import Mesh, NodeNetwork, PcieTree, Ring, Switch

from .machines import MANY, PORT, loads, machine

DGX1 = (
    (0, 1, 1), (0, 2, 1), (0, 3, 2), (0, 4, 2), (1, 2, 2), (1, 3, 1), (1, 5, 2), (2, 3, 2),
    (2, 6, 1), (3, 7, 1), (4, 5, 1), (4, 6, 1), (4, 7, 2), (5, 6, 2), (5, 7, 1), (6, 7, 2),
)  # fmt: skip
"""NVLinks of DGX-1 with V100: 6 for each GPU (NVIDIA DGX-1 white paper WP-08437, figure 4)."""
NETWORKS: tuple[NodeNetwork, ...] = (
    Switch(PORT), Mesh(PORT), Mesh(PORT, DGX1), Ring(PORT), PcieTree(PORT, 2, 2, PORT),
)  # fmt: skip


def gather(network: NodeNetwork, group: list[int], size: float) -> dict[str, float]:
    cluster = machine(1, 8, network=network)
    return loads(cluster, Collective.ALL_GATHER, Algorithm.RING, group, size)[0]


def test_a_full_mesh_uses_every_wire() -> None:
    # 3/4 * 32 = 24 bytes leave every rank over 3 wires
    assert list(gather(Mesh(PORT), [0, 1, 2, 3], 32.0).values()) == pytest.approx([8.0] * 12)


def test_a_ring_runs_both_ways() -> None:
    # 7/8 * 64 = 56 bytes leave every rank over 2 wires
    assert list(gather(Ring(PORT), [*range(8)], 64.0).values()) == [28.0] * 16


def test_six_rings_fit_into_a_dgx_1() -> None:
    # 7/8 * 48 = 42 bytes leave every rank over 6 links of 8 byte/s: 42 / 48 s on every one
    cluster = machine(1, 8, network=Mesh(PORT, DGX1))
    [phase] = phases(cluster, Collective.ALL_GATHER, Algorithm.RING, np.arange(8)[None, :])
    assert phase.load.sum() * 48 == pytest.approx(8 * 42)
    bytes_over = loads(cluster, Collective.ALL_GATHER, Algorithm.RING, [*range(8)], 48.0)[0]
    for a, b, links in DGX1:
        assert bytes_over[f"node 0 link {a}>{b}"] == pytest.approx(links * 7.0)
        assert bytes_over[f"node 0 link {b}>{a}"] == pytest.approx(links * 7.0)


def test_ranks_without_wires_send_through_others() -> None:
    # 1 and 4 have no wire: the shortest ways lead over two
    assert sum(gather(Mesh(PORT, DGX1), [1, 4], 2.0).values()) == pytest.approx(2 * 2 * 1.0)


@given(st.sampled_from(NETWORKS), st.lists(st.integers(0, 31), min_size=2, max_size=16, unique=True))
@MANY
def test_every_rank_sends_and_receives_one_byte(network: NodeNetwork, group: list[int]) -> None:
    """Open where the group goes on to other nodes: of ``k`` edges one is missing, ``(k - 1) / k`` of a byte."""
    cluster = machine(4, 8, network=network)
    placement = place_groups(cluster, np.array([group]))
    on_node = {device: sum(other // 8 == device // 8 for other in group) for device in group}
    for through in (False, True):
        edges = node_rings(cluster, placement, is_open=through)
        open_ring = through and len({device // 8 for device in group}) > 1
        for device in group:
            expected = float(on_node[device] > 1) - (open_ring and on_node[device] > 1) / on_node[device]
            assert edges.weight[edges.source == device].sum() == pytest.approx(expected)
            assert edges.weight[edges.target == device].sum() == pytest.approx(expected)
        assert np.array_equal(edges.source // 8, edges.target // 8)
