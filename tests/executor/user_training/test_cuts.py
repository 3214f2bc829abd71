"""What of a user's file is captured before ranks start, and what is refused with its line."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from meshwise.executor.modules.layout import ModuleLayout, parse_layout
from meshwise.executor.recording.rank_files import UserError
from meshwise.executor.user_training.cuts import capture_job
from meshwise.executor.user_training.job import TrainJob

ZOO = Path(__file__).with_name("zoo.py")


def capture_kind(kind: str, words: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("KIND", kind)
    return capture_job(TrainJob(str(ZOO), parse_layout(words, ModuleLayout()), 3)).batch


def test_a_capture_is_of_a_microbatch_of_all_data_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert capture_kind("weighted", "tensor=2", monkeypatch) == 8
    assert capture_kind("tied", "tensor=2,data=2,num_microbatches=2", monkeypatch) == 4


@pytest.mark.parametrize(
    ("kind", "words", "text"),
    [
        ("routed", "tensor=2", r"zoo.py:\d+: .*control flow does not depend on data.*or data=2"),
        ("convolutions", "tensor=2", r"zoo.py:\d+: .*or data=2"),  # momentum=None reads a number of a buffer
        ("outputs", "tensor=2", "a forward returns a scalar loss or a pair"),
        ("tied", "tensor=2,num_microbatches=8", "at least 2 samples on all data ranks, met 1; nearest: 2"),
    ],
)
def test_modules_that_no_program_says_are_refused(
    kind: str, words: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=text):
        capture_kind(kind, words, monkeypatch)
