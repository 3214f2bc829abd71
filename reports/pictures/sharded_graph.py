"""Picture of the operator graph: how a plan shards every operator, and which collectives run between them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from meshwise.reports.document import clean_text
from meshwise.reports.pictures.figure import INK, QUIET, add_axes, header, open_sheet
from meshwise.simulator.collective import Collective
from meshwise.simulator.operator_graph import BATCH, Operator, OperatorGraph
from meshwise.simulator.units import format_size
from meshwise.strategies.lowering.costs.kinds import classify_blocks
from meshwise.strategies.lowering.costs.layout import BlockLayout
from meshwise.strategies.lowering.costs.operator import find_gradient_layout, list_transfers
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.sharding import ShardingSpec

COLOURS = {
    Collective.ALL_REDUCE: "#CF4A16",
    Collective.REDUCE_SCATTER: "#B57600",
    Collective.ALL_GATHER: "#1D5B96",
    Collective.ALL_TO_ALL: "#5A2A82",
}
"""Colours of edges, by the most expensive collective on the edge."""
_COST_ORDER = tuple(COLOURS)
_STILL_COLOUR = "#B8B8B8"
_FILLS = {
    "cut along what it sums": "#FBE3CF",
    "along a dim of its result": "#D6E8F7",
    "along the batch": "#DDF0DC",
    "whole on every rank": "#F4F4F4",
}
_SUM_FILL, _RESULT_FILL, _BATCH_FILL, _WHOLE_FILL = _FILLS
_BOX_HEIGHT, _GAP, _TOP, _WIDTH = 50, 44, 180, 400
_MIN_HEIGHT = 420
_MAX_OPERATORS = 60
_PITCH, _MAX_BLOCKS = 520, 3
INPUT = -1
"""Index that stands for the previous block as the producer of a tensor."""
Point = tuple[float, float]
Moves = tuple[tuple[Collective, int], ...]
"""Collectives of an edge, each with its bytes."""


@dataclass(frozen=True, slots=True)
class Edge:
    """The redistributions between two operators, which are indices in the block; `INPUT` is the previous block."""

    source: int
    target: int
    forward: Moves = ()
    backward: Moves = ()

    @property
    def costliest_collective(self) -> Collective | None:
        """The most expensive collective of the edge, which gives it its colour."""
        collectives = [kind for kind, _ in (*self.forward, *self.backward)]
        return min(collectives, key=_COST_ORDER.index) if collectives else None


def list_edges(layout: BlockLayout) -> tuple[Edge, ...]:
    """Return the edges into and inside a block, each with its collectives and bytes, forward and backward.

    Readers that need a tensor in the same layout share one redistribution; the edge to the first of them has it.
    """
    block = layout.block
    producers = dict.fromkeys(block.inputs, INPUT)
    edge_by_ends: dict[tuple[int, int], Edge] = {}
    redistributed: set[tuple[str, ShardingSpec]] = set()
    for index, operator in enumerate(block.operators):
        for name in (input_name for input_name in operator.inputs if input_name in producers):
            edge = edge_by_ends.get((producers[name], index), Edge(producers[name], index))
            reading = name, layout.input_layout(operator, name)
            forward, backward = ((), ()) if reading in redistributed else _list_moves(layout, operator, name)
            redistributed.add(reading)
            moves = edge.forward + forward, edge.backward + backward
            edge_by_ends[edge.source, index] = Edge(edge.source, index, *moves)
        producers |= dict.fromkeys(operator.outputs, index)
    return tuple(edge_by_ends.values())


def _list_moves(layout: BlockLayout, operator: Operator, name: str) -> tuple[Moves, Moves]:
    produced, target = layout.produced_layouts[name], layout.input_layout(operator, name)
    summed = produced.without_partial if layout.adds_before_cut(operator) else produced
    forward = (*_list_collectives(layout, name, produced, summed), *_list_collectives(layout, name, summed, target))
    if not layout.has_gradient(name):
        return forward, ()
    gradient = find_gradient_layout(layout, name, target)
    return forward, tuple(_list_collectives(layout, name, gradient, produced.without_partial))


def _list_collectives(
    layout: BlockLayout, name: str, source: ShardingSpec, target: ShardingSpec
) -> Iterator[tuple[Collective, int]]:
    if source == target:
        return
    for move, size in list_transfers(layout, name, source, target):
        if layout.mesh.size(move.axis) > 1:
            yield move.collective, round(size)


def draw_sharded_graph(graph: OperatorGraph, plan: Plan, path: Path | str) -> None:
    """Draw the operators of the first three kinds of blocks with their shardings and the collectives between them.

    Blocks with the same shardings and the same input layouts are drawn once.

    Parameters
    ----------
    path
        Where to write it: .png or .svg.

    Raises
    ------
    ValueError
        Where a block has more operators than a picture shows.
    """
    block_kinds = classify_blocks(graph, plan.shardings)
    kind_counts = Counter(block_kinds.kind_names.values())
    shown_kinds = [(name, kind) for name, kind in block_kinds.by_name.items() if kind_counts[name]][:_MAX_BLOCKS]
    max_operators = max(len(kind.block.operators) for _, kind in shown_kinds)
    if max_operators > _MAX_OPERATORS:
        raise ValueError(f"a picture shows blocks of at most {_MAX_OPERATORS} operators, met {max_operators}")
    height = max(_MIN_HEIGHT, _TOP + max_operators * (_BOX_HEIGHT + _GAP) + 40)
    num_hidden = len(kind_counts) - len(shown_kinds)
    with open_sheet(path, height) as figure:
        facts = plan.describe() + (f"; {num_hidden} other kinds of blocks are not shown" if num_hidden else "")
        header(figure, f"{clean_text(graph.name, 60)}: how every operator is cut", facts)
        ax = add_axes(figure, 0, 0, 1600, height)
        ax.set_xlim(0, 1600)
        ax.set_ylim(height, 0)
        ax.set_axis_off()
        ax.patch.set_alpha(0.0)
        for column, (name, kind) in enumerate(shown_kinds):
            layout = BlockLayout.from_kind(kind, plan.mesh, plan.sizes[0])
            title = f"{clean_text(name, 30)}" + (f" x {kind_counts[name]}" if kind_counts[name] > 1 else "")
            _draw_block(ax, layout, title, 90 + (1600 - _PITCH * len(shown_kinds)) / 2 + column * _PITCH)
        _draw_legend(ax, height)


def _draw_block(ax: Axes, layout: BlockLayout, title: str, left_edge: float) -> None:
    ax.text(left_edge, _TOP - _GAP - 8, title, fontsize=14, fontweight="bold", va="bottom")
    for place, operator in enumerate(layout.block.operators):
        _draw_operator(ax, layout, operator, left_edge, _operator_top(place))
    lanes = 0
    for edge in list_edges(layout):
        lanes += _draw_edge(ax, edge, left_edge, lanes)


def _operator_top(place: int) -> float:
    return _TOP + place * (_BOX_HEIGHT + _GAP)


def _draw_operator(ax: Axes, layout: BlockLayout, operator: Operator, left_edge: float, top: float) -> None:
    cut = _format_cuts(layout, operator)
    style: dict[str, Any] = {"facecolor": _FILLS[_choose_fill(operator, cut)], "edgecolor": QUIET, "linewidth": 0.8}
    boxstyle = "round,pad=0,rounding_size=6"
    ax.add_patch(FancyBboxPatch((left_edge, top), _WIDTH, _BOX_HEIGHT, boxstyle=boxstyle, **style))
    name = clean_text(operator.name, 30)
    ax.text(left_edge + 10, top + 16, name, fontsize=11, fontweight="bold", va="center", color=INK)
    gathered = [name for name in operator.parameters if layout.gathers_again(operator, name)]
    note = f"gathers {', '.join(gathered)}" if gathered else str(operator.kind).replace("_", " ")
    ax.text(left_edge + _WIDTH - 10, top + 16, clean_text(note, 30), fontsize=9, va="center", ha="right", color=QUIET)
    dims = clean_text(_format_dims(layout, operator, cut), 56)
    ax.text(left_edge + 10, top + 36, dims, fontsize=9, va="center", color=INK)


def _format_cuts(layout: BlockLayout, operator: Operator) -> dict[str, str]:
    """Return the sharded dims of an operator, each with its mesh axes and their sizes as text."""
    cuts = layout.shardings[operator.name].cuts
    axes_of = {dim: [axis for axis in dim_axes if layout.mesh.size(axis) > 1] for dim, dim_axes in cuts}
    return {
        dim: " ".join(f"/ {axis} {layout.mesh.size(axis)}" for axis in split_axes)
        for dim, split_axes in axes_of.items()
        if split_axes
    }


def _choose_fill(operator: Operator, cut: dict[str, str]) -> str:
    if not cut:
        return _WHOLE_FILL
    if any(dim in operator.reduced for dim in cut):
        return _SUM_FILL
    return _BATCH_FILL if set(cut) == {BATCH} else _RESULT_FILL


def _format_dims(layout: BlockLayout, operator: Operator, cut: dict[str, str]) -> str:
    """Return the dims of an operator of size above 1, with sizes and cuts; sharded dims come first."""
    sizes = {dim: size * (layout.microbatch if dim == BATCH else 1) for dim, size in operator.dims}
    shown_dims = sorted((dim for dim, size in sizes.items() if size > 1), key=lambda dim: dim not in cut)
    return ", ".join(f"{dim} {sizes[dim]:,} {cut.get(dim, '')}".strip() for dim in shown_dims) or "one number"


def _draw_edge(ax: Axes, edge: Edge, left_edge: float, lane: int) -> int:
    """Draw an edge; return 1 if it skips operators and so takes a lane beside them, else 0."""
    colour = COLOURS[edge.costliest_collective] if edge.costliest_collective is not None else _STILL_COLOUR
    width = 2.0 if edge.costliest_collective is not None else 1.0
    start, end = _operator_top(edge.source) + _BOX_HEIGHT, _operator_top(edge.target)
    if edge.target == edge.source + 1:
        x = left_edge + _WIDTH / 2
        ax.add_patch(_make_arrow((x, start), (x, end), colour, width))
        _label_edge(ax, edge, x + 12, (start + end) / 2, colour)
        return 0
    start, end = start - _BOX_HEIGHT * (0.25 if edge.source != INPUT else 0.0), end + _BOX_HEIGHT * 0.25
    bend = 14 + 12 * (lane % 7)
    ax.plot([left_edge, left_edge - bend, left_edge - bend], [start, start, end], color=colour, linewidth=width)
    ax.add_patch(_make_arrow((left_edge - bend, end), (left_edge, end), colour, width))
    _label_edge(ax, edge, left_edge - bend - 150, end - 14, colour)
    return 1


def _make_arrow(start: Point, end: Point, colour: str, width: float) -> FancyArrowPatch:
    return FancyArrowPatch(
        start, end, color=colour, linewidth=width, arrowstyle="-|>", mutation_scale=10.0, shrinkA=0.0, shrinkB=0.0
    )


def _label_edge(ax: Axes, edge: Edge, x: float, y: float, colour: str) -> None:
    lines = [*_format_moves(edge.forward, "\u2193"), *_format_moves(edge.backward, "\u2191")]
    ax.text(x, y, "\n".join(lines), fontsize=9, va="center", color=colour, linespacing=1.15)


def _format_moves(moves: Sequence[tuple[Collective, int]], arrow: str) -> Iterator[str]:
    if moves:
        move_counts = Counter(f"{str(kind).replace('_', '-')} {format_size(size)}" for kind, size in moves)
        yield f"{arrow} " + ", ".join(f"{count} x {text}" if count > 1 else text for text, count in move_counts.items())


def _draw_legend(ax: Axes, height: int) -> None:
    x = 40.0
    for fill, colour in _FILLS.items():
        ax.add_patch(FancyBboxPatch((x, height - 28), 16, 12, boxstyle="square,pad=0", fc=colour, ec=QUIET, lw=0.6))
        ax.text(x + 22, height - 22, fill, fontsize=9, va="center", color=INK)
        x += 48 + 6.6 * len(fill)
    lines = {str(kind).replace("_", "-"): colour for kind, colour in COLOURS.items()} | {"nothing moves": _STILL_COLOUR}
    x += 10
    for word, colour in lines.items():
        ax.plot([x, x + 22], [height - 22, height - 22], color=colour, linewidth=2.0)
        ax.text(x + 28, height - 22, word, fontsize=9, va="center", color=INK)
        x += 52 + 6.6 * len(word)
    ax.text(x, height - 22, "\u2193 forward  \u2191 backward", fontsize=9, va="center", color=INK)
