"""A recorder gives tensors no memory, and values where a program reads them."""

import pytest

pytest.importorskip("torch")
import torch

from meshwise.executor.starting.recorder import Recorder, UnrecordableError
from meshwise.executor.starting.tape import Tape


def test_tensors_have_values_where_they_are_read() -> None:
    recorder = Recorder(Tape(0))
    with recorder:
        x = torch.arange(4.0)
        values = [float(x[1]), x.tolist(), x.numpy().sum(), x[x > 1].tolist()]
    assert x.is_meta and recorder.knows(x) and not recorder.reason
    assert values == [1.0, [0.0, 1.0, 2.0, 3.0], 6.0, [2.0, 3.0]]


def test_a_refusal_is_kept() -> None:
    recorder = Recorder(Tape(0))
    with recorder, pytest.raises(UnrecordableError, match="resize_"):
        torch.ones(3).resize_(5)
    assert "changes the memory" in recorder.reason
