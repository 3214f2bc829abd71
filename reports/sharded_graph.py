"""How a plan cuts every operator, and what moves between them: a picture of the operator graph."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from reports.figure import INK, QUIET, axes, header, sheet
from reports.text import plain
from simulator.collective_kinds import Collective
from simulator.operator_graph import Operator, OperatorGraph
from simulator.units import format_size
from strategies.lowering.operator import BlockLayout
from strategies.plan import Plan
from strategies.sharding import ShardingSpec, after, redistribute

COLOURS = {
    Collective.ALL_REDUCE: "#CF4A16",
    Collective.REDUCE_SCATTER: "#D58A00",
    Collective.ALL_GATHER: "#1D5B96",
    Collective.ALL_TO_ALL: "#5A2A82",
}
"""By the collective that costs most of those on an edge."""
_ORDER = tuple(COLOURS)
_CUT, _WHOLE = "#DCEBF7", "#F4F4F4"
_BOX, _GAP, _TOP, _WIDTH = 46, 34, 136, 320
_LEAST_HEIGHT = 420
_MOST_OPERATORS = 60
_PITCH, _MOST_BLOCKS = 520, 3
Point = tuple[float, float]
Moves = tuple[tuple[Collective, int], ...]
"""Collectives, each with its bytes."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor from the operator that makes it to one that reads it, by their places in the block."""

    source: int
    target: int
    forward: Moves
    backward: Moves

    @property
    def dearest(self) -> Collective | None:
        """The collective that gives the edge its colour."""
        kinds = [kind for kind, _ in (*self.forward, *self.backward)]
        return min(kinds, key=_ORDER.index) if kinds else None


def edges(layout: BlockLayout) -> tuple[Edge, ...]:
    """Return the edges inside a block, each with what its redistribution runs forward and backward, and bytes."""
    made = {name: place for place, operator in enumerate(layout.block.operators) for name in operator.outputs}
    return tuple(
        Edge(made[name], place, *_moves(layout, operator, name))
        for place, operator in enumerate(layout.block.operators)
        for name in operator.inputs
        if name in made and made[name] < place
    )


def _moves(layout: BlockLayout, operator: Operator, name: str) -> tuple[Moves, Moves]:
    have, wanted = layout.produced[name], layout.wanted(operator, name)
    back = layout.shardings[operator.name].of_gradient(layout.block.tensor[name])
    flows = layout.block.tensor[name].has_gradient
    backward = _collectives(layout, name, back, have.complete) if flows else ()
    return tuple(_collectives(layout, name, have, wanted)), tuple(backward)


def _collectives(
    layout: BlockLayout, name: str, source: ShardingSpec, target: ShardingSpec
) -> Iterator[tuple[Collective, int]]:
    current = source
    for move in redistribute(source, target):
        if layout.mesh.size(move.axis) > 1:
            whole = move.before(current).without(move.axis)
            yield move.collective, layout.tensor_bytes(name, whole)
        current = after(current, move)


def draw_sharded_graph(graph: OperatorGraph, plan: Plan, path: Path | str) -> None:
    """Draw operators from top to bottom with their cuts, and what moves between them, for the first three blocks.

    Parameters
    ----------
    path
        Where to write it: .png or .svg.

    Raises
    ------
    ValueError
        Where a block has more operators than a picture shows.
    """
    blocks = graph.blocks[:_MOST_BLOCKS]
    most = max(len(block.operators) for block in blocks)
    if most > _MOST_OPERATORS:
        raise ValueError(f"a picture shows blocks of at most {_MOST_OPERATORS} operators, met {most}")
    shardings = {sharding.operator: sharding for sharding in plan.shardings}
    height = max(_LEAST_HEIGHT, _TOP + most * (_BOX + _GAP) + 40)
    with sheet(path, height) as figure:
        header(figure, f"{plain(graph.name, 60)}: how every operator is cut", plan.describe())
        ax = axes(figure, 0, 0, 1600, height)
        ax.set_xlim(0, 1600)
        ax.set_ylim(height, 0)
        ax.set_axis_off()
        ax.patch.set_alpha(0.0)
        for column, block in enumerate(blocks):
            layout = BlockLayout(block, plan.mesh, shardings, plan.sizes[0])
            _draw_block(ax, layout, 40 + (1600 - _PITCH * len(blocks)) / 2 + column * _PITCH)
        _legend(ax, height)


