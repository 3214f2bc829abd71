"""Messages between pairs: send, all-to-all and the central server."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.simulator.collective import Algorithm, Collective
from meshwise.simulator.collectives import point_to_point
from meshwise.simulator.collectives.choose import phases
from meshwise.simulator.interconnect.interconnect import interconnect
from meshwise.simulator.machine.topology import LeafSpine

from .machines import MANY, latencies, loads, machine, time

EXCHANGE = Collective.ALL_TO_ALL, Algorithm.PAIRWISE
SERVER = Collective.ALL_REDUCE, Algorithm.PARAMETER_SERVER


@pytest.mark.parametrize(("pair", "seconds"), [([0, 1], 0.25 + 16 / 8), ([0, 4], 0.5 + 16 / 2)])
def test_send(pair: list[int], seconds: float) -> None:
    assert time(machine(), Collective.SEND, Algorithm.DIRECT, pair, 16.0) == seconds


def test_a_shift_goes_from_every_rank_to_the_next_and_from_the_last_to_the_first() -> None:
    # 0 to 1 inside the node, 1 to 4 and 4 to 0 over NICs, 8 bytes each
    [bytes_over] = loads(machine(), Collective.SHIFT, Algorithm.DIRECT, [0, 1, 4], 8.0)
    nics = {name for name in bytes_over if "nic" in name}
    assert nics == {"nic 1 out", "nic 4 in", "nic 4 out", "nic 0 in"}
    assert set(bytes_over.values()) == {8.0}


def test_a_send_has_two_ranks() -> None:
    with pytest.raises(ValueError, match="a send has 2 ranks, met 3"):
        phases(machine(), Collective.SEND, Algorithm.DIRECT, np.array([[0, 1, 2]]))


def test_all_to_all_over_two_nodes() -> None:
    # 4 ranks, 16 bytes: 4 bytes to each other rank, 1 of them inside and 2 over the NIC;
    # all under way together: the longest latency, that of the NIC
    [bytes_over] = loads(machine(), *EXCHANGE, [0, 1, 4, 5], 16.0)
    assert {load for name, load in bytes_over.items() if "device" in name} == {4.0}
    assert {load for name, load in bytes_over.items() if "nic" in name} == {8.0}
    assert latencies(machine(), *EXCHANGE, [0, 1, 4, 5]) == [0.5]


@given(st.lists(st.integers(0, 31), min_size=2, max_size=16, unique=True))
@MANY
def test_all_to_all_is_every_pair(group: list[int]) -> None:
    """Against one route after the other."""
    cluster = machine(8, 4, fabric=LeafSpine(2, oversubscription=2.0))
    pairs = np.array([(a, b) for a in group for b in group if a != b])
    routes = interconnect(cluster).routes(pairs[:, 0], pairs[:, 1])
    expected = np.bincount(routes.link, routes.share / len(group), interconnect(cluster).num_links)
    [phase] = phases(cluster, *EXCHANGE, np.array([group]))
    by_link = np.zeros_like(expected)
    by_link[phase.link] = phase.load
    assert by_link == pytest.approx(expected)


def test_an_even_choice_of_steps_stands_for_all_in_huge_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is a permutation, so that ports and NICs of single ranks stay exact; the spine nearly."""
    cluster = machine(64, 1, fabric=LeafSpine(8))
    groups = np.arange(64)[None, :]
    [exact] = phases(cluster, *EXCHANGE, groups)
    monkeypatch.setattr(point_to_point, "_MOST", 64 * 21)
    [chosen] = phases(cluster, *EXCHANGE, groups)
    assert chosen.link.tolist() == exact.link.tolist()
    assert chosen.load == pytest.approx(exact.load, rel=0.05)
    nics = [interconnect(cluster).kind(link).startswith("nic") for link in exact.link.tolist()]
    assert chosen.load[nics] == pytest.approx(exact.load[nics])


@pytest.mark.parametrize(
    ("ranks", "most", "count", "second"),
    [
        (64, 64 * 63, 63, 2),  # all of them: 1, 2, 3, ...
        (64, 64 * 21, 21, 4),  # every third: 1, 4, 7, ..., 61
        (64, 1, 1, None),  # one at least
        (8192, 1 << 24, 2048, 4),  # 2**24 messages, as the module has it; 8191 / 2048 = 3.9995, so that 1, 4, 8, ...
    ],
)
def test_steps_are_looked_at_up_to_a_number_of_messages(
    ranks: int, most: int, count: int, second: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[list[int]] = []

    def noted(_groups: object, steps: np.ndarray) -> list[object]:
        looked_at.append(steps.tolist())
        raise InterruptedError  # what comes then does not matter here

    if ranks == 64:
        monkeypatch.setattr(point_to_point, "_MOST", most)
    monkeypatch.setattr(point_to_point, "_exchange", noted)
    with pytest.raises(InterruptedError):
        phases(machine(ranks, 1), *EXCHANGE, np.arange(ranks)[None, :])
    [steps] = looked_at
    assert (len(steps), steps[0], steps[1] if second else None) == (count, 1, second)
    assert len(set(steps)) == count and max(steps) < ranks


def test_a_chosen_step_stands_for_as_many_as_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # 64 bytes: 63 of them leave every port, whether 63 or 21 messages or one carry them
    for most in (64 * 63, 64 * 21, 1):
        monkeypatch.setattr(point_to_point, "_MOST", most)
        [bytes_over] = loads(machine(64, 1), *EXCHANGE, [*range(64)], 64.0)
        assert [*bytes_over.values()] == pytest.approx([63.0] * len(bytes_over))


def test_the_server_is_the_first_rank() -> None:
    # 3 workers send 8 bytes to rank 5 and get 8 back: 16 over its NIC, the longest latency is 0.5 s each way
    there, back = loads(machine(), *SERVER, [5, 0, 4, 12], 8.0)
    assert (there["nic 5 in"], there["nic 0 out"], there["device 5 in"]) == (16.0, 8.0, 8.0)
    assert (back["nic 5 out"], back["nic 0 in"], back["device 5 out"]) == (16.0, 8.0, 8.0)
    assert time(machine(), *SERVER, [5, 0, 4, 12], 8.0) == 2 * (0.5 + 16 / 2)
