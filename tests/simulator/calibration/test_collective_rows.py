"""Rows of published collectives are data that may be wrong."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.simulator.calibration.collective_rows import Timing, read_rows
from meshwise.simulator.collective import Algorithm, Collective

ROW = {
    "source_id": "somebody",
    "collective": "all_reduce",
    "n_ranks": 8,
    "n_nodes": 1,
    "accelerator": "H100 SXM",
    "intra_node_link": "NVLink4/NVSwitch",
    "size_bytes": 1048576,
    "time_us": 25.0,
    "tool": "nccl-tests",
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*ROW, "algo"]), inner, max_size=9),
)


def test_a_row_as_published() -> None:
    [row], skipped = read_rows([json.dumps(ROW)])
    assert (row.source, row.machine, row.group) == ("somebody", "dgx-h100", tuple(range(8)))
    assert (row.collective, row.size, row.seconds) == (Collective.ALL_REDUCE, 2.0**20, pytest.approx(25e-6))
    assert (row.algorithm, row.timing, skipped) == (None, Timing.DEVICE, ())


def test_two_nodes_have_the_first_devices_of_each() -> None:
    link = "RoCE CX7, 8 x 400 Gb/s per node"
    [row], _ = read_rows([json.dumps(ROW | {"accelerator": "H200 SXM", "inter_node_link": link, "n_nodes": 2})])
    assert (row.machine, row.group) == ("gcp-a3-ultra", (0, 1, 2, 3, 8, 9, 10, 11))


def test_a_bus_bandwidth_stands_for_a_time() -> None:
    # an all-reduce of 8 GB at 480 GB/s: 2 * 7/8 * 8 / 480 s; a gather 7/8 * 8 / 480; nothing divides a send
    fields = {key: value for key, value in ROW.items() if key != "time_us"} | {"size_bytes": 8e9, "busbw_GBps": 480.0}
    for name, ranks, rounds in (("all_reduce", 8, 1.75), ("all_gather", 8, 0.875), ("p2p", 2, 1.0)):
        [row], _ = read_rows([json.dumps(fields | {"collective": name, "n_ranks": ranks, "algo": "NVLS"})])
        assert row.seconds == pytest.approx(rounds * 8 / 480)
        assert row.algorithm is Algorithm.IN_SWITCH


@pytest.mark.parametrize(
    ("tool", "clock"),
    [
        ("nccl-tests -z 1", Timing.DEVICE),
        ("torch.distributed NCCL, profiler kernel time, rank 0", Timing.PROFILER),
        ("torch.distributed, host timed with synchronize", Timing.HOST),
    ],
)
def test_clocks(tool: str, clock: Timing) -> None:
    [row], _ = read_rows([json.dumps(ROW | {"tool": tool})])
    assert row.timing is clock


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"collective": "gossip"}, "collective is one of all_reduce, .*, met 'gossip'"),
        ({"n_ranks": 9}, "a node of dgx-h100 has 8 devices, met 9"),
        ({"source_id": None}, "source_id is a text, met nothing"),
        ({"source_id": 3}, "source_id is a text, met int"),
        ({"n_ranks": 1}, "n_nodes divides n_ranks >= 2, met 1 on 1"),
        ({"n_ranks": True}, "n_ranks is a whole number from 1 to 4096, met True"),
        ({"n_nodes": 0}, "n_nodes is a whole number from 1 to 4096, met 0"),
        ({"collective": "p2p"}, "a p2p has 2 ranks, met 8"),
        ({"size_bytes": -1}, "size_bytes is a number from 1 to 1e+18, met -1"),
        ({"time_us": float("nan")}, "a number is finite, met NaN"),
        ({"time_us": float("inf")}, "a number is finite, met Infinity"),
        ({"time_us": "25"}, "time_us is a number from 0.001 to 1e+18, met 25"),
        ({"time_us": 10**400}, "a number has at most 100 characters, met 401"),
        ({"n_nodes": 2, "inter_node_link": "NVLink4/NVSwitch"}, "no machine of the catalogue: H100 SXM, NVLink4"),
        ({"accelerator": "H9000"}, "no machine of the catalogue: H9000, NVLink4/NVSwitch"),
        ({"accelerator": None}, "accelerator is a text, met nothing"),
        ({"algo": "Magic"}, "algo is NVLS or Ring, met 'Magic'"),
        ({"tool": "DeepEP"}, "measured with DeepEP"),
    ],
)
def test_a_row_that_is_not_used_says_why(change: dict[str, object], reason: str) -> None:
    rows, [skipped] = read_rows(["", json.dumps(ROW | change)])
    assert rows == ()
    assert skipped.line == 2
    assert re.search(reason, skipped.reason)


@pytest.mark.parametrize("line", ["[1]", "{", "null", "[" * 9000, "9" * 9000, '"' + "x" * 20000])
def test_a_line_that_is_no_row(line: str) -> None:
    rows, [skipped] = read_rows([line])
    assert rows == () and skipped.line == 1


@given(JSON)
def test_nothing_in_a_line_raises(value: object) -> None:
    rows, skipped = read_rows([json.dumps(value)])
    assert len(rows) + len(skipped) == 1


@given(st.sampled_from([*ROW, "algo"]), JSON)
def test_nothing_in_a_field_raises(field: str, value: object) -> None:
    rows, skipped = read_rows([json.dumps(ROW | {field: value})])
    assert len(rows) + len(skipped) == 1
    assert all(row.seconds > 0 and row.size > 0 and len(row.group) == row.ranks for row in rows)