def _draw_block(ax: Axes, layout: BlockLayout, left: float) -> None:
    block = layout.block
    title = f"{plain(block.name, 30)}" + (f" x {block.repeat}" if block.repeat > 1 else "")
    ax.text(left + 110, _TOP - 14, title, fontsize=13, fontweight="bold", va="bottom")
    for place, operator in enumerate(block.operators):
        _draw_operator(ax, layout, operator, left + 110, _top(place))
    lanes = 0
    for edge in edges(layout):
        lanes += _draw_edge(ax, edge, left + 110, lanes)


def _top(place: int) -> float:
    return _TOP + place * (_BOX + _GAP)


def _draw_operator(ax: Axes, layout: BlockLayout, operator: Operator, left: float, top: float) -> None:
    sharding = layout.shardings[operator.name]
    cuts = [(dim, axes) for dim, axes in sharding.cuts if any(layout.mesh.size(axis) > 1 for axis in axes)]
    box = FancyBboxPatch(
        (left, top),
        _WIDTH,
        _BOX,
        boxstyle="round,pad=0,rounding_size=6",
        facecolor=_CUT if cuts else _WHOLE,
        edgecolor=QUIET,
        linewidth=0.8,
    )
    ax.add_patch(box)
    ax.text(left + 10, top + 15, plain(operator.name, 34), fontsize=10, fontweight="bold", va="center", color=INK)
    text = ", ".join(f"{dim} by {' and '.join(axes)}" for dim, axes in cuts) or "whole on every rank"
    kept = [name for name in operator.parameters if layout.gathers_again(operator, name)]
    text += f"; {', '.join(kept)} gathered" if kept else ""
    ax.text(left + 10, top + 33, plain(text, 52), fontsize=8.5, va="center", color=QUIET)


def _draw_edge(ax: Axes, edge: Edge, left: float, lane: int) -> int:
    """Draw an edge; return 1 where it has a lane of its own beside the operators, as it passes some by."""
    colour = COLOURS[edge.dearest] if edge.dearest is not None else "#B8B8B8"
    width = 1.8 if edge.dearest is not None else 1.0
    near = edge.target == edge.source + 1
    if near:
        x, start, end = left + _WIDTH / 2, _top(edge.source) + _BOX, _top(edge.target)
        ax.add_patch(_arrow((x, start), (x, end), colour, width))
        _label(ax, edge, x + 10, (start + end) / 2, colour)
        return 0
    start, end = _top(edge.source) + _BOX * 0.75, _top(edge.target) + _BOX * 0.25
    bend = 14 + 12 * (lane % 7)
    ax.plot(
        [left, left - bend, left - bend], [start, start, end], color=colour, linewidth=width, solid_capstyle="round"
    )
    ax.add_patch(_arrow((left - bend, end), (left, end), colour, width))
    if edge.dearest is not None:
        _label(ax, edge, left - 104, end - 10, colour)
    return 1


def _arrow(start: Point, end: Point, colour: str, width: float) -> FancyArrowPatch:
    return FancyArrowPatch(
        start, end, color=colour, linewidth=width, arrowstyle="-|>", mutation_scale=9.0, shrinkA=0.0, shrinkB=0.0
    )


def _label(ax: Axes, edge: Edge, x: float, y: float, colour: str) -> None:
    parts = [*_words(edge.forward, "forward"), *_words(edge.backward, "backward")]
    if parts:
        ax.text(x, y, "; ".join(parts), fontsize=8, va="center", color=colour)


def _words(moves: Sequence[tuple[Collective, int]], way: str) -> Iterator[str]:
    if moves:
        names = ", ".join(f"{str(kind).replace('_', '-')} {format_size(size)}" for kind, size in moves)
        yield f"{way} {names}"


def _legend(ax: Axes, height: int) -> None:
    for index, (kind, colour) in enumerate(COLOURS.items()):
        x = 60 + 190 * index
        ax.plot([x, x + 30], [height - 22, height - 22], color=colour, linewidth=2.2)
        ax.text(x + 38, height - 22, str(kind).replace("_", "-"), fontsize=9.5, va="center", color=INK)
    x = 60 + 190 * len(COLOURS)
    ax.plot([x, x + 30], [height - 22, height - 22], color="#B8B8B8", linewidth=1.2)
    ax.text(x + 38, height - 22, "nothing moves", fontsize=9.5, va="center", color=INK)
