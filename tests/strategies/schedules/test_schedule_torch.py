"""Our published schedules are torch's, action by action."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torchs
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwise.strategies.schedules.rule import Placement
from meshwise.strategies.schedules.schedule import SCHEDULES, build_schedule

MULTI = {
    "interleaved": torchs.ScheduleInterleaved1F1B,
    "looped_bfs": torchs.ScheduleLoopedBFS,
    "interleaved_zero_bubble": torchs.ScheduleInterleavedZeroBubble,
    "zbv": torchs.ScheduleZBVZeroBubble,
    "dualpipev": torchs.ScheduleDualPipeV,
}
RANKS = [2, 3, 4, 5, 6, 7, 8, 16]


@contextmanager
def alone(ranks: int) -> Iterator[Callable[[int, int], PipelineStage]]:
    """Give stages of rank 0 of ``ranks`` that exist in name only."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield lambda stage, stages: PipelineStage(nn.Identity(), stage, stages, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def text(order: dict[int, list[Any]]) -> str:
    rows = ([str(a) for a in order[rank] if a is not None and a.is_compute_op] for rank in sorted(order))
    return "\n".join(" ".join(words) for words in rows)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", MULTI)
def test_order_of_several_stages_a_rank(name: str, ranks: int) -> None:
    rule, compared = SCHEDULES[name], 0
    with alone(ranks) as stage:
        for chunks in (2,) if rule.chunks[1] == 2 or ranks == 16 else (1, 2, 3):
            stages = ranks * chunks
            held = (0, stages - 1) if rule.placement is Placement.V else range(0, stages, ranks)
            for microbatches in {1, 3, ranks, ranks + 1, 2 * ranks, 2 * ranks + 1, 3 * ranks}:
                if rule.find_violation(ranks, microbatches, chunks) is None:
                    made = MULTI[name]([stage(index, stages) for index in held], microbatches)
                    assert str(build_schedule(name, ranks, microbatches, chunks)) == text(made.pipeline_order)
                    compared += 1
    assert compared >= 2


@pytest.mark.parametrize("ranks", RANKS)
def test_order_of_gpipe(ranks: int) -> None:
    with alone(ranks) as stage:
        for microbatches in (1, ranks, 3 * ranks):
            made = torchs.ScheduleGPipe(stage(0, ranks), microbatches)
            assert str(build_schedule("gpipe", ranks, microbatches)) == text(made._get_pipeline_order() or {})


@pytest.mark.parametrize("ranks", RANKS)
def test_order_of_1f1b(ranks: int) -> None:
    """torch 2.13's table counts the forwards of the last rank from 1; what its class runs counts from 0."""
    with alone(ranks) as stage:
        for microbatches in (ranks, ranks + 1, 3 * ranks):
            made = torchs.Schedule1F1B(stage(0, ranks), microbatches)
            *lines, last = text(made._get_pipeline_order() or {}).splitlines()
            words = [word for m in range(microbatches) for word in (f"{ranks - 1}F{m}", f"{ranks - 1}B{m}")]
            counted = [word for m in range(microbatches) for word in (f"{ranks - 1}F{m + 1}", f"{ranks - 1}B{m}")]
            assert last.split() in (words, counted)
            assert str(build_schedule("1f1b", ranks, microbatches)) == "\n".join([*lines, " ".join(words)])


def test_zb1p_is_the_interleaved_zero_bubble_of_one_chunk() -> None:
    for ranks in (2, 4, 8):
        for microbatches in (ranks, 3 * ranks):
            ours = build_schedule("interleaved_zero_bubble", ranks, microbatches, 1)
            assert build_schedule("zb1p", ranks, microbatches).orders == ours.orders


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_reads_what_we_print(name: str) -> None:
    rule = SCHEDULES[name]
    words = str(build_schedule(name, 2, 4, rule.chunks[0])).split()
    assert [str(torchs._Action.from_str(word)) for word in words] == words


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipev"])
def test_torch_refuses_what_we_refuse(name: str) -> None:
    refused = {"1f1b": (4, 3, 1), "zbv": (4, 8, 3), "dualpipev": (4, 7, 2)}[name]
    ranks, microbatches, chunks = refused
    assert SCHEDULES[name].find_violation(*refused) is not None
    with alone(ranks) as stage, pytest.raises(ValueError):
        if name == "1f1b":
            torchs.Schedule1F1B(stage(0, ranks), microbatches)
        else:
            stages = [stage(index * ranks, ranks * chunks) for index in range(chunks)]
            MULTI[name](stages, microbatches)
