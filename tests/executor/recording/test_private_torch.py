"""Our schedules are torch's."""

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.pipelining import PipelineStage  # noqa: E402
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from meshwise.strategies.schedules.schedule import build_schedule  # noqa: E402


def torch_order(name: str, ranks: int, microbatches: int, chunks: int = 1) -> str:
    """Return torch's own order of a schedule as the text that `Schedule` prints: one line for each pipeline rank.

    Makes and destroys a fake process group, so no other may exist. torch 2.13's table for 1F1B counts the forwards of
    the last rank from 1, while the order that its class runs counts from 0.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        device = torch.device("cpu")
        stages = [PipelineStage(nn.Identity(), chunk * ranks, ranks * chunks, device) for chunk in range(chunks)]
        if name == "interleaved":
            order = ScheduleInterleaved1F1B(list(stages), microbatches).pipeline_order
        else:
            kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[name]
            order = kind(stages[0], microbatches)._get_pipeline_order() or {}
    finally:
        dist.destroy_process_group()
    passes = ([str(a) for a in order[rank] if a is not None and a.is_compute_op] for rank in range(ranks))
    return "\n".join(" ".join(words) for words in passes)


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
