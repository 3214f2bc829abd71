"""Sums over a timeline, on ones whose numbers a hand can check, and against plain loops."""

import pickle
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings

from meshwise.simulator.engine import simulate
from meshwise.simulator.engine.longest_path import finish_times
from meshwise.simulator.program import (
    Flow,
    Piece,
    Program,
    RankClass,
    Stream,
    StreamKind,
    Task,
    TaskKind,
    Work,
    program_of,
)
from meshwise.simulator.spans import Span
from meshwise.simulator.timeline import LinkUse, Timeline, build_timeline
from meshwise.simulator.units import TICKS_PER_SECOND as SECOND

from .programs import LINKS, program, programs


def span(rank: int, kind: TaskKind, start: float, end: float, microbatch: int = 0) -> Span:
    stream = StreamKind.DATA if kind.communicates else StreamKind.COMPUTE
    return Span(rank, stream, kind, rank, microbatch, "", start, end)


CLASSES = (RankClass("stage 0", (0,), (0, 1, 2)), RankClass("stage 1", (1,), (3,)))
TIMELINE = Timeline(
    "measured",
    CLASSES,
    (
        span(0, TaskKind.FORWARD, 0, 4),
        span(0, TaskKind.DATA_COMMUNICATION, 3, 6),
        span(0, TaskKind.BACKWARD, 5, 8),
        span(1, TaskKind.FORWARD, 4, 8),
    ),
    (),
    10.0,
    "gloo",
)


def test_busy_counts_overlapping_spans_once() -> None:
    assert TIMELINE.busy_time(0) == 8.0
    assert TIMELINE.busy_time(0, [TaskKind.FORWARD]) == 4.0
    assert TIMELINE.busy_time(1, [TaskKind.BACKWARD]) == 0.0


def test_what_runs_at_a_moment_is_rather_what_computes() -> None:
    found = [TIMELINE.find_span(0, moment) for moment in (0.0, 3.5, 4.5, 5.0, 8.0)]
    kinds = [each and each.kind for each in found]
    assert kinds == [*[TaskKind.FORWARD] * 2, TaskKind.DATA_COMMUNICATION, TaskKind.BACKWARD, None]
    assert TIMELINE.find_span(1, 4.0) == TIMELINE.spans[3]


def test_bubble_is_weighted_by_ranks() -> None:
    # three ranks work 7 of 10 s, one works 4: idle is 1 - (3 * 7 + 4) / 40
    assert TIMELINE.bubble == pytest.approx(1 - 25 / 40)


def test_exposed_communication_is_what_no_compute_covers() -> None:
    # on three of four ranks [4, 5] is uncovered
    assert TIMELINE.exposed_communication()[TaskKind.DATA_COMMUNICATION] == pytest.approx(0.75)


def test_launches_and_host_copies_neither_work_nor_cover() -> None:
    # of 10 s the rank works 2; its send of 4 s is covered by neither the copy nor the launch
    spans = (
        span(0, TaskKind.LAUNCH, 0, 3),
        span(0, TaskKind.HOST_COPY, 2, 8),
        span(0, TaskKind.TENSOR_COMMUNICATION, 8, 9),
        span(0, TaskKind.OPTIMIZER, 9, 10),
        span(0, TaskKind.PIPELINE_COMMUNICATION, 3, 7),
    )
    timeline = Timeline("measured", (RankClass("rank 0", (0,), (0,)),), spans, (), 10.0, "gloo")
    assert timeline.bubble == pytest.approx(0.8)
    assert timeline.exposed_communication() == {
        TaskKind.TENSOR_COMMUNICATION: 1.0,
        TaskKind.PIPELINE_COMMUNICATION: 4.0,
        TaskKind.DATA_COMMUNICATION: 0.0,
    }


def test_order_and_table() -> None:
    assert TIMELINE.order(0) == ((TaskKind.FORWARD, 0, 0), (TaskKind.BACKWARD, 0, 0))
    table = TIMELINE.to_pandas()
    assert list(table["end"]) == [4, 6, 8, 8]
    assert list(table["kind"]) == [s.kind for s in TIMELINE.spans]
    assert list(table.columns) == list(Span._fields)


