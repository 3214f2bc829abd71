"""Rows that come from several ranks lie by expert."""

import pytest

torch = pytest.importorskip("torch")
from meshwise.executor.parallel.expert_parallel import order_by_expert  # noqa: E402


def test_rows_of_an_expert_come_together_from_all_sources() -> None:
    # source 0 sends one row to expert 0 and two to expert 1, source 1 two to expert 0: rows 0 | 1 2 | 3 4
    assert order_by_expert(torch.tensor([[1, 2], [2, 0]])).tolist() == [0, 3, 4, 1, 2]
