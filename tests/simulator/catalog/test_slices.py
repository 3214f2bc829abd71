"""Slices of a torus pod: shapes that are offered, chips wired to their neighbours, sizes that there are not."""

from math import ceil, prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.catalog import (
    cluster,
)
from meshwise.simulator.catalog.slices import closed_axes, slice_pairs, slice_shape
from meshwise.simulator.machine.topology import Torus

TPUS = {"tpu-v4": (16, 16, 16), "tpu-v5e": (16, 16), "tpu-v5p": (16, 20, 28), "tpu-v6e": (16, 16)}


@pytest.mark.parametrize("name", TPUS)
def test_a_torus_has_as_many_places_as_devices(name: str) -> None:
    a_node = cluster(name).first_node.devices
    for nodes in (1, 2, 4, 8, 16, 32):
        fabric = cluster(name, nodes).fabric
        assert isinstance(fabric, Torus)
        assert prod(fabric.shape) == nodes * a_node
    with pytest.raises(ValueError, match=r"fill a grid within .*; nearest: "):
        cluster(name, ceil(prod(TPUS[name]) / a_node) + 1)


@pytest.mark.parametrize(("name", "chips_a_nic"), [("tpu-v5p-slices", 1), ("tpu-v5e-slices", 4)])
@pytest.mark.parametrize("chips", [64, 256])
def test_slices_of_any_size_have_the_nics_of_their_hosts(name: str, chips_a_nic: int, chips: int) -> None:
    assert cluster(name, 2, chips).first_node.nics == chips // chips_a_nic


def test_slices_are_those_that_google_offers() -> None:
    assert [slice_shape(n, (16, 16, 16), 4) for n in (4, 8, 32, 128, 192)] == [
        (1, 2, 2), (2, 2, 2), (2, 4, 4), (4, 4, 8), (4, 4, 12),
    ]  # fmt: skip
    assert [slice_shape(n, (16, 16), 16) for n in (1, 8, 32, 128, 256)] == [(1, 1), (2, 4), (4, 8), (8, 16), (16, 16)]
    # axes close: of v4 where it is made of 4x4x4 cubes, of v5e where it spans the pod
    assert closed_axes((4, 4, 8), 4) == (True,) * 3
    assert closed_axes((2, 2, 4), 4) == (False,) * 3
    assert closed_axes((8, 16), 16) == (False, True)


@given(st.integers(1, 16))
def test_a_cube_is_the_shape_of_a_cubic_number(side: int) -> None:
    assert slice_shape(side**3, (16, 16, 16), 4) == (side,) * 3


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.data())
@settings(max_examples=1000, deadline=None)
def test_every_chip_is_wired_to_its_neighbours_on_every_axis(shape: list[int], data: st.DataObject) -> None:
    closed = [data.draw(st.booleans()) for _ in shape]
    pairs = slice_pairs(tuple(shape), closed)
    # an axis of n places has n - 1 steps, and one more where it closes to a ring of at least 3
    steps = [length - 1 + (ring and length > 2) for length, ring in zip(shape, closed, strict=True)]
    assert len(pairs) == sum(prod(shape) // length * step for length, step in zip(shape, steps, strict=True))
    assert len(set(pairs)) == len(pairs)
    for a, b, _ in pairs:
        places = [(a // stride % n, b // stride % n, n) for n, stride in zip(shape, _strides(shape), strict=True)]
        moved = [(x, y, n) for x, y, n in places if x != y]
        assert len(moved) == 1
        (x, y, n) = moved[0]
        assert abs(x - y) in (1, n - 1)


def _strides(shape: list[int]) -> list[int]:
    return [prod(shape[axis + 1 :]) for axis in range(len(shape))]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mi300x-8", 1, 9), "devices_per_node is at most 8 on mi300x-8, met 9"),
        (("dgx-h100", 0), "nodes and devices_per_node are at least 1, met 0 and 8"),
        (("tpu-v4", 1, 0), "nodes and devices_per_node are at least 1, met 1 and 0"),
        (("gb200-nvl72", 1, 6 * 4 + 1), "hosts(7) divide the devices(25) of a node"),
        (("tpu-v5p", 1_000_000, 4096), "fill a grid within 16 x 20 x 28, met 4096000000; nearest: 8960"),
        (("dgx-9000",), "cluster is one of"),
    ],
)
def test_sizes_that_cannot_be_built_say_why(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        cluster(*arguments)  # type: ignore[arg-type]
    assert message in str(caught.value)
