"""Operators that the user has decided: how a pin is written, and which choices it leaves.

A pin names an operator, ``layers.attention`` for all layers or ``layers.0.attention`` for one, and says which
axes cut which of its dims: by name, or in the order of the dims that may be cut. All other dims are whole.
``tensor`` is the inner axis, inside a node; ``data``, or ``tensor_rows``, the outer one.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import NamedTuple

from simulator.operator_graph import Block, Operator, OperatorGraph
from strategies.mesh import DATA, OPERATOR_AXES, TENSOR_ROWS
from strategies.operators.choices import Cuts, cuttable, refused
from strategies.sharding import OperatorSharding

AXIS_NAMES = {DATA: TENSOR_ROWS} | {axis: axis for axis in OPERATOR_AXES}
"""What a pin calls the operator axes."""


class Pin(NamedTuple):
    """What the user has decided of an operator: the axes of each dim, by its name or its place among those to cut."""

    operator: str
    cuts: tuple[tuple[str | int, tuple[str, ...]], ...]


class Resolved(NamedTuple):
    """A pin of one operator of one occurrence of a block."""

    block: Block
    operator: Operator
    cuts: Cuts


def resolved(graph: OperatorGraph, pins: tuple[Pin, ...]) -> dict[str, Resolved]:
    """Return the pins by operator of an occurrence; one that names an occurrence goes before one that names a block.

    Raises
    ------
    ValueError
        Where an operator, dim or axis does not exist; the message offers the nearest.
    """
    found: dict[str, Resolved] = {}
    for pin in sorted(pins, key=lambda each: each.operator.count(".")):
        targets = list(_named(graph, pin.operator))
        if not targets:
            raise ValueError(_unknown(graph, pin.operator))
        cuts = _cuts(pin, *targets[0][1:])
        found |= {name: Resolved(block, operator, cuts) for name, block, operator in targets}
    return found


def _named(graph: OperatorGraph, name: str) -> Iterator[tuple[str, Block, Operator]]:
    for occurrence, block in graph.occurrences:
        for operator in block.operators:
            if name in (f"{occurrence}.{operator.name}", f"{block.name}.{operator.name}"):
                yield f"{occurrence}.{operator.name}", block, operator


def _unknown(graph: OperatorGraph, name: str) -> str:
    known = dict.fromkeys(
        f"{owner}.{operator.name}"
        for occurrence, block in graph.occurrences
        for operator in block.operators
        for owner in (block.name, occurrence)
    )
    near = get_close_matches(name, known, 1, 0.0)
    return f"pin names an operator of the model, met {name}; nearest: {near[0]}"


def _cuts(pin: Pin, block: Block, operator: Operator) -> Cuts:
    dims = cuttable(block, operator)
    result: list[tuple[str, tuple[str, ...]]] = []
    for dim, axes in pin.cuts:
        if isinstance(dim, int) and dim >= len(dims):
            raise ValueError(f"{pin.operator} has {len(dims)} dims that may be cut ({', '.join(dims)}), met {dim + 1}")
        name = dims[dim] if isinstance(dim, int) else dim
        if name not in dims:
            near = f"; nearest: {get_close_matches(name, dims, 1, 0.0)[0]}" if dims else ""
            raise ValueError(f"of {pin.operator} may be cut: {', '.join(dims) or 'nothing'}, met {name}{near}")
        unknown = next((axis for axis in axes if axis not in AXIS_NAMES), None)
        if unknown is not None:
            near = get_close_matches(unknown, AXIS_NAMES, 1, 0.0)[0]
            raise ValueError(f"{pin.operator}: axis is one of {', '.join(AXIS_NAMES)}, met {unknown}; nearest: {near}")
        own = {AXIS_NAMES[axis] for axis in axes}
        result.append((name, tuple(axis for axis in OPERATOR_AXES if axis in own)))
    used = [axis for _, axes in result for axis in axes]
    twice = next((axis for axis in used if used.count(axis) > 1), None)
    if twice is not None:
        raise ValueError(f"{pin.operator}: an axis cuts one dim, met {twice} for two")
    order = {dim: place for place, dim in enumerate(dims)}
    return tuple(sorted(((dim, axes) for dim, axes in result if axes), key=lambda each: order[each[0]]))


def broken(pins: Mapping[str, Resolved], degrees: Mapping[str, int], microbatch: int) -> str:
    """Return the first rule that pins break on a mesh; empty where they break none."""
    for name, pin in pins.items():
        for dim, axes in pin.cuts:
            missing = next((axis for axis in axes if degrees.get(axis, 1) == 1), None)
            if missing is not None:
                return f"{name}: axis {missing} has one rank"
            found = refused(pin.block, pin.operator, dim, axes, degrees, microbatch)
            if found:
                return f"{name}: {found}"
    return ""


def admitted(
    pins: Mapping[str, Resolved], name: str, legal: tuple[OperatorSharding, ...]
) -> tuple[OperatorSharding, ...]:
    """Return the choices that pins leave of the legal ones of an operator of an occurrence."""
    if name not in pins:
        return legal
    pin = pins[name]
    own = {dim for dim, _ in pin.operator.dims}
    return tuple(each for each in legal if tuple((d, axes) for d, axes in each.cuts if d in own) == pin.cuts)
