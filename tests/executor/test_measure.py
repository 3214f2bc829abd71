"""Bytes of tensors are those of their storages, each once."""

import pytest

torch = pytest.importorskip("torch")

from executor.measure import _nbytes  # noqa: E402


def test_views_of_one_bucket_count_once() -> None:
    bucket = torch.zeros(100)
    assert _nbytes([bucket[:10], bucket[10:], torch.zeros(5)]) == 4 * 105
