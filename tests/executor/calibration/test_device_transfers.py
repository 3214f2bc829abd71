"""What is timed between devices: groups of ranks."""

import pytest

torch = pytest.importorskip("torch")

from meshwise.executor.calibration.device_transfers import list_group_sizes  # noqa: E402


@pytest.mark.parametrize(("ranks", "sizes"), [(1, []), (2, [2]), (3, [2, 3]), (8, [2, 4, 8])])
def test_groups_are_powers_of_two_and_all(ranks: int, sizes: list[int]) -> None:
    assert list_group_sizes(ranks) == sizes
