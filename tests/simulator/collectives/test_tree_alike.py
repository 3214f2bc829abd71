"""On a crossbar one level of a tree stands for all: the same as level by level."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.accelerator import Accelerator
from simulator.cluster import homogeneous
from simulator.collective import phases
from simulator.collective_kinds import Algorithm, Collective
from simulator.host import Host
from simulator.link import Link

DEVICE = Accelerator("d", (("fp32", 1e12),), 1e9, 1e12)


@given(st.integers(2, 9), st.integers(1, 4), st.integers(1, 4), st.integers(1, 2))
@settings(max_examples=200, deadline=None)
def test_one_level_is_as_all_levels(nodes: int, devices: int, nics: int, groups: int) -> None:
    inside, outside = Link(1e-6, 1e11, 1e-5), Link(3e-6, 1e10, 1e-5)
    alike = homogeneous("alike", DEVICE, Host("h", 1e9), nodes * groups, devices, inside, outside, nics)
    ((node, count),) = alike.nodes
    twins = replace(alike, nodes=((node, 1), (node, count - 1)))  # two kinds of node that are the same
    members = np.arange(nodes * groups * devices).reshape(groups, -1)
    short, long = (phases(c, Collective.ALL_REDUCE, Algorithm.TREE, members)[0] for c in (alike, twins))
    assert short.group.tolist() == long.group.tolist() and short.link.tolist() == long.link.tolist()
    assert short.load == pytest.approx(long.load, rel=1e-12)
    assert short.latency == pytest.approx(long.latency, rel=1e-12)
