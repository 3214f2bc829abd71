"""Layers of stages on devices of different speed, by hand."""

from dataclasses import replace

import pytest

from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.choices import paced, paces

from ..problems import problem


def mixed(layers: int) -> Problem:
    """Return a problem on a node of two fast devices and one of two that take twice as long for everything."""
    small = problem(nodes=2, devices=2, layers=layers)
    ((node, _),) = small.cluster.nodes
    fast = node.accelerator
    slow = replace(
        fast,
        name="slow",
        peak_flops=tuple((dtype, rate / 2) for dtype, rate in fast.peak_flops),
        memory_bandwidth=fast.memory_bandwidth / 2,
    )
    nodes = ((node, 1), (replace(node, accelerator=slow), 1))
    return replace(small, cluster=replace(small.cluster, nodes=nodes))


def test_a_device_that_takes_twice_as_long_gets_half_as_many_layers() -> None:
    # fast takes 1 a layer and slow 2: with 6 and 3 layers both end at 6. The order of ranks puts a stage on each node
    layout = Layout(data=2, pipeline=2)
    fast, slow = paces(mixed(9), layout).layers
    assert slow == pytest.approx(2 * fast, rel=1e-6)
    counts = paced(mixed(9), layout, (0, 1))
    assert sum(counts) == 9
    assert counts in ((6, 3), (7, 2))  # what is no layer runs on the last stage too


def test_of_microbatches_of_several_sizes_the_largest_counts() -> None:
    uneven, even = Layout(data=2, pipeline=2, microbatch=(1, 4)), Layout(data=2, pipeline=2, microbatch=4)
    assert paces(mixed(9), uneven) == paces(mixed(9), even)


def test_layouts_on_the_same_devices_have_the_same_paces_whatever_their_schedule() -> None:
    plain = Layout(data=2, pipeline=2)
    assert paces(mixed(4), plain) == paces(mixed(4), replace(plain, zero=1, schedule="gpipe"))
