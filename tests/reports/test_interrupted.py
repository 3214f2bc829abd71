"""An interrupt while a picture or a trace is written leaves no half of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwise import load
from meshwise.reports.pictures.figure import open_sheet
from meshwise.reports.traces.chrome import write_trace
from meshwise.reports.traces.perfetto import write_perfetto


def _draw(timeline: Any, path: Path) -> None:
    with open_sheet(path):
        pass


def _stop(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def _cut(self: Any, path: Path, **_: Any) -> None:
    path.write_bytes(b"\x89PNG")
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("write", "name", "place", "stop"),
    [
        (write_trace, "step.json", "meshwise.reports.traces.chrome._texts", _stop),
        (write_perfetto, "step.pftrace", "meshwise.reports.traces.perfetto._Layout.list_events", _stop),
        (_draw, "step.png", "matplotlib.figure.Figure.savefig", _cut),
    ],
)
def test_nothing_is_left_of_a_file_that_was_interrupted(
    write: Callable[[Any, Path], None],
    name: str,
    place: str,
    stop: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timeline = load("local/dp2").simulate().timeline
    monkeypatch.setattr(place, stop)
    with pytest.raises(KeyboardInterrupt):
        write(timeline, tmp_path / name)
    assert list(tmp_path.iterdir()) == []
