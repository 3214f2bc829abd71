"""Our schedules are torch's."""

import pytest

pytest.importorskip("torch")

from meshwise.executor.recording.private_torch import torch_order
from meshwise.strategies.schedules.schedule import build_schedule


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)])
def test_order_is_torchs(name: str, chunks: int, ranks: int) -> None:
    for microbatches in (ranks, 2 * ranks):
        expected = str(build_schedule(name, ranks, microbatches, chunks))
        found = torch_order(name, ranks, microbatches, chunks)
        if name == "1f1b":  # torch's table counts the last rank's forwards from 1
            *lines, last = found.splitlines()
            for index in range(microbatches):
                last = last.replace(f"{ranks - 1}F{index + 1} ", f"{ranks - 1}F{index} ", 1)
            found = "\n".join([*lines, last])
        assert found == expected
