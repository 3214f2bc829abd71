"""Arrangements of a value's named dims as torch dims, and the views that lead from one to another."""

from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from meshwise.executor.capture.captured import NamedDims


class View(NamedTuple):
    """A method of a tensor that arranges its dims, with its arguments: ``reshape``, ``permute`` or ``expand``."""

    method: str
    arguments: tuple[int, ...]


def list_views(source: NamedDims, target: NamedDims, sizes: Mapping[str, int]) -> tuple[View, ...]:
    """Return the views, one after the other, that arrange a value as ``target``; its new dims are repeated values.

    >>> sizes = {"batch": 2, "sequence": 3, "heads": 4, "width": 5}
    >>> packed = (("batch",), ("sequence",), ("heads", "width"))
    >>> list_views(packed, (("batch",), ("heads",), ("sequence",), ("width",)), sizes)
    (View(method='reshape', arguments=(2, 3, 4, 5)), View(method='permute', arguments=(0, 2, 1, 3)))
    >>> list_views((("heads",),), (("batch",), ("heads",)), sizes)
    (View(method='reshape', arguments=(1, 4)), View(method='expand', arguments=(2, 4)))
    >>> list_views(packed, packed, sizes)
    ()
    """
    return tuple(_list_views(source, target, sizes)) if source != target else ()


def _list_views(source: NamedDims, target: NamedDims, sizes: Mapping[str, int]) -> Iterator[View]:
    present_dims = {dim for group in source for dim in group}
    target_dims = [dim for group in target for dim in group]
    shape = [_count(group, sizes) for group in source]
    units = _list_units(source, [dim for dim in target_dims if dim in present_dims])
    order = sorted(range(len(units)), key=lambda index: target_dims.index(units[index][0]))
    if order != list(range(len(units))):
        unit_shape = [_count(unit, sizes) for unit in units]
        if unit_shape != shape:
            yield View("reshape", tuple(unit_shape))
        yield View("permute", tuple(order))
        shape = [unit_shape[index] for index in order]
    target_shape = [_count(group, sizes) for group in target]
    new_dims = {dim for dim in target_dims if dim not in present_dims}
    if new_dims:
        # a group of repeated dims alone is expanded as it is, any other is split for it
        pieces = [piece for group in target for piece in _split_group(group, new_dims)]
        single_shape = [1 if new_dims.intersection(piece) else _count(piece, sizes) for piece in pieces]
        if single_shape != shape:
            yield View("reshape", tuple(single_shape))
        shape = [_count(piece, sizes) for piece in pieces]
        if shape != single_shape:
            yield View("expand", tuple(shape))
    if shape != target_shape:
        yield View("reshape", tuple(target_shape))


def _split_group(group: tuple[str, ...], new_dims: set[str]) -> list[tuple[str, ...]]:
    """Return the runs of a group of which all dims are new, or none."""
    if not group:
        return [group]
    runs: list[tuple[str, ...]] = []
    for dim in group:
        if runs and (runs[-1][-1] in new_dims) == (dim in new_dims):
            runs[-1] = (*runs[-1], dim)
        else:
            runs.append((dim,))
    return runs


def _list_units(source: NamedDims, target_dims: list[str]) -> list[tuple[str, ...]]:
    """Return the runs of dims that stay side by side, none longer than a torch dim of the source."""
    units: list[tuple[str, ...]] = []
    for group in source:
        for place, dim in enumerate(group):
            is_joined = place > 0 and target_dims.index(dim) == target_dims.index(group[place - 1]) + 1
            if is_joined:
                units[-1] = (*units[-1], dim)
            else:
                units.append((dim,))
    return units


def _count(dims: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    return prod(sizes[dim] for dim in dims)


def apply_views(tensor: Tensor, views: tuple[View, ...]) -> Tensor:
    """Return a tensor after views."""
    for view in views:
        tensor = getattr(tensor, view.method)(view.arguments)
    return tensor


def emit_views(graph: Graph, node: Node, views: tuple[View, ...]) -> Node:
    """Add views to a graph, and return the last one."""
    for view in views:
        node = graph.call_function(_FUNCTIONS[view.method], (node, view.arguments))
    return node


_FUNCTIONS = {"reshape": torch.reshape, "permute": torch.permute, "expand": torch.broadcast_to}
