"""Buckets leave in one order as their gradients come, whatever their size, and become means over ranks."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist
from torch import nn

from meshwise.executor.stages import buckets as buckets_file
from meshwise.executor.stages.buckets import GradientBuckets


@pytest.fixture
def group(tmp_path: Path) -> object:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_gradients_are_reduced_beneath_the_last_backward_alone(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets_file, "BUCKET_BYTES", 24)  # a layer of 2 x 2 numbers and 2 in fp32
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    sizes: list[int] = []
    all_reduce = dist.all_reduce

    def note(tensor: torch.Tensor, *arguments: object, **options: object) -> object:
        sizes.append(tensor.numel())
        return all_reduce(tensor, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(dist, "all_reduce", note)
    buckets = GradientBuckets(module.parameters(), group)
    module(torch.ones(1, 2)).sum().backward()
    assert sizes == []
    expected = [2 * parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    buckets.begin_last()
    module(torch.ones(1, 2)).sum().backward()
    assert sizes == [6, 6, 6]  # before anyone waits
    buckets.finish()
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    assert all(map(torch.equal, gradients, expected))


def test_a_parameter_without_gradient_stops_nothing(group: dist.ProcessGroup) -> None:
    module = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    buckets = GradientBuckets(module.parameters(), group)
    buckets.begin_last()
    module[0](torch.ones(1, 2)).sum().backward()
    buckets.finish()
    assert module[0].weight.grad is not None and module[1].weight.grad is None
