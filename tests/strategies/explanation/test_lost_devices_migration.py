from dataclasses import replace

import pytest

from meshwise.strategies.explanation.lost_devices import find_migration, list_holdings
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem

from ..problems import problem


def smaller(own: Problem, devices: int) -> Problem:
    return replace(own, cluster=own.cluster.with_size(1, devices))


OWN = problem(devices=4, layers=4)
ELEMENTS = sum(block.num_parameters for _, block in OWN.graph.occurrences)
PARAMETERS = ELEMENTS * OWN.training.parameter_bytes
STATES = ELEMENTS * OWN.training.optimizer_bytes


def plan(own: Problem, **layout: object) -> Plan:
    return complete(own, Layout(**layout))  # type: ignore[arg-type]


def test_what_ranks_hold() -> None:
    found = list_holdings(plan(OWN, data=2, tensor=2, zero=1))
    assert [each.parameters for each in found] == [(0.0, 0.5), (0.5, 1.0)] * 2
    assert [each.optimizer for each in found] == [(0.0, 0.25), (0.5, 0.75), (0.25, 0.5), (0.75, 1.0)]
    sharded = list_holdings(plan(OWN, data=4, zero=3))
    assert [each.parameters for each in sharded] == [(0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0)]


@pytest.mark.parametrize("layout", [{"data": 4}, {"tensor": 4}, {"data": 2, "pipeline": 2, "zero": 1}])
def test_the_same_plan_moves_nothing(layout: dict[str, int]) -> None:
    own = plan(OWN, **layout)
    found = find_migration(OWN, own, own, range(4), OWN.cluster)
    assert (found.received_bytes, found.max_received, found.lost_bytes, found.seconds) == (0, 0, 0, 0)


def test_replicas_that_go_move_nothing() -> None:
    after = smaller(OWN, 2)
    found = find_migration(OWN, plan(OWN, data=4), plan(after, data=2), range(2), after.cluster)
    assert (found.received_bytes, found.lost_bytes) == (0, 0)


def test_from_two_halves_to_whole_replicas_every_device_receives_the_other_half() -> None:
    found = find_migration(OWN, plan(OWN, data=2, tensor=2), plan(OWN, data=4), range(4), OWN.cluster)
    half = (PARAMETERS + STATES) / 2
    assert found.max_received == pytest.approx(half)
    assert found.received_bytes == pytest.approx(4 * half)
    assert found.seconds == pytest.approx(half / 1e9)  # links of 1e9 byte/s
    assert found.lost_bytes == 0


def test_shares_of_optimizer_states_go_with_their_devices() -> None:
    # 4 shares on 4 devices; 2 devices are left with 2 shares, and need half of the states each
    after = smaller(OWN, 2)
    found = find_migration(OWN, plan(OWN, data=4, zero=1), plan(after, data=2, zero=1), range(2), after.cluster)
    assert found.lost_bytes == pytest.approx(STATES / 2)
    # rank 0 has the first quarter and needs the first half; rank 1 has the second quarter, needs the second half
    assert found.received_bytes == pytest.approx(STATES / 4 + STATES / 2)
    assert found.max_received == pytest.approx(STATES / 2)


def test_stages_move_as_a_whole() -> None:
    # 4 ranks of one layer each to 2 ranks of two: rank 0 has the first layer, rank 1 the second of two it need not have
    after = smaller(OWN, 2)
    before, then = plan(OWN, pipeline=4), plan(after, pipeline=2)
    each = {name: block.num_parameters for name, block in OWN.graph.occurrences}
    have = [set(stage.blocks) for stage in before.stages]
    need = [set(stage.blocks) for stage in then.stages]
    width = OWN.training.parameter_bytes + OWN.training.optimizer_bytes
    missing = [sum(each[name] for name in need[rank] - have[rank]) * width for rank in range(2)]
    found = find_migration(OWN, before, then, range(2), after.cluster)
    assert found.received_bytes == pytest.approx(sum(missing))
    assert found.lost_bytes == pytest.approx(sum(each[name] for name in have[2] | have[3]) * width)


def test_new_devices_receive_all_and_nodes_share_their_nics() -> None:
    two = problem(nodes=2, devices=2, nics=1, layers=4)
    one = replace(two, cluster=two.cluster.with_size(1))
    found = find_migration(two, plan(one, data=2), plan(two, data=4), (0, 1, -1, -1), two.cluster)
    assert found.received_bytes == pytest.approx(2 * (PARAMETERS + STATES))
    assert found.seconds == pytest.approx(2 * (PARAMETERS + STATES) / 2.5e8)  # one NIC of 2.5e8 byte/s a node