def test_a_timeline_without_spans() -> None:
    empty = Timeline("measured", (), (), (), 0.0, "gloo")
    assert (empty.bubble, empty.peak_memory, empty.bottleneck, len(empty.to_pandas())) == (0.0, 0.0, None, 0)
    assert set(empty.exposed_communication().values()) == {0.0}
    assert Timeline("measured", CLASSES, (), (), 0.0, "gloo").order(0) == ()


def test_pieces_are_shown_on_the_streams_they_name() -> None:
    # a forward of 2 s, an all-reduce of 1 s on the tensor stream, 3 s more; it starts at 1 s
    pieces = (
        Piece(TaskKind.FORWARD, "layers.0", 0, 2 * SECOND, StreamKind.COMPUTE),
        Piece(TaskKind.TENSOR_COMMUNICATION, "layers.0", 2 * SECOND, 3 * SECOND, StreamKind.TENSOR),
        Piece(TaskKind.FORWARD, "layers.1", 3 * SECOND, 6 * SECOND),
    )
    step = program([Task(TaskKind.LAUNCH, (0,), SECOND), Task(TaskKind.FORWARD, (0, 1), 6 * SECOND)], 1, 2)
    step = replace(step, work=(step.work[0], Work(TaskKind.FORWARD, 5, 6 * SECOND, pieces)))
    compute, tensor = StreamKind.COMPUTE, StreamKind.TENSOR
    assert [(s.stream, s.kind, s.operators, s.start, s.end) for s in simulate(step).spans] == [
        (compute, TaskKind.LAUNCH, "", 0.0, 1.0),
        (compute, TaskKind.FORWARD, "layers.0", 1.0, 3.0),
        (tensor, TaskKind.TENSOR_COMMUNICATION, "layers.0", 3.0, 4.0),
        (compute, TaskKind.FORWARD, "layers.1", 4.0, 7.0),
        (tensor, TaskKind.FORWARD, "layers.1", 4.0, 7.0),
    ]
    assert {s.stage for s in simulate(step).spans} == {0, 5}


def test_a_piece_beside_another_is_on_a_stream_that_its_task_need_not_hold() -> None:
    # from 2 s on a product of 1 s and an exchange of 3 s run at once on both classes: the product is not drawn longer
    pieces = (
        Piece(TaskKind.BACKWARD, "inputs", 0, 2 * SECOND, StreamKind.COMPUTE),
        Piece(TaskKind.TENSOR_COMMUNICATION, "sum", 2 * SECOND, 5 * SECOND, StreamKind.CONTEXT),
        Piece(TaskKind.BACKWARD, "weights", 2 * SECOND, 3 * SECOND, StreamKind.COMPUTE),
    )
    classes = [RankClass(name, (0,), (rank,)) for rank, name in enumerate("ab")]
    streams = [Stream(rank, kind) for kind in (StreamKind.COMPUTE, StreamKind.TENSOR) for rank in (0, 1)]
    step = program_of(classes, streams, [Task(TaskKind.BACKWARD, (0, 1, 2, 3), 5 * SECOND)])
    timeline = simulate(replace(step, work=(Work(TaskKind.BACKWARD, 0, 5 * SECOND, pieces),)))
    compute, context = StreamKind.COMPUTE, StreamKind.CONTEXT
    assert [(s.rank_class, s.stream, s.operators, s.start, s.end) for s in timeline.spans] == [
        (0, compute, "inputs", 0.0, 2.0),
        (1, compute, "inputs", 0.0, 2.0),
        (0, compute, "weights", 2.0, 3.0),
        (1, compute, "weights", 2.0, 3.0),
        (0, context, "sum", 2.0, 5.0),
        (1, context, "sum", 2.0, 5.0),
    ]
    assert timeline.bubble == 0.0
    assert timeline.exposed_communication()[TaskKind.TENSOR_COMMUNICATION] == 2.0


