"""Measures how long a device takes for work launched on it: by its own clock on CUDA, by the host's on a CPU."""

from collections.abc import Callable
from functools import cached_property
from math import ceil
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import torch

Run = Callable[[], Any]

LEAST, MOST = 5, 100
"""Least and most repetitions of a kernel, of which the median is taken."""
FLUSH = 512 * 2**20
"""Bytes that are written before each repetition, to flush the L2: several times the largest (B200: 126 MB)."""
MOST_FLUSHES = 64


class Timer(Protocol):
    """A stopwatch for one device."""

    device: str
    """The kind of device: ``"cuda"`` or ``"cpu"``."""

    def once(self, run: Run) -> float:
        """Return the seconds of a single run, until the device has finished."""
        ...

    def median(self, run: Run, share: float) -> float:
        """Return the median seconds of ``run`` from cold caches, repeated for about ``duration`` seconds."""
        ...

    def in_a_row(self, run: Run, count: int) -> float:
        """Return the mean seconds of ``count`` runs in a row, after ``count`` unmeasured runs."""
        ...


class CudaTimer:
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
        return flush, self._between(flush, 10)

    def median(self, run: Run, share: float) -> float:
        """Return the median seconds of ``run`` from cold caches, repeated for about ``duration`` seconds."""
        flush, flush_time = self._flush
        run()
        torch.cuda.synchronize()
        start = perf_counter()
        run()
        launched = perf_counter() - start
        torch.cuda.synchronize()
        whole = perf_counter() - start
        flushes = min(1 + ceil(launched / flush_time), MOST_FLUSHES)
        events = [(_event(), _event()) for _ in range(_count(share, whole + flushes * flush_time))]
        for begin, end in events:
            for _ in range(flushes):
                flush()
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return median(_seconds(begin, end) for begin, end in events)

    def in_a_row(self, run: Run, count: int) -> float:
        """Return the mean seconds of ``count`` runs in a row, after ``count`` unmeasured runs."""
        for _ in range(count):
            run()
        return self._between(run, count)

    def once(self, run: Run) -> float:
        """Return the seconds of a single run with the host's part, until the device has finished."""
        torch.cuda.synchronize()
        start = perf_counter()
        run()
        torch.cuda.synchronize()
        return perf_counter() - start

    def _between(self, run: Run, count: int) -> float:
        begin, end = _event(), _event()
        begin.record()
        for _ in range(count):
            run()
        end.record()
        torch.cuda.synchronize()
        return _seconds(begin, end) / count


class HostTimer:
    """Reads the host's clock around each run, for a device that works synchronously with the host."""

    device = "cpu"

    def median(self, run: Run, share: float) -> float:
        """Return the median seconds of ``run`` after one unmeasured run, repeated for about ``duration`` seconds."""
        run()
        first = self.once(run)
        return median(self.once(run) for _ in range(_count(share, first)))

    def in_a_row(self, run: Run, count: int) -> float:
        """Return the mean seconds of ``count`` runs in a row, after ``count`` unmeasured runs."""
        self._between(run, count)
        return self._between(run, count)

    def once(self, run: Run) -> float:
        """Return the seconds of a single run."""
        return self._between(run, 1)

    def _between(self, run: Run, count: int) -> float:
        start = perf_counter()
        for _ in range(count):
            run()
        return (perf_counter() - start) / count


def device_timer(device: str) -> Timer:
    """Return the timer of a kind of device, ``"cuda"`` or ``"cpu"``."""
    return CudaTimer() if device == "cuda" else HostTimer()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _seconds(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(begin.elapsed_time(end)) * 1e-3


def _count(share: float, seconds: float) -> int:
    return min(max(int(share / max(seconds, 1e-9)), LEAST), MOST)
