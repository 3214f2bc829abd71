"""Rows and texts of collectives on machines that no list has."""

import json

import pytest

from meshwise.scenarios.collectives.rows import parse_messages
from meshwise.simulator.collective import Algorithm, Collective

ROW = {
    "source_id": "someone",
    "collective": "all_reduce",
    "n_ranks": 16,
    "n_nodes": 2,
    "accelerator": "H100 SXM",
    "inter_node_link": "8 x 400 Gb/s InfiniBand",
    "size_bytes": 2**30,
    "time_us": 6000.0,
    "tool": "nccl-tests",
}


def parse(**fields: object) -> tuple[object, ...]:
    messages, skipped = parse_messages(json.dumps(ROW | fields), "file")
    return (*messages, *skipped)


def test_a_row_has_the_machine_that_it_tells() -> None:
    (message,) = parse()
    assert (message.ranks, message.nodes, message.collective) == (16, 2, Collective.ALL_REDUCE)
    assert message.machine.num_devices == 16 and message.machine.first_node.devices == 8
    assert message.seconds == pytest.approx(6e-3) and message.known and message.fabric_stated


@pytest.mark.parametrize("name", ["MI300X", "RTX 4090", "A800", "V100", "Ascend 910B", "H20", "L40S", "Gaudi2"])
def test_any_accelerator_of_the_table_is_read(name: str) -> None:
    (message,) = parse(accelerator=name, n_nodes=1, n_ranks=8)
    assert message.known and message.machine.num_devices == 8


def test_an_accelerator_that_is_not_known_is_told_with_the_nearest() -> None:
    (message,) = parse(accelerator="A100-SXM5", n_nodes=1, n_ranks=8)
    assert message.known
    (message,) = parse(accelerator="Gaudi2X", n_nodes=1, n_ranks=8)
    assert not message.known and "Gaudi" in message.machine.accelerator.name
    assert any("taken as gaudi" in line for line in message.assumptions)


def test_an_operation_that_is_not_known_is_told_with_the_nearest() -> None:
    (message,) = parse(collective="all_redux")
    assert message.name == "all_reduce" and not message.known
    assert "collective 'all_redux' taken as all_reduce, the nearest known" in message.assumptions
    (known,) = parse(collective="AllGather")
    assert known.name == "all_gather" and known.known


def test_times_follow_from_bandwidths() -> None:
    # bus bandwidth of an all-reduce of 16: 2 * 15/16 of the size over the time
    (by_bus,) = parse(time_us=None, busbw_GBps=100.0)
    assert by_bus.seconds == pytest.approx(1.875 * 2**30 / 100e9)
    (by_algorithm,) = parse(time_us=None, algbw_GBps=100.0)
    assert by_algorithm.seconds == pytest.approx(2**30 / 100e9)


def test_algorithms() -> None:
    assert parse(algo="NVLSTree")[0].algorithm is Algorithm.IN_SWITCH
    assert parse(algo="Ring")[0].algorithm is Algorithm.RING
    (message,) = parse(algo="PAT")
    assert message.algorithm is None and any("'pat' not known" in line for line in message.assumptions)


def test_a_hosts_clock_reads_more() -> None:
    assert parse(tool="torch.distributed, host timed")[0].overhead > 0 == parse()[0].overhead


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n_ranks": 15}, "n_nodes divides n_ranks >= 2, met 15 on 2"),
        ({"n_ranks": 10**9}, "n_ranks is a whole number of at most 16384"),
        ({"n_ranks": "many"}, "n_ranks is a number above 0, met"),
        ({"size_bytes": None}, "size_bytes is a number above 0, met none"),
        ({"time_us": -1}, "time_us is a number above 0, met -1"),
        ({"time_us": None}, "and neither algbw_GBps nor busbw_GBps"),
        ({"collective": "zzz"}, "collective is one of all_reduce, all_gather"),
        ({"tool": "DeepEP"}, "not a collective of a communication library"),
    ],
)
def test_rows_that_are_skipped(fields: dict[str, object], reason: str) -> None:
    ((line, met),) = parse(**fields)
    assert line == 1 and reason in met


@pytest.mark.parametrize("line", ["[]", "{", '{"collective": "all_reduce"', "{" * 5000, '{"a":' + "1" * 20_000 + "}"])
def test_lines_that_are_no_rows(line: str) -> None:
    messages, skipped = parse_messages("{}\n" + line, "file")
    assert not messages and len(skipped) == 2