def test_links_tell_bytes_and_the_bottleneck() -> None:
    # link 0: 1 + 2 bytes in 3 s at 1 byte/s; link 1: 1.5 bytes inside tasks
    tasks = [Task(TaskKind.FORWARD, (stream,), 0, (), ((0, size),)) for stream, size in ((0, 1.0), (1, 2.0))]
    timeline = simulate(replace(program(tasks, 2), traffic=(0.0, 1.5, 0.0)))
    assert timeline.step_time == 3.0
    assert [(link.bytes, link.utilisation) for link in timeline.links] == [(3.0, 1.0), (1.5, 0.5), (0.0, 0.0)]
    assert timeline.bottleneck == LinkUse("link 0", 1, 1.0, 3.0, 1.0)


def test_no_bottleneck_where_links_are_idle() -> None:
    assert simulate(program([Task(TaskKind.FORWARD, (0,), 1)])).bottleneck is None
    assert simulate(replace(program([]), links=LINKS, flows=(Flow(((0, 1.0),)),))).bottleneck is None


def test_parts_are_made_when_asked_for_and_survive_a_copy() -> None:
    step = program([Task(TaskKind.FORWARD, (0,), SECOND)])
    timeline = build_timeline(step, *finish_times(step), "longest_path")
    assert "columns" not in vars(timeline.spans)
    changed = replace(timeline, engine="other")
    assert list(changed.spans) == list(timeline.spans) == [timeline.spans[0]]
    assert changed.spans == timeline.spans[:] and changed.memory == timeline.memory
    copied = pickle.loads(pickle.dumps(timeline))
    assert copied.spans == timeline.spans and copied.links == timeline.links


def union(spans: list[Span]) -> float:
    """Return how long at least one of the spans runs, in ticks."""
    marks = sorted({round(t * SECOND) for s in spans for t in (s.start, s.end)})
    return sum(
        high - low
        for low, high in pairwise(marks)
        if any(round(s.start * SECOND) <= low and high <= round(s.end * SECOND) for s in spans)
    )


@settings(max_examples=300, deadline=None)
@given(programs(flows=True))
def test_sums_are_those_of_a_plain_loop(step: Program) -> None:
    timeline = simulate(step)
    spans = list(timeline.spans)
    assert [(s.start, s.end, s.rank_class) for s in spans] == sorted((s.start, s.end, s.rank_class) for s in spans)
    exposed = dict.fromkeys(timeline.exposed_communication(), 0.0)
    for index in range(len(step.rank_classes)):
        own = [s for s in spans if s.rank_class == index]
        computing = [s for s in own if s.kind.computes]
        assert timeline.busy_time(index) == union(own) / SECOND
        assert timeline.busy_time(index, [TaskKind.FORWARD]) == union([s for s in own if s.kind == "forward"]) / SECOND
        for kind in exposed:
            covered = union(computing)
            exposed[kind] += union([*computing, *(s for s in own if s.kind is kind)]) - covered
    for kind, seconds in timeline.exposed_communication().items():
        assert seconds == pytest.approx(exposed[kind] / SECOND / len(step.rank_classes))
    # the same spans as objects, as they are measured, give the same sums
    measured = replace(timeline, spans=tuple(spans))
    assert measured.bubble == pytest.approx(timeline.bubble)
    assert [measured.order(i) for i in range(len(step.rank_classes))] == [
        timeline.order(i) for i in range(len(step.rank_classes))
    ]


@settings(max_examples=300, deadline=None)
@given(programs(flows=True))
def test_every_task_is_shown_on_its_streams_from_start_to_end(step: Program) -> None:
    starts, ends = finish_times(step)
    expected = [
        (step.streams[stream].rank_class, step.streams[stream].kind, step.microbatch_of[task], start, end)
        for task, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True))
        for stream in step.streams_of(task)
    ]
    columns = build_timeline(step, starts, ends, "longest_path").columns
    kinds = [list(StreamKind)[code] for code in columns.stream]
    rows = (
        columns.rank_class.tolist(),
        kinds,
        columns.microbatch.tolist(),
        columns.start.tolist(),
        columns.end.tolist(),
    )
    assert sorted(zip(*rows, strict=True)) == sorted(expected)


@given(programs())
@settings(max_examples=300, deadline=None)
def test_what_runs_is_a_span_that_is_under_way(step: Program) -> None:
    timeline = simulate(step)
    for each in timeline.spans:
        found = timeline.find_span(each.rank_class, each.start)
        if each.duration:
            assert found is not None
            assert found.start <= each.start < found.end
            assert found in timeline.spans
