"""Collectives in levels: inside nodes and between equal ranks, and what a group cannot run."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.simulator.collective import Algorithm, Collective
from meshwise.simulator.collectives.choose import phases
from meshwise.simulator.machine.topology import Link, Mesh, Switch

from .machines import MANY, PORT, ends, latencies, loads, machine, time

REDUCE, GATHER, SCATTER = Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER


LEVELS, SWITCHED = Algorithm.HIERARCHICAL, Algorithm.IN_SWITCH


def test_two_nodes_of_two_ranks_in_levels() -> None:
    # 16 bytes: inside 1/2 * 16 = 8 in 1 step, between 2 * 1/2 * 16/2 = 8 over every NIC in 2 steps, inside again
    group = [0, 1, 4, 5]
    inside, between = ends(group, "device", 8.0, 8.0), ends(group, "nic", 8.0, 8.0)
    assert loads(machine(), REDUCE, LEVELS, group, 16.0) == [inside, between, inside]
    assert latencies(machine(), REDUCE, LEVELS, group) == [0.25, 1.0, 0.25]
    assert time(machine(), REDUCE, LEVELS, group, 16.0) == 0.25 + 1.0 + 1.0 + 4.0 + 0.25 + 1.0


@pytest.mark.parametrize("group", [[0, 1, 4, 5], [*range(12)], [0, 2, 4, 6, 8, 10]])
def test_an_all_reduce_in_levels_is_both_halves(group: list[int]) -> None:
    cluster = machine(network=Switch(Link(0.25, 8.0, launch=1.0)))
    half = loads(cluster, SCATTER, LEVELS, group, 12.0)
    assert loads(cluster, GATHER, LEVELS, group, 12.0) == half[::-1]
    [inside, between, again] = loads(cluster, REDUCE, LEVELS, group, 12.0)
    assert inside == again == half[0]
    assert between == pytest.approx({name: 2 * load for name, load in half[1].items()})


@given(st.integers(2, 4), st.integers(2, 4), st.sampled_from([REDUCE, GATHER, SCATTER]))
@MANY
def test_levels_move_no_more_over_nics_than_they_must(nodes: int, ranks: int, collective: Collective) -> None:
    """Each of ``m`` nodes takes in ``(m - 1) / m`` of the size for a gather, and twice that for an all-reduce."""
    group = [4 * node + rank for node in range(nodes) for rank in range(ranks)]
    total: dict[str, float] = {}
    for part in loads(machine(), collective, LEVELS, group, 24.0):
        for name, load in part.items():
            total[name] = total.get(name, 0.0) + load
    needed = (2 if collective is REDUCE else 1) * (nodes - 1) / nodes * 24.0
    assert sum(total[f"nic {rank} in"] for rank in range(ranks)) == pytest.approx(needed)


@pytest.mark.parametrize(
    ("algorithm", "group", "known"),
    [
        (LEVELS, [0, 1, 2], "ring, parameter_server"),
        (LEVELS, [0, 1, 4], "ring, tree, parameter_server"),
        (SWITCHED, [0, 1, 4, 5], "ring, tree, hierarchical, parameter_server"),
        (Algorithm.PAIRWISE, [0, 1], "ring, parameter_server"),
        (Algorithm.MEASURED, [0, 1], "ring, parameter_server"),
    ],
)
def test_a_group_refuses_what_it_cannot_run(algorithm: Algorithm, group: list[int], known: str) -> None:
    for network in (Switch(PORT), Mesh(PORT)):
        with pytest.raises(ValueError, match=f"all_reduce by {known}, met {algorithm}"):
            phases(machine(network=network), REDUCE, algorithm, np.array([group]))
