"""Clocks: how often a run is timed, from which state of the caches, and between which events."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from meshwise.executor.recording import timer as device_timer  # noqa: E402
from meshwise.executor.recording.timer import MAX_REPETITIONS, MIN_REPETITIONS, CudaTimer, Timer  # noqa: E402


@pytest.mark.parametrize(("share", "timed"), [(0.0, MIN_REPETITIONS), (1e9, MAX_REPETITIONS)])
def test_a_host_times_between_the_least_and_the_most_repetitions(share: float, timed: int) -> None:
    runs: list[int] = []
    Timer().measure_median(lambda: runs.append(1), share)
    assert len(runs) == timed + 2  # one to warm up, and one to tell how often


def test_runs_in_a_row_come_after_as_many_that_do_not_count() -> None:
    runs: list[int] = []
    assert Timer().measure_row(lambda: runs.append(1), 7) > 0
    assert len(runs) == 14


class Device:
    """A pretended GPU with a clock of its own, in ms: ``log`` is what was launched on it."""

    def __init__(self) -> None:
        self.now, self.log = 0.0, list[str]()

    def run(self, name: str, milliseconds: float) -> None:
        self.now += milliseconds
        self.log.append(name)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = device.now
            device.log.append("event")

        def elapsed_time(self, end: Any) -> float:
            return float(end.at - self.at)

    class Buffer:
        def zero_(self) -> None:
            device.run("flush", 0.1)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: device.log.append("wait"))
    monkeypatch.setattr(device_timer.torch, "empty", lambda *_, **__: Buffer())
    return device


def flushing() -> CudaTimer:
    """Return a clock that knows how long a flush takes."""
    timer = CudaTimer()
    timer.measure_median(lambda: None, duration=0.0)
    return timer


def test_cuda_takes_no_memory_before_it_flushes(gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_timer.torch, "empty", lambda *_, **__: pytest.fail("memory was taken"))
    assert CudaTimer().measure_once(lambda: None) >= 0
    assert CudaTimer().measure_row(lambda: gpu.run("run", 1.0), 2) > 0


def test_cuda_events_enclose_the_run_alone(gpu: Device) -> None:
    timer = flushing()
    times = iter([50.0, 50.0, 3.0, 9.0, 4.0, 5.0, 6.0])  # two to warm up
    gpu.log.clear()
    assert timer.measure_median(lambda: gpu.run("run", next(times)), duration=0.0) == pytest.approx(
        5e-3
    )  # of 3 9 4 5 6 ms
    measured = gpu.log[gpu.log.index("flush") :]
    places = [place for place, what in enumerate(measured) if what == "run"]
    assert len(places) == MIN_REPETITIONS
    assert all(measured[place - 2 : place + 2] == ["flush", "event", "run", "event"] for place in places)


def test_cuda_flushes_for_longer_than_the_host_launches(gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    timer = flushing()  # takes 0.1 ms
    clock = iter([0.0, 0.00035, 0.00040])  # launched in 0.35 ms, done after 0.40
    monkeypatch.setattr(device_timer, "perf_counter", lambda: next(clock))
    gpu.log.clear()
    timer.measure_median(lambda: gpu.run("run", 1.0), duration=0.0)
    assert gpu.log.count("flush") == MIN_REPETITIONS * 5  # 0.4 ms would be enough, 0.5 are longer for certain


def test_cuda_in_a_row_has_no_pause(gpu: Device) -> None:
    timer = CudaTimer()
    gpu.log.clear()
    assert timer.measure_row(lambda: gpu.run("run", 2.0), 3) == pytest.approx(2e-3)
    assert gpu.log == [*["run"] * 3, "event", *["run"] * 3, "event", "wait"]
