"""Records and profiler events become spans that add up."""

from meshwise.executor.recording.recorder import Record
from meshwise.executor.recording.trace import Row, TraceEvent, build_rows
from meshwise.simulator.program import StreamKind, TaskKind

FORWARD, BACKWARD, RECOMPUTE = TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.RECOMPUTE
COMPUTE = StreamKind.COMPUTE


def test_a_pass_is_cut_by_the_collective_it_waits_for() -> None:
    records = [Record(FORWARD, 0, 3, "", 100, 200)]
    events = [
        TraceEvent("_c10d_functional::all_reduce", 120, 122, 0),
        TraceEvent("gloo:all_reduce", 125, 138, 0),  # on gloo's thread, after the launch returned
        TraceEvent("_c10d_functional::wait_tensor", 123, 140, 0),
    ]
    assert build_rows(records, events) == [
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
    found = [(row.kind, row.start, row.end) for row in build_rows(records, events) if row.kind is not BACKWARD]
    assert found == [(TaskKind.TENSOR_COMMUNICATION, 120, 140), (TaskKind.DATA_COMMUNICATION, 130, 260)]


def test_a_tensor_collective_is_the_one_its_wait_ends_with() -> None:
    records = [Record(BACKWARD, 0, 0, "", 100, 200)]
    events = [
        TraceEvent("_c10d_functional::all_reduce", 120, 122, 0),
        TraceEvent("gloo:all_reduce", 121, 160, 0),  # a bucket of gradients that another thread was late to start
        TraceEvent("gloo:all_reduce", 123, 139, 0),
        TraceEvent("_c10d_functional::wait_tensor", 125, 140, 0),
    ]
    found = [(row.kind, row.start, row.end) for row in build_rows(records, events) if row.kind is not BACKWARD]
    assert found == [(TaskKind.TENSOR_COMMUNICATION, 120, 140), (TaskKind.DATA_COMMUNICATION, 121, 160)]


def test_a_tensor_collective_belongs_to_the_pass_that_launched_it() -> None:
    # gloo's thread comes to it when the pass is over, as a launch that nobody waits for at once allows
    records = [Record(FORWARD, 0, 3, "", 100, 130)]
    events = [
        TraceEvent("_c10d_functional::reduce_scatter_tensor", 120, 122, 0),
        TraceEvent("gloo:reduce_scatter", 131, 139, 0),
        TraceEvent("_c10d_functional::wait_tensor", 135, 140, 0),
    ]
    tensor = [row for row in build_rows(records, events) if row.kind is TaskKind.TENSOR_COMMUNICATION]
    assert tensor == [Row(StreamKind.TENSOR, TaskKind.TENSOR_COMMUNICATION, 0, 3, "reduce_scatter", 120, 140)]


def test_gradients_are_reduced_under_the_backward_pass() -> None:
    records = [Record(BACKWARD, 1, 0, "", 100, 200)]
    events = [
        TraceEvent("gloo:barrier", 10, 20, 0),
        TraceEvent("aten::mm", 110, 270, 0),
        TraceEvent("gloo:all_reduce", 150, 260, 4096),
    ]
    assert build_rows(records, events) == [
        Row(COMPUTE, BACKWARD, 1, 0, "", 100, 200),
        Row(StreamKind.DATA, TaskKind.DATA_COMMUNICATION, 1, 0, "all_reduce gradients", 150, 260, 4096),
    ]


def test_a_backward_pass_waits_for_the_last_bucket_once_no_operator_runs() -> None:
    records = [Record(BACKWARD, 0, 0, "", 100, 200)]
    events = [TraceEvent("aten::mm", 110, 170, 0), TraceEvent("gloo:all_reduce", 150, 190, 8)]
    assert [row for row in build_rows(records, events) if row.kind is BACKWARD] == [
        Row(COMPUTE, BACKWARD, 0, 0, "", 100, 170),
        Row(COMPUTE, BACKWARD, 0, 0, "", 190, 200),
    ]


def test_a_sum_of_gradients_ends_before_the_update_that_waited_for_it() -> None:
    # gloo's thread wakes those that wait before it notes the end, which a busy host lets it do much later
    records = [Record(BACKWARD, 0, 0, "", 100, 200), Record(TaskKind.OPTIMIZER, -1, -1, "", 210, 220)]
    events = [TraceEvent("gloo:all_reduce", 150, 230, 0), TraceEvent("aten::add", 190, 205, 0)]
    found = [(row.kind, row.start, row.end) for row in build_rows(records, events) if row.kind is not BACKWARD]
    assert found == [(TaskKind.DATA_COMMUNICATION, 150, 210), (TaskKind.OPTIMIZER, 210, 220)]


def test_what_fully_shard_gathers_and_reduces_is_named_by_its_unit_and_size() -> None:
    # gloo has no reduce_scatter: it sums everything and keeps a part
    records = [Record(FORWARD, 0, 0, "", 100, 150), Record(BACKWARD, 0, 0, "", 150, 250)]
    events = [
        TraceEvent("FSDP::all_gather (network.layers.0)", 100, 130, 0),
        TraceEvent("c10d::_allgather_base_", 105, 110, 64),
        TraceEvent("gloo:all_gather", 108, 128, 32),
        TraceEvent("aten::mm", 130, 190, 0),
        TraceEvent("FSDP::post_backward_reduce (network.layers.0)", 190, 240, 0),
        TraceEvent("c10d::_reduce_scatter_base_", 200, 210, 64),
        TraceEvent("gloo:all_reduce", 205, 235, 64),
    ]
    found = [row for row in build_rows(records, events) if row.kind is TaskKind.DATA_COMMUNICATION]
    gathered, reduced = "all_gather parameters of layers.0", "reduce_scatter gradients of layers.0"
    data = TaskKind.DATA_COMMUNICATION
    assert found == [
        Row(StreamKind.GATHER, data, 0, 0, gathered, 105, 128, 64),
        Row(StreamKind.DATA, data, 0, 0, reduced, 200, 235, 64),
    ]
    passes = [(row.start, row.end) for row in build_rows(records, events) if row.stream is COMPUTE]
    assert passes == [(100, 105), (128, 150), (150, 200), (235, 250)]


def test_recomputation_is_not_part_of_the_backward_pass() -> None:
    records = [Record(RECOMPUTE, 0, 1, "", 110, 150), Record(BACKWARD, 0, 1, "", 100, 200)]
    assert build_rows(records, []) == [
        Row(COMPUTE, BACKWARD, 0, 1, "", 100, 110),
        Row(COMPUTE, RECOMPUTE, 0, 1, "", 110, 150),
        Row(COMPUTE, BACKWARD, 0, 1, "", 150, 200),
    ]


def test_transfers_are_named_by_the_action_that_posts_them() -> None:
    events = [
        TraceEvent("PP:0SEND_F2", 10, 30, 0),
        TraceEvent("gloo:send", 20, 90, 64),
        TraceEvent("PP:0RECV_B1", 40, 50, 0),
        TraceEvent("gloo:recv", 45, 95, 32),
    ]
    assert build_rows([], events) == [
        Row(StreamKind.SEND_FORWARD, TaskKind.PIPELINE_COMMUNICATION, 0, 2, "send activations", 10, 90, 64),
        Row(StreamKind.RECEIVE_BACKWARD, TaskKind.PIPELINE_COMMUNICATION, 1, 1, "send gradients", 40, 95, 32),
    ]


def test_a_pass_that_only_waits_stays_in_the_order() -> None:
    records = [Record(FORWARD, 0, 0, "", 100, 110)]
    events = [
        TraceEvent("_c10d_functional::all_reduce", 99, 100, 0),
        TraceEvent("gloo:all_reduce", 100, 110, 0),
        TraceEvent("_c10d_functional::wait_tensor", 100, 111, 0),
    ]
    assert Row(COMPUTE, FORWARD, 0, 0, "", 100, 100) in build_rows(records, events)


def test_a_collective_in_a_region_is_of_the_axis_that_it_names() -> None:
    records = [Record(FORWARD, 0, 1, "", 100, 200)]
    events = [
        TraceEvent("meshwise moving expert all_to_all", 120, 140, 0),
        TraceEvent("gloo:all_to_all", 125, 138, 64),
        TraceEvent("gloo:all_reduce", 130, 170, 0),  # a bucket of gradients beside it
        TraceEvent("aten::mm", 140, 190, 0),
    ]
    assert build_rows(records, events) == [
        Row(COMPUTE, FORWARD, 0, 1, "", 100, 120),
        Row(StreamKind.TENSOR, TaskKind.EXPERT_COMMUNICATION, 0, 1, "all_to_all", 120, 140, 64),
        Row(StreamKind.DATA, TaskKind.DATA_COMMUNICATION, 0, 1, "all_reduce gradients", 130, 170),
        Row(COMPUTE, FORWARD, 0, 1, "", 140, 200),
    ]


def test_what_goes_round_a_ring_runs_beside_a_pass() -> None:
    records = [Record(FORWARD, 0, 1, "", 100, 200)]
    events = [
        TraceEvent("meshwise moving context shift", 120, 130, 0),  # posts it
        TraceEvent("gloo:send", 122, 160, 0),
        TraceEvent("gloo:recv", 124, 170, 0),
    ]
    assert build_rows(records, events) == [
        Row(COMPUTE, FORWARD, 0, 1, "", 100, 200),
        Row(StreamKind.CONTEXT, TaskKind.CONTEXT_COMMUNICATION, 0, 1, "shift send", 120, 160),
        Row(StreamKind.CONTEXT, TaskKind.CONTEXT_COMMUNICATION, 0, 1, "shift recv", 120, 170),
    ]
