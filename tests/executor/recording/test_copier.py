"""Copies wait for what is computed before them, and what is computed after them waits for them."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from meshwise.executor.recording.accelerator import AtOnce, Streams  # noqa: E402


class _Stream:
    """A stream that notes what is asked of it."""

    def __init__(self, name: str, asked: list[Any]) -> None:
        self.name, self.asked = name, asked

    def wait_stream(self, other: "_Stream") -> None:
        self.asked.append((self.name, "waits for", other.name))

    def record_event(self) -> str:
        return f"end of {self.name}"

    def wait_event(self, event: str) -> None:
        self.asked.append((self.name, "waits for", event))


class _Tensor(SimpleNamespace):
    def copy_(self, source: Any, non_blocking: bool) -> None:
        self.asked.append(("copy", source.name, self.name, non_blocking))


def test_each_direction_has_a_stream_that_waits_for_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    names = iter(("outward", "inward"))
    computing = _Stream("computing", asked)

    @contextmanager
    def on(stream: _Stream) -> Any:
        asked.append(("on", stream.name))
        yield

    monkeypatch.setattr("torch.cuda.Stream", lambda device: _Stream(next(names), asked))
    monkeypatch.setattr("torch.cuda.current_stream", lambda: computing)
    monkeypatch.setattr("torch.cuda.stream", on)
    streams = Streams(torch.device("cuda", 0))
    device, host = (_Tensor(name=name, asked=asked, is_cuda=name == "device") for name in ("device", "host"))
    streams.wait(streams.copy(device, host))
    streams.wait(streams.copy(host, device))
    assert asked == [
        ("outward", "waits for", "computing"),
        ("on", "outward"),
        ("copy", "device", "host", True),
        ("computing", "waits for", "end of outward"),
        ("inward", "waits for", "computing"),
        ("on", "inward"),
        ("copy", "host", "device", True),
        ("computing", "waits for", "end of inward"),
    ]


def test_a_core_copies_in_step() -> None:
    source, target = torch.arange(3.0), torch.zeros(3)
    copier = AtOnce()
    copier.wait(copier.copy(source, target))
    assert target.tolist() == [0.0, 1.0, 2.0]
