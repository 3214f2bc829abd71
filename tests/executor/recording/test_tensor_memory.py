"""The peak of a body is that of the tensors that it has at once."""

from threading import Thread

import pytest

pytest.importorskip("torch")

import torch

from meshwise.executor.recording.tensor_memory import count_bytes, record_tensor_peak


def test_the_peak_is_that_of_tensors_at_once() -> None:
    with record_tensor_peak() as peak:
        first = torch.empty(1000)
        second = torch.empty(500)
        del first
        third = torch.empty(300)
    assert peak.size == 1500 * 4 and len(second) + len(third) == 800


def test_backward_frees_what_forward_kept() -> None:
    weight = torch.ones(256, 256, requires_grad=True)
    x = torch.ones(64, 256)
    with record_tensor_peak() as peak:
        (x @ weight).relu().sum().backward()  # two results of 64 x 256, and a gradient of each and of the weight
    assert weight.numel() * 4 <= peak.size <= (4 * x.numel() + 2 * weight.numel()) * 4


def test_storages_count_once() -> None:
    table = torch.zeros(8, 2)
    assert count_bytes([table, table.T, table[1:]]) == 64


def test_what_another_thread_frees_is_not_counted_any_more() -> None:
    with record_tensor_peak(keeps_results=False) as peak:
        for _ in range(3):
            tensors = [torch.empty(1000)]
            thread = Thread(target=tensors.clear)
            thread.start()
            thread.join()
        torch.empty(500)
    assert peak.size == 4 * 1000
