"""Kernels, messages and copies of a GPU become spans of the passes that launched them.

The fixture has the fields of Kineto's Chrome traces, with instants that a hand can follow, in us: the host launches a
forward from 10 to 30, a backward from 45 to 70, an optimizer from 90 to 95; the GPU runs them from 40 to 350.
"""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from meshwise.executor.recording.gpu_trace import build_rows, parse_events
from meshwise.executor.recording.recorder import Record
from meshwise.executor.recording.trace import HOST, Row, TraceEvent
from meshwise.simulator.program import StreamKind, TaskKind

FIXTURE = Path(__file__).parent / "fixtures" / "gpu_trace.json"
RECORDS = [
    Record(TaskKind.FORWARD, 0, 0, "", 10_000, 30_000),
    Record(TaskKind.HOST_COPY, 0, 0, "activations of layers.0 to host", 31_000, 35_000),
    Record(TaskKind.BACKWARD, 0, 0, "", 45_000, 70_000),
    Record(TaskKind.HOST_COPY, 0, 0, "activations of layers.0 from host", 46_000, 49_000),
    Record(TaskKind.OPTIMIZER, -1, -1, "", 90_000, 95_000),
    Record(TaskKind.HOST_COPY, -1, -1, "optimizer on host", 96_000, 99_000),
]


@pytest.fixture(scope="module")
def found() -> list[Row]:
    return build_rows(RECORDS, parse_events(json.loads(FIXTURE.read_text())))


def of(found: list[Row], kind: TaskKind) -> list[tuple[Any, ...]]:
    return [(row.start // 1000, row.end // 1000) for row in found if row.kind is kind]


def test_a_pass_lasts_from_its_first_kernel_to_its_last_without_the_message_that_it_waits_for(
    found: list[Row],
) -> None:
    # kernels run 40-80 and 110-140; between them the tensor all-reduce, 80-110, runs alone
    assert of(found, TaskKind.FORWARD) == [(40, 80), (110, 140)]


def test_a_message_of_tensor_parallelism_is_of_the_pass_that_launched_it(found: list[Row]) -> None:
    (row,) = (row for row in found if row.kind is TaskKind.TENSOR_COMMUNICATION)
    # 1,024 elements of fp32
    assert row == Row(StreamKind.TENSOR, row.kind, 0, 0, "all_reduce", 80_000, 110_000, 4096)


def test_gradients_move_beside_the_backward_that_is_not_cut_by_them(found: list[Row]) -> None:
    (row,) = (row for row in found if row.kind is TaskKind.DATA_COMMUNICATION)
    assert (row.operators, row.start, row.end, row.bytes) == ("all_reduce gradients", 250_000, 290_000, 2 * 2048)
    # kernels 200-260 and 262-280: a pause of 2 us is a launch, though a message is under way
    assert of(found, TaskKind.BACKWARD) == [(200, 280)]


def test_copies_are_as_long_as_the_gpu_copied_and_the_hosts_work_as_long_as_the_host_was_busy(
    found: list[Row],
) -> None:
    copies = {row.operators: row for row in found if row.kind is TaskKind.HOST_COPY}
    spans = {name: (row.stream, row.start // 1000, row.end // 1000, row.bytes) for name, row in copies.items()}
    assert spans == {
        "activations of layers.0 to host": (StreamKind.TO_HOST, 140, 150, 4096),
        "activations of layers.0 from host": (StreamKind.FROM_HOST, 160, 200, 4096),
        "parameters of layers.0 from host": (StreamKind.FROM_HOST, 310, 318, 8192),
        "optimizer on host": (StreamKind.HOST, 96, 99, 0),
    }


def test_a_transfer_is_of_the_stage_that_sends(found: list[Row]) -> None:
    (row,) = (row for row in found if row.kind is TaskKind.PIPELINE_COMMUNICATION)
    where = row.stream, row.stage, row.microbatch, row.start, row.end, row.bytes
    assert where == (StreamKind.SEND_FORWARD, 0, 1, 300_000, 310_000, 1024)


def test_the_optimizer_is_its_kernels(found: list[Row]) -> None:
    assert of(found, TaskKind.OPTIMIZER) == [(320, 350)]


def test_a_pass_waits_where_a_message_is_under_way_and_no_kernel_runs() -> None:
    records = [Record(TaskKind.BACKWARD, 0, 0, "", 0, 100)]
    run = [
        TraceEvent("gemm", 1_000_000, 2_000_000, 0, 7, 10),
        TraceEvent("message all_gather", 1_500_000, 3_000_000, 8, 20, 20),
        TraceEvent("gemm", 3_100_000, 4_000_000, 0, 7, 30),
    ]
    backward = [(row.start, row.end) for row in build_rows(records, run) if row.kind is TaskKind.BACKWARD]
    # 2,000 to 3,000 us is the message alone; the 100 us after it are the pass's own
    assert backward == [(1_000_000, 2_000_000), (3_000_000, 4_000_000)]


def test_what_is_computed_again_is_apart_from_the_backward_that_it_interrupts() -> None:
    records = [Record(TaskKind.BACKWARD, 0, 0, "", 0, 100), Record(TaskKind.RECOMPUTE, 0, 0, "", 20, 40)]
    run = [TraceEvent("k", 1000 * n, 1000 * n + 900, 0, 7, at) for n, at in enumerate((10, 30, 35, 50), start=1)]
    spans = [(row.kind, row.start, row.end) for row in build_rows(records, run)]
    assert spans == [
        (TaskKind.BACKWARD, 1000, 1900),
        (TaskKind.RECOMPUTE, 2000, 3900),
        (TaskKind.BACKWARD, 4000, 4900),
    ]


def test_events_of_the_host_that_name_nothing_are_left_out() -> None:
    found = parse_events(json.loads(FIXTURE.read_text()))
    assert {event.name for event in found if event.stream == HOST} == {
        "_c10d_functional::all_reduce",
        "_c10d_functional::wait_tensor",
        "FSDP::all_gather (layers.0)",
        "PP:0SEND_F1",
        "meshwise mark 0",
    }
    assert [event.start for event in found] == sorted(event.start for event in found)


def test_kernels_that_no_pass_launched_and_passes_without_kernels_are_told_apart() -> None:
    records = [Record(TaskKind.OPTIMIZER, -1, -1, "", 100, 200)]
    assert build_rows(records, [TraceEvent("fill", 500, 600, 0, 7, 50)]) == [
        Row(StreamKind.COMPUTE, TaskKind.OPTIMIZER, -1, -1, "", 100, 200)
    ]
