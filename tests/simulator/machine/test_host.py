"""Hosts and links that cannot be are rejected."""

import pytest

from meshwise.simulator.machine.host import Host, Pcie
from meshwise.simulator.machine.topology import Link

LINK, HOST = Link(1e-6, 1e9), Host("host", 1e12)


def test_hosts_and_links_reject_nonsense() -> None:
    with pytest.raises(ValueError, match="devices_per_switch is at least 1, met 0"):
        Pcie(LINK, 0)
    with pytest.raises(ValueError, match="numa_nodes are positive"):
        Host("host", 1e12, numa_nodes=0)
    with pytest.raises(ValueError, match="bandwidth > 0"):
        Link(0.0, 0.0)
