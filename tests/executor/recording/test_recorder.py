"""What a rank records: spans in order, and what is recomputed for the pass at hand; nothing where nothing is asked."""

import pytest

pytest.importorskip("torch")

from meshwise.executor.recording import recorder as recording
from meshwise.executor.recording.recorder import Record, Recorder
from meshwise.simulator.program import TaskKind


class Heart:
    """What a recorder tells others that it does."""

    def __init__(self) -> None:
        self.beats: list[str] = []

    def beat(self, operation: str) -> None:
        self.beats.append(operation)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    clock = iter(range(1000))
    monkeypatch.setattr(recording, "perf_counter_ns", lambda: next(clock))
    return Recorder(Heart())  # type: ignore[arg-type]


def test_a_pass_is_one_span_with_its_loss_and_what_it_computes_again(made: Recorder) -> None:
    made.records = []
    with made.span(TaskKind.FORWARD, 1, 2):  # 0 to 1
        pass
    with made.loss_span():  # ends at 2
        pass
    again = made.make_checkpoint_contexts()[1]
    with made.span(TaskKind.BACKWARD, 1, 0), again:  # from 3, and from 4 to 5
        assert made.current_pass == (1, 0)
    assert made.records == [
        Record(TaskKind.FORWARD, 1, 2, "", 0, 2),
        Record(TaskKind.RECOMPUTE, 1, 0, "", 4, 5),
        Record(TaskKind.BACKWARD, 1, 0, "", 3, 6),
    ]
    assert made.heartbeat.beats == ["forward 1F2", "backward 1B0"]  # type: ignore[attr-defined]


def test_without_a_list_nothing_is_kept_and_the_heart_beats(made: Recorder) -> None:
    again = made.make_checkpoint_contexts()[1]
    with made.span(TaskKind.OPTIMIZER), made.loss_span(), made.record_host_copy("states", 0, -1), again:
        pass
    assert made.records is None
    assert made.heartbeat.beats == [str(TaskKind.OPTIMIZER), "states"]  # type: ignore[attr-defined]


def test_spans_that_are_exact_wait_for_the_device_at_both_ends(made: Recorder) -> None:
    waits: list[int] = []
    made.synchronise = lambda: waits.append(1)
    made.exact = True
    with made.span(TaskKind.FORWARD, 0, 0):
        pass
    assert waits == []  # nothing is recorded
    made.records = []
    with made.span(TaskKind.FORWARD, 0, 0):
        pass
    assert waits == [1, 1]
