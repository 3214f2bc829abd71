"""Bytes of tensors are those of their storages, each once; clocks are joined where a mark is narrow."""

import pytest

torch = pytest.importorskip("torch")

from meshwise.executor.recording.profiled import _find_offset  # noqa: E402
from meshwise.executor.recording.trace import TraceEvent  # noqa: E402
from meshwise.executor.training.measure import nbytes  # noqa: E402


def test_views_of_one_bucket_count_once() -> None:
    bucket = torch.zeros(100)
    assert nbytes([bucket[:10], bucket[10:], torch.zeros(5)]) == 4 * 105


def test_a_pause_in_a_mark_does_not_move_the_profilers_clock() -> None:
    # the profiler's clock runs 1,000 behind; the host paused for 500 before the first mark was noted
    marks = [(2000, 2512), (3000, 3010)]
    events = [TraceEvent("meshwise mark 0", 1502, 1508, 0), TraceEvent("meshwise mark 1", 2002, 2008, 0)]
    assert _find_offset(marks, events) == 1000
