"""Slices of a torus pod: the shape of the slice that a job gets, and the links between its chips.

A slice has the most cube-like shape that fits into its pod. An axis closes to a ring where its length is a multiple
of ``ring``; pods with three axes consist of cubes joined by optical switches, so that all axes close or none
(jax-ml/scaling-book, tpus.md).
"""

from collections.abc import Iterator, Sequence
from math import prod

Shape = tuple[int, ...]


def slice_shape(devices: int, pod: Sequence[int], ring: int) -> Shape:
    """Return the lengths of the axes of a slice of ``devices`` chips, the shortest first.

    Shapes whose axes close are preferred, then the smallest sum of axes.

    Raises
    ------
    ValueError
        Where no shape of that many chips fits into the pod.

    Examples
    --------
    >>> slice_shape(512, (16, 16, 16), 4), slice_shape(192, (16, 16, 16), 4), slice_shape(32, (16, 16), 16)
    ((8, 8, 8), (4, 4, 12), (4, 8))
    """
    limits = sorted(pod)
    shapes = list(_shapes(devices, limits))
    if not shapes:
        fitting = _nearest(devices, limits)
        bounds = " x ".join(map(str, limits))
        raise ValueError(f"nodes * devices_per_node fill a grid within {bounds}, met {devices}; nearest: {fitting}")
    cubes = len(limits) == 3
    return min(shapes, key=lambda shape: (cubes and any(axis % ring for axis in shape), sum(shape), shape[-1]))


def closed_axes(shape: Shape, ring: int) -> tuple[bool, ...]:
    """Return for each axis whether it closes to a ring.

    >>> closed_axes((8, 16), 16), closed_axes((2, 4, 4), 4)
    ((False, True), (False, False, False))
    """
    closed = tuple(axis % ring == 0 for axis in shape)
    return closed if len(shape) < 3 else (all(closed),) * len(shape)


def slice_pairs(shape: Shape, closed: Sequence[bool]) -> tuple[tuple[int, int, int], ...]:
    """Return the wired pairs of a slice as (chip, chip, links), chips numbered along the last axis first.

    >>> slice_pairs((2, 2), (False, False))
    ((0, 1, 1), (0, 2, 1), (1, 3, 1), (2, 3, 1))
    """
    pairs = []
    for chip in range(prod(shape)):
        for axis, length in enumerate(shape):
            stride = prod(shape[axis + 1 :])
            place = chip // stride % length
            if place + 1 < length:
                pairs.append((chip, chip + stride, 1))
            elif closed[axis] and length > 2:
                pairs.append((chip - place * stride, chip, 1))
    return tuple(sorted(pairs))


def _factors(number: int, axes: int, least: int) -> Iterator[Shape]:
    """Yield every non-decreasing tuple of ``axes`` factors of at least ``min_factor`` whose product is ``number``."""
    if axes == 1:
        yield (number,)
        return
    factor = least
    while factor**axes <= number:
        if number % factor == 0:
            yield from ((factor, *rest) for rest in _factors(number // factor, axes - 1, factor))
        factor += 1


def _shapes(devices: int, limits: Sequence[int]) -> Iterator[Shape]:
    """Yield the shapes of ``devices`` chips that fit into ``limits``, which are sorted."""
    if devices <= prod(limits):
        shapes = _factors(devices, len(limits), 1)
        yield from (shape for shape in shapes if all(a <= b for a, b in zip(shape, limits, strict=True)))


def _nearest(devices: int, limits: Sequence[int]) -> int:
    """Return the largest number of chips that has a shape, up to ``devices`` and the whole pod."""
    return next(count for count in range(min(devices, prod(limits)), 0, -1) if any(_shapes(count, limits)))
