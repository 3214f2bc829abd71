"""A tape runs what a storage depends on, and nothing else."""

import pytest

pytest.importorskip("torch")
import torch

from meshwise.executor.starting.recorder import Recorder
from meshwise.executor.starting.tape import Tape


def test_operations_of_a_storage_are_those_that_it_depends_on() -> None:
    recorder = Recorder(Tape(0))
    with recorder:
        first, second = torch.empty(3).normal_(), torch.ones(3)
        first.fill_(2.0)
        second.add_(first)
        first.zero_()
    slot = recorder.find_slot(second)
    operations = [recorder.tape.operations[number] for number in recorder.tape.find_operations(slot.storage)]
    names = [operation.function._schema.name for operation in operations]
    assert names == ["aten::ones", "aten::fill_", "aten::add_"]
    assert recorder.tape.compute(slot).tolist() == [3.0, 3.0, 3.0]
    assert recorder.read(first).tolist() == [0.0, 0.0, 0.0]
