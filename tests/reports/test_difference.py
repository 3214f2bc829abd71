"""A report of differences adds up to the error of the step, says nothing of equal steps, and finds what is planted."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.reports.difference import WAITING, Difference, DifferenceRow, assign_owners, difference, operation
from meshwise.simulator.program import RankClass, StreamKind, TaskKind
from meshwise.simulator.spans import Span
from meshwise.simulator.timeline import Timeline

F, B, D, UPDATE = TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.DATA_COMMUNICATION, TaskKind.OPTIMIZER
KINDS = (F, B, D, UPDATE, TaskKind.TENSOR_COMMUNICATION, TaskKind.PIPELINE_COMMUNICATION, TaskKind.HOST_COPY)


def span(kind: TaskKind, start: float, end: float, rank: int = 0, name: str = "", size: float = 0.0) -> Span:
    stream = StreamKind.DATA if kind.communicates else StreamKind.COMPUTE
    return Span(
        rank, stream, kind, -1 if kind in (UPDATE, D) else 0, 0 if kind in (F, B) else -1, name, start, end, size
    )


def timeline(*spans: Span, ranks: int = 1, classes: int = 1) -> Timeline:
    each = ranks // classes
    members = tuple(RankClass(f"{i}", (0,), tuple(range(i * each, (i + 1) * each))) for i in range(classes))
    return Timeline("simulated", members, spans, (), max(s.end for s in spans), "discrete_event")


def row(found: Difference, name: str) -> DifferenceRow:
    return next(each for each in found.operations() if each.operation == name)


def test_what_computes_has_its_time_and_communication_what_is_left() -> None:
    # forward [0, 4], reduction [3, 6] under it, backward [5, 8], then nothing up to 10
    spans = [span(F, 0, 4), span(D, 3, 6, name="all_reduce gradients"), span(B, 5, 8)]
    shares = [(seconds, owner and owner.kind) for seconds, owner in assign_owners(spans, 10.0)]
    assert shares == [(3, F), (1, F), (1, D), (1, B), (2, B), (2, None)]


def test_of_spans_that_stick_out_of_the_step_only_what_lies_in_it_counts() -> None:
    # a busy host stamps the end of an operation after the step has ended, and its clock may be off before it starts
    spans = [span(F, -1, 4), span(D, 5, 13, name="all_reduce gradients")]
    shares = [(seconds, owner and owner.kind) for seconds, owner in assign_owners(spans, 10.0)]
    assert shares == [(4, F), (1, None), (5, D)]


PREDICTED = timeline(
    span(F, 0, 4),
    span(B, 4, 10),
    span(D, 10, 12, name="all_reduce gradients of all blocks", size=64),
    span(UPDATE, 12, 13),
)


def test_a_step_does_not_differ_from_itself() -> None:
    found = difference(PREDICTED, PREDICTED)
    assert found.error == 0 and found.lines() == []
    assert all(each.cost == each.difference == each.share == 0 for each in found.rows)
    assert {each.verdict for each in found.rows} == {"as predicted"}
    assert found.to_json()["not_predicted"] == found.to_json()["did_not_happen"] == []


def test_planted_differences_are_found_and_sorted_by_cost() -> None:
    measured = timeline(
        span(F, 0, 4),
        span(B, 4, 11),  # 1 s longer
        span(D, 11, 17, name="all_reduce gradients", size=64),  # 4 s longer
        span(UPDATE, 17, 18),
        span(D, 18, 20, name="broadcast parameters", size=32),  # nobody said so
    )
    found = difference(PREDICTED, measured)
    assert [(each.operation, each.cost) for each in found.operations() if each.cost] == [
        ("all_reduce gradients", 4.0),
        ("broadcast parameters", 2.0),
        ("backward of stage 0", 1.0),
    ]
    assert [each.share for each in found.operations()][:3] == [4 / 7, 2 / 7, 1 / 7]
    assert found.to_json()["not_predicted"] == ["broadcast parameters"]
    assert row(difference(measured, PREDICTED), "broadcast parameters").verdict == "did not happen"
    reduction = row(found, "all_reduce gradients")
    assert (reduction.predicted.runs, reduction.measured.runs) == (1, 1)
    assert (reduction.predicted.bytes, reduction.measured.bytes) == (64, 64)


def test_operators_of_a_pass_count_once_a_microbatch() -> None:
    whole = timeline(span(F, 0, 2), span(B, 2, 3))
    pieces = timeline(span(F, 0, 1, name="layers.0: qkv"), span(F, 1, 2, name="layers.0: up"), span(B, 2, 3))
    found = difference(pieces, whole)
    assert found.error == 0 and all(each.cost == 0 for each in found.rows)
    assert row(found, "forward of stage 0").predicted.runs == 1


def test_of_ranks_that_are_predicted_alike_the_mean_is_taken() -> None:
    predicted = timeline(span(F, 0, 4), ranks=2)
    measured = timeline(span(F, 0, 4), span(F, 0, 6, rank=1), ranks=2, classes=2)
    found = difference(predicted, measured)
    assert [(each.operation, each.cost) for each in found.rows] == [("forward of stage 0", 1.0), (WAITING, 1.0)]
    assert found.error == 2.0  # half of it computing on one rank, half of it waiting on the other


def test_a_message_in_phases_counts_once() -> None:
    phases = [span(D, 0, 1, name="all_reduce gradients", size=8), span(D, 1, 2, name="all_reduce gradients")]
    use = row(difference(timeline(*phases), timeline(*phases)), "all_reduce gradients").predicted
    assert (use.runs, use.bytes, use.time) == (1, 8, 2)


def test_only_the_same_ranks_can_be_set_side_by_side() -> None:
    with pytest.raises(ValueError, match="of the same ranks, met 1 and 2 of which 1 are the same"):
        difference(PREDICTED, timeline(span(F, 0, 4), ranks=2))


def test_both_sides_call_an_operation_the_same() -> None:
    gather = Span(0, StreamKind.GATHER, D, 0, 0, "all_gather parameters of layers.0", 0, 1)
    assert operation(gather) == "all_gather parameters"
    send = Span(0, StreamKind.RECEIVE_BACKWARD, TaskKind.PIPELINE_COMMUNICATION, 1, 0, "send gradients", 0, 1)
    assert operation(send) == "send gradients 1 -> 0"


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    classes = 2
    spans = []
    for _ in range(draw(st.integers(1, 12))):
        start, length = draw(st.integers(0, 20)), draw(st.integers(0, 9))
        kind = draw(st.sampled_from(KINDS))
        spans.append(span(kind, start, start + length, draw(st.integers(0, classes - 1)), "all_reduce x", 1.0))
    spans.append(span(F, 0, 1))
    return timeline(*spans, ranks=4, classes=classes)


@given(timelines(), timelines())
def test_times_add_up_to_the_steps_and_costs_to_the_error(predicted: Timeline, measured: Timeline) -> None:
    found = difference(predicted, measured)
    for each in {each.rank_class for each in found.rows}:
        rows = [one for one in found.rows if one.rank_class == each]
        assert sum(one.predicted.time for one in rows) == pytest.approx(predicted.step_time)
        assert sum(one.measured.time for one in rows) == pytest.approx(measured.step_time)
    for view in (found.rows, found.operations(), found.kinds()):
        assert sum(one.cost for one in view) == pytest.approx(found.error, abs=1e-12)
        assert [abs(one.cost) for one in view] == sorted((abs(one.cost) for one in view), reverse=True)


@given(timelines(), st.integers(1, 5))
def test_a_longer_wait_at_the_end_is_the_whole_error(predicted: Timeline, late: int) -> None:
    found = difference(predicted, replace(predicted, step_time=predicted.step_time + late))
    assert {each.kind for each in found.rows if each.cost} == {WAITING}


def test_a_schedule_differs_in_what_was_changed(step: Callable[..., Timeline]) -> None:
    found = difference(step(forward=1.0, backward=2.0), step(forward=1.0, backward=2.5))
    assert found.kinds()[0].kind == "backward" and found.kinds()[0].cost > 0
    assert all(one.cost == pytest.approx(0, abs=1e-9) for one in found.kinds() if one.kind not in ("backward", WAITING))
