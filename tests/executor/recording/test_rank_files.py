from pathlib import Path

from meshwise.executor.recording.rank_files import Heartbeat, make_teller


def test_an_operation_is_told_once_however_often_one_looks(tmp_path: Path) -> None:
    told: list[str] = []
    look = make_teller(tmp_path, told.append)
    look()  # no beat yet
    beats = Heartbeat(tmp_path, 0)
    for operation in ("matmul", "matmul", "copy"):
        beats.beat(operation)
        look()
        look()
    assert told == ["start", "matmul", "copy"]


def test_nobody_needs_to_be_told(tmp_path: Path) -> None:
    make_teller(tmp_path, None)()
