"""Records and profiler events become spans that add up."""

from executor.recorder import Record
from executor.trace import Row, TraceEvent, memory, rows
from simulator.program import StreamKind, TaskKind

FORWARD, BACKWARD, RECOMPUTE = TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.RECOMPUTE
COMPUTE = StreamKind.COMPUTE


def test_a_pass_is_cut_by_the_collective_it_waits_for() -> None:
    records = [Record(FORWARD, 0, 3, "", 100, 200)]
    events = [
        TraceEvent("_c10d_functional::all_reduce", 120, 122, 0),
        TraceEvent("gloo:all_reduce", 125, 138, 0),  # on gloo's thread, after the launch returned
        TraceEvent("_c10d_functional::wait_tensor", 123, 140, 0),
    ]
    assert rows(records, events) == [
        Row(COMPUTE, FORWARD, 0, 3, "", 100, 120),
        Row(StreamKind.TENSOR, TaskKind.TENSOR_COMMUNICATION, 0, 3, "all_reduce", 120, 140),
        Row(COMPUTE, FORWARD, 0, 3, "", 140, 200),
    ]


def test_a_tensor_collective_is_taken_once_and_gradients_beside_it_are_not() -> None:
    records = [Record(BACKWARD, 0, 0, "", 100, 200)]
    events = [
        TraceEvent("_c10d_functional::all_reduce", 120, 122, 0),
        TraceEvent("gloo:all_reduce", 121, 139, 0),
        TraceEvent("_c10d_functional::_wrap_tensor_autograd", 123, 124, 0),
        TraceEvent("_c10d_functional::wait_tensor", 125, 140, 0),
        TraceEvent("gloo:all_reduce", 130, 260, 0),  # a bucket of gradients, while that one waits
    ]
    found = [(row.kind, row.start, row.end) for row in rows(records, events) if row.kind is not BACKWARD]
    assert found == [(TaskKind.TENSOR_COMMUNICATION, 120, 140), (TaskKind.DATA_COMMUNICATION, 130, 260)]


def test_a_tensor_collective_is_the_one_its_wait_ends_with() -> None:
    records = [Record(BACKWARD, 0, 0, "", 100, 200)]
    events = [
        TraceEvent("_c10d_functional::all_reduce", 120, 122, 0),
        TraceEvent("gloo:all_reduce", 121, 160, 0),  # a bucket of gradients that another thread was late to start
        TraceEvent("gloo:all_reduce", 123, 139, 0),
        TraceEvent("_c10d_functional::wait_tensor", 125, 140, 0),
    ]
    found = [(row.kind, row.start, row.end) for row in rows(records, events) if row.kind is not BACKWARD]
    assert found == [(TaskKind.TENSOR_COMMUNICATION, 120, 140), (TaskKind.DATA_COMMUNICATION, 121, 160)]


def test_a_tensor_collective_belongs_to_the_pass_that_launched_it() -> None:
    # gloo's thread comes to it when the pass is over, as a launch that nobody waits for at once allows
    records = [Record(FORWARD, 0, 3, "", 100, 130)]
    events = [
        TraceEvent("_c10d_functional::reduce_scatter_tensor", 120, 122, 0),
        TraceEvent("gloo:reduce_scatter", 131, 139, 0),
        TraceEvent("_c10d_functional::wait_tensor", 135, 140, 0),
    ]
    tensor = [row for row in rows(records, events) if row.kind is TaskKind.TENSOR_COMMUNICATION]
    assert tensor == [Row(StreamKind.TENSOR, TaskKind.TENSOR_COMMUNICATION, 0, 3, "reduce_scatter", 120, 140)]


def test_gradients_are_reduced_under_the_backward_pass() -> None:
    records = [Record(BACKWARD, 1, 0, "", 100, 200)]
    events = [TraceEvent("gloo:all_reduce", 150, 260, 0), TraceEvent("gloo:barrier", 10, 20, 0)]
    assert rows(records, events) == [
        Row(COMPUTE, BACKWARD, 1, 0, "", 100, 200),
        Row(StreamKind.DATA, TaskKind.DATA_COMMUNICATION, 1, 0, "all_reduce", 150, 260),
    ]


