from collections import Counter
from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings

from meshwise.simulator.engine import ENGINES, simulate, step_ticks
from meshwise.simulator.program import LinkClass, Piece, RankClass, Stream, StreamKind, Task, TaskKind, Work, program_of
from meshwise.simulator.units import TICKS_PER_SECOND
from meshwise.strategies.explanation.critical_path import LINK_SHARING, OTHER_RANKS, WAITING, critical_path, device_time
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout

from ...simulator.programs import programs
from ..problems import problem

CLASSES = [RankClass("first", (0,), (0,)), RankClass("second", (1,), (1,))]
STREAMS = [Stream(0, StreamKind.COMPUTE), Stream(1, StreamKind.COMPUTE), Stream(0, StreamKind.SEND_FORWARD)]


def seconds(**ticks: int) -> dict[str, float]:
    return {kind.replace("_", " "): count / TICKS_PER_SECOND for kind, count in ticks.items()}


def test_a_path_of_two_ranks_by_hand() -> None:
    # rank 0: forward 0..3, sends 3..5; rank 1: forward 5..9, backward 9..17; rank 0's own 4 more ticks end at 7
    tasks = [
        Task(TaskKind.FORWARD, (0,), 3),
        Task(TaskKind.FORWARD, (0,), 4),
        Task(TaskKind.PIPELINE_COMMUNICATION, (2,), 2, (0,)),
        Task(TaskKind.FORWARD, (1,), 4, (2,)),
        Task(TaskKind.BACKWARD, (1,), 8),
    ]
    path = critical_path(program_of(CLASSES, STREAMS, tasks))
    assert [(each.kind, each.ticks) for each in path.segments] == [
        ("forward", 3), ("pipeline communication", 2), ("forward", 4), ("backward", 8)
    ]  # fmt: skip
    assert path.position == 1
    assert path.list_stretches() == [(0, 0, 5), (1, 5, 17)]
    # the send runs on rank 0's stream, as the first forward does: 3 + 2 ticks of another pipeline rank
    assert path.sum_by_kind() == seconds(forward=4, backward=8) | {OTHER_RANKS: 5 / TICKS_PER_SECOND}


def test_of_pieces_beside_each_other_the_longer_one_is_on_the_path() -> None:
    # a product of 5 ticks hides nothing of an exchange of 9 ticks where the path is the exchange; one of 9 hides all
    # of it; where both take as long it is the one that computes
    for product, expected in ((5, {"backward": 4, "tensor_communication": 9}), (9, {"backward": 13})):
        pieces = (
            Piece(TaskKind.BACKWARD, "inputs", 0, 4, StreamKind.COMPUTE),
            Piece(TaskKind.TENSOR_COMMUNICATION, "sum", 4, 13, StreamKind.CONTEXT),
            Piece(TaskKind.BACKWARD, "weights", 4, 4 + product, StreamKind.COMPUTE),
        )
        program = program_of(CLASSES, STREAMS, [Task(TaskKind.BACKWARD, (0,), 13)])
        path = critical_path(replace(program, work=(Work(TaskKind.BACKWARD, 0, 13, pieces),)))
        assert path.sum_by_kind() == seconds(**expected)


def test_of_equal_ways_the_path_stays_on_one_device() -> None:
    tasks = [
        Task(TaskKind.FORWARD, (1,), 5),
        Task(TaskKind.FORWARD, (0,), 5),
        Task(TaskKind.BACKWARD, (1,), 7, (1,)),
    ]
    assert critical_path(program_of(CLASSES, STREAMS, tasks)).sum_by_kind() == seconds(forward=5, backward=7)


def test_two_transfers_over_one_link_wait_for_each_other() -> None:
    # 1000 bytes each at 1 byte a tick: alone 1000 ticks, together 2000
    streams = [Stream(0, StreamKind.DATA), Stream(1, StreamKind.DATA)]
    usage = ((0, 1000.0),)
    tasks = [Task(TaskKind.DATA_COMMUNICATION, (stream,), 0, usage=usage) for stream in (0, 1)]
    links = [LinkClass("link", float(TICKS_PER_SECOND))]
    found = critical_path(program_of(CLASSES, streams, tasks, links=links)).sum_by_kind()
    assert found == seconds(data_communication=1000) | {LINK_SHARING: 1000 / TICKS_PER_SECOND}


@settings(max_examples=60, deadline=None)
@given(programs())
def test_segments_add_up_to_the_step(program) -> None:
    for engine in ENGINES:
        assert critical_path(program, engine).ticks == step_ticks(program, engine)


@settings(max_examples=60, deadline=None)
@given(programs())
def test_stretches_follow_each_other_on_other_ranks_each_time(program) -> None:
    found = critical_path(program)
    classes, starts, ends = zip(*found.list_stretches(), strict=True) if found.list_stretches() else ((), (), ())
    assert all(one != two for one, two in pairwise(classes))
    assert all(first < last for first, last in zip(starts, ends, strict=True))
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    assert max(ends, default=0) <= found.ticks
    alone = Counter[int]()
    for segment in found.segments:
        alone[segment.rank_class] += segment.ticks
    inside = Counter[int]()
    for of, first, last in found.list_stretches():
        inside[of] += last - first
    assert all(inside[of] >= alone[of] for of in set(classes))  # with what it runs together with others
    assert sum(inside.values()) <= sum(alone.values())


def test_what_two_ranks_run_together_is_between_them_or_a_part_of_one() -> None:
    # rank 0: 0..2; both: 2..5; rank 1: 5..9; both: 9..10; rank 1: 10..14
    both = (0, 1)
    tasks = [
        Task(TaskKind.FORWARD, (0,), 2),
        Task(TaskKind.TENSOR_COMMUNICATION, both, 3),
        Task(TaskKind.FORWARD, (1,), 4),
        Task(TaskKind.TENSOR_COMMUNICATION, both, 1),
        Task(TaskKind.BACKWARD, (1,), 4),
    ]
    assert critical_path(program_of(CLASSES, STREAMS, tasks)).list_stretches() == [(0, 0, 2), (1, 5, 14)]


def test_a_plan_by_kind_adds_up_to_its_step_time() -> None:
    own = problem(nodes=2, devices=4)
    for schedule in ("1f1b", "zb1p", "pipedream"):
        layout = Layout(data=2, tensor=2, pipeline=2, microbatch=4, schedule=schedule, zero=schedule == "1f1b")
        program = lower(own, complete(own, layout))
        timeline, path = simulate(program), critical_path(program)
        assert abs(sum(path.sum_by_kind().values()) - timeline.step_time) < 1e-9 * timeline.step_time
        assert {"forward", "backward", "tensor communication"} <= set(path.sum_by_kind())
        spent = device_time(timeline)
        assert abs(sum(spent.values()) - timeline.step_time) < 1e-9 * timeline.step_time
        assert min(spent.values()) > 0


def test_a_device_waits_for_what_it_does_not_do() -> None:
    # rank 0 computes 3 of 17 ticks, rank 1 12 of them; rank 0 sends for 2 beside nothing
    tasks = [
        Task(TaskKind.FORWARD, (0,), 3),
        Task(TaskKind.PIPELINE_COMMUNICATION, (2,), 2, (0,)),
        Task(TaskKind.FORWARD, (1,), 4, (1,)),
        Task(TaskKind.BACKWARD, (1,), 8),
    ]
    spent = device_time(simulate(program_of(CLASSES, STREAMS, tasks)))
    ticks = {kind: round(each * TICKS_PER_SECOND, 6) for kind, each in spent.items()}
    assert ticks == {"forward": 3.5, "backward": 4, "pipeline communication": 1, WAITING: 8.5}
