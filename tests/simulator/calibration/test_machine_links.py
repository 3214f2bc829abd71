"""Collectives on any cluster: their times, and links that are found again from times they made."""

from dataclasses import replace

import pytest

from meshwise.simulator.calibration.machine_links import (
    TimedMessage,
    fit_machine_links,
    place_ranks,
    predict_message,
)
from meshwise.simulator.catalog import cluster
from meshwise.simulator.collective import Algorithm, Collective
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.machine.topology import Link

SIZES = [2.0**exponent for exponent in range(10, 34, 2)]


def with_links(machine: Cluster, inside: Link, between: Link) -> Cluster:
    ((node, count),) = machine.nodes
    node = replace(node, network=replace(node.network, link=inside), nic=between)
    return replace(machine, nodes=((node, count),))


def measure(machine: Cluster, ranks: int, nodes: int, collective: Collective) -> list[TimedMessage]:
    group = place_ranks(machine, ranks, nodes)
    return [
        TimedMessage(collective, ranks, nodes, size, predict_message(machine, collective, group, size))
        for size in SIZES
    ]


def test_the_links_that_made_the_times_are_found() -> None:
    prior = cluster("dgx-a100-80gb", 2)
    true = with_links(prior, Link(4e-6, 200e9, 40e-6), Link(60e-6, 15e9, 60e-6))
    messages = [
        *measure(true, 8, 1, Collective.ALL_REDUCE),
        *measure(true, 8, 1, Collective.ALL_TO_ALL),
        *measure(true, 16, 2, Collective.ALL_REDUCE),
        *measure(true, 16, 2, Collective.ALL_GATHER),
    ]
    fit = fit_machine_links(messages, prior)
    assert (fit.inside, fit.between) == (24, 24)
    node = fit.machine.first_node
    assert node.network.link.bandwidth == pytest.approx(200e9, rel=0.03)
    assert node.nic.bandwidth == pytest.approx(15e9, rel=0.05)
    assert fit.error < 0.03 < fit.prior_error


def test_links_without_messages_keep_their_figures() -> None:
    prior = cluster("dgx-h100", 2)
    fit = fit_machine_links(measure(prior, 8, 1, Collective.ALL_REDUCE), prior)
    assert fit.machine.first_node.nic == prior.first_node.nic
    assert fit.error == pytest.approx(0.0, abs=0.01)


def test_a_ring_of_large_messages_takes_size_over_bandwidth() -> None:
    # 4 nodes of 8 ranks: 2 * 31/32 of 8 GB over 8 NICs of 42 GB/s, and 62 steps of some us
    machine = cluster("dgx-h100", 4)
    seconds = predict_message(machine, Collective.ALL_REDUCE, tuple(range(32)), 8e9, Algorithm.RING)
    assert seconds == pytest.approx(2 * 31 / 32 * 8e9 / (8 * 42e9), rel=0.02)


def test_an_algorithm_that_a_group_cannot_run_counts_as_not_stated() -> None:
    machine = cluster("dgx-a100-80gb", 1)
    group = tuple(range(8))
    stated = predict_message(machine, Collective.ALL_REDUCE, group, 1e6, Algorithm.IN_SWITCH)
    assert stated == predict_message(machine, Collective.ALL_REDUCE, group, 1e6)


def test_two_racks_reduce_twice_as_fast_as_twenty() -> None:
    # coreweave/nccl-tests: 810 GB/s of bus bandwidth over 2 racks of 72, 406 GB/s over 20
    def bus_bandwidth(racks: int) -> float:
        ranks, size = 72 * racks, 2.0**34
        machine = cluster("gb200-nvl72", racks)
        seconds = predict_message(machine, Collective.ALL_REDUCE, tuple(range(ranks)), size)
        return 2 * (ranks - 1) / ranks * size / seconds * 1e-9

    assert bus_bandwidth(2) == pytest.approx(810, rel=0.05)
    assert bus_bandwidth(20) == pytest.approx(406, rel=0.05)


@pytest.mark.parametrize(("ranks", "nodes"), [(3, 2), (1, 1), (16, 1), (64, 8)])
def test_ranks_that_a_machine_cannot_place(ranks: int, nodes: int) -> None:
    with pytest.raises(ValueError, match=r"nodes"):
        place_ranks(cluster("dgx-h100", 2), ranks, nodes)


def test_machines_and_messages_that_cannot_be_fitted() -> None:
    with pytest.raises(ValueError, match="has measured messages, met none"):
        fit_machine_links([], cluster("dgx-h100", 2))
    with pytest.raises(ValueError, match="met tpu-v4, which has others"):
        fit_machine_links([], cluster("tpu-v4", 2))
