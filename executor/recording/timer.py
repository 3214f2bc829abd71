"""Measures how long a device takes for work launched on it: by its own clock on CUDA, by the host's on a CPU."""

from collections.abc import Callable
from functools import cached_property
from math import ceil
from statistics import median
from time import perf_counter
from typing import Any

import torch

Run = Callable[[], Any]

MIN_REPETITIONS, MAX_REPETITIONS = 5, 100
"""Least and most repetitions of a kernel, of which the median is taken."""
FLUSH = 512 * 2**20
"""Bytes that are written before each repetition, to flush the L2: several times the largest (B200: 126 MB)."""
MAX_FLUSHES = 64


class Timer:
    """A stopwatch for one device; as it stands, by the host's clock, for one that works synchronously with the host."""

    device = "cpu"
    """The kind of device: ``"cuda"`` or ``"cpu"``."""

    def measure_once(self, run: Run) -> float:
        """Return the seconds of a single run, until the device has finished."""
        return self._time_runs(run, 1)

    def measure_median(self, run: Run, duration: float) -> float:
        """Return the median seconds of ``run`` from cold caches, repeated for about ``duration`` seconds.

        On the host it is after one unmeasured run.
        """
        run()
        first_time = self.measure_once(run)
        return median(self.measure_once(run) for _ in range(_count_repetitions(duration, first_time)))

    def measure_row(self, run: Run, count: int) -> float:
        """Return the mean seconds of ``count`` runs in a row, after ``count`` unmeasured runs."""
        for _ in range(count):
            run()
        return self._time_runs(run, count)

    def _time_runs(self, run: Run, count: int) -> float:
        start = perf_counter()
        for _ in range(count):
            run()
        return (perf_counter() - start) / count


class CudaTimer(Timer):
    """Reads CUDA events around each run, with the L2 flushed before.

    The flush takes longer than the host takes to launch a run, so the device never waits for the host between the two
    events.
    """

    device = "cuda"

    @cached_property
    def _flush(self) -> tuple[Run, float]:
        """The function that flushes the L2, and its seconds; its memory is allocated on first use."""
        flush = torch.empty(FLUSH, dtype=torch.int8, device="cuda").zero_
        flush()
        return flush, self._time_runs(flush, 10)

    def measure_median(self, run: Run, duration: float) -> float:
        """Return the median seconds of ``run`` from cold caches, repeated for about ``duration`` seconds."""
        flush, flush_time = self._flush
        run()
        torch.cuda.synchronize()
        start = perf_counter()
        run()
        launch_time = perf_counter() - start
        torch.cuda.synchronize()
        run_time = perf_counter() - start
        flushes = min(1 + ceil(launch_time / flush_time), MAX_FLUSHES)
        events = [
            (_make_event(), _make_event()) for _ in range(_count_repetitions(duration, run_time + flushes * flush_time))
        ]
        for begin, end in events:
            for _ in range(flushes):
                flush()
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return median(_read_seconds(begin, end) for begin, end in events)

    def measure_once(self, run: Run) -> float:
        """Return the seconds of a single run with the host's part, until the device has finished."""
        torch.cuda.synchronize()
        start = perf_counter()
        run()
        torch.cuda.synchronize()
        return perf_counter() - start

    def _time_runs(self, run: Run, count: int) -> float:
        begin, end = _make_event(), _make_event()
        begin.record()
        for _ in range(count):
            run()
        end.record()
        torch.cuda.synchronize()
        return _read_seconds(begin, end) / count


def make_timer(device: str) -> Timer:
    """Return the timer of a kind of device, ``"cuda"`` or ``"cpu"``."""
    return CudaTimer() if device == "cuda" else Timer()


def _make_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _read_seconds(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(begin.elapsed_time(end)) * 1e-3


def _count_repetitions(duration: float, seconds: float) -> int:
    return min(max(int(duration / max(seconds, 1e-9)), MIN_REPETITIONS), MAX_REPETITIONS)
