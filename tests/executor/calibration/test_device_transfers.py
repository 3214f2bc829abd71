"""What is timed between devices: groups of ranks, and copies that bring every byte."""

import pytest

torch = pytest.importorskip("torch")


from meshwise.executor.calibration.device_transfers import (  # noqa: E402
    DeviceCopy,
    HostCopy,
    list_group_sizes,
)


@pytest.mark.parametrize(("ranks", "sizes"), [(1, []), (2, [2]), (3, [2, 3]), (8, [2, 4, 8])])
def test_groups_are_powers_of_two_and_all(ranks: int, sizes: list[int]) -> None:
    assert list_group_sizes(ranks) == sizes


def test_copies_bring_every_byte() -> None:
    for kernel in (DeviceCopy(100), HostCopy(100), HostCopy(100, to_device=False, pinned=False)):
        assert int(kernel.prepare("cpu")().sum()) == 100