def test_recomputation_is_not_part_of_the_backward_pass() -> None:
    records = [Record(RECOMPUTE, 0, 1, "", 110, 150), Record(BACKWARD, 0, 1, "", 100, 200)]
    assert rows(records, []) == [
        Row(COMPUTE, BACKWARD, 0, 1, "", 100, 110),
        Row(COMPUTE, RECOMPUTE, 0, 1, "", 110, 150),
        Row(COMPUTE, BACKWARD, 0, 1, "", 150, 200),
    ]


def test_transfers_are_named_by_the_action_that_posts_them() -> None:
    events = [
        TraceEvent("PP:0SEND_F2", 10, 30, 0),
        TraceEvent("gloo:send", 20, 90, 0),
        TraceEvent("PP:0RECV_B1", 40, 50, 0),
        TraceEvent("gloo:recv", 45, 95, 0),
    ]
    assert rows([], events) == [
        Row(StreamKind.SEND_FORWARD, TaskKind.PIPELINE_COMMUNICATION, 0, 2, "send", 10, 90),
        Row(StreamKind.RECEIVE_BACKWARD, TaskKind.PIPELINE_COMMUNICATION, 0, 1, "recv", 40, 95),
    ]


def test_a_pass_that_only_waits_stays_in_the_order() -> None:
    records = [Record(FORWARD, 0, 0, "", 100, 110)]
    events = [
        TraceEvent("_c10d_functional::all_reduce", 99, 100, 0),
        TraceEvent("gloo:all_reduce", 100, 110, 0),
        TraceEvent("_c10d_functional::wait_tensor", 100, 111, 0),
    ]
    assert Row(COMPUTE, FORWARD, 0, 0, "", 100, 100) in rows(records, events)


def test_memory_keeps_the_turning_points() -> None:
    sizes = [5, 7, -3, -2, 10]
    events = [TraceEvent("[memory]", 10 * i, 10 * i, size) for i, size in enumerate(sizes, 1)]
    early = TraceEvent("[memory]", 1, 1, 1000)
    assert memory([early, *events], 5) == [(5, 0), (20, 12), (40, 7), (50, 17)]


def test_a_collective_in_a_region_is_of_the_axis_that_it_names() -> None:
    records = [Record(FORWARD, 0, 1, "", 100, 200)]
    events = [
        TraceEvent("meshwise moving expert all_to_all", 120, 140, 0),
        TraceEvent("gloo:all_to_all", 125, 138, 0),
        TraceEvent("gloo:all_reduce", 130, 170, 0),  # a bucket of gradients beside it
    ]
    assert rows(records, events) == [
        Row(COMPUTE, FORWARD, 0, 1, "", 100, 120),
        Row(StreamKind.TENSOR, TaskKind.EXPERT_COMMUNICATION, 0, 1, "all_to_all", 120, 140),
        Row(StreamKind.DATA, TaskKind.DATA_COMMUNICATION, 0, 1, "all_reduce", 130, 170),
        Row(COMPUTE, FORWARD, 0, 1, "", 140, 200),
    ]


def test_what_goes_round_a_ring_runs_beside_a_pass() -> None:
    records = [Record(FORWARD, 0, 1, "", 100, 200)]
    events = [
        TraceEvent("meshwise moving context shift", 120, 130, 0),  # posts it
        TraceEvent("gloo:send", 122, 160, 0),
        TraceEvent("gloo:recv", 124, 170, 0),
    ]
    assert rows(records, events) == [
        Row(COMPUTE, FORWARD, 0, 1, "", 100, 200),
        Row(StreamKind.CONTEXT, TaskKind.CONTEXT_COMMUNICATION, 0, 1, "shift send", 120, 160),
        Row(StreamKind.CONTEXT, TaskKind.CONTEXT_COMMUNICATION, 0, 1, "shift recv", 120, 170),
    ]
